"""Gives a rule's own local call the call, its plan, and the layouts in it."""

from __future__ import annotations

from dataclasses import dataclass

from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OpPlan


@dataclass(frozen=True)
class LocalContext:
    """What a rule's own local call gets to know: the call and its plan.

    Attributes:
        call: the parsed call.
        plan: the plan that runs.
    """

    call: OpCall
    plan: OpPlan

    def input_layout(self, index: int) -> Layout:
        """Layout of an operand after it was redistributed."""
        return self.plan.uses[index].layout

    def output_layout(self, index: int = 0) -> Layout:
        """Layout of an output."""
        return self.plan.outputs[index]

    def output_shape(self, index: int = 0) -> Shape:
        """Global shape of an output whose rule states shapes."""
        assert self.plan.strategy.shapes is not None
        return self.plan.strategy.shapes[index]

    def local_output_shape(self, index: int = 0) -> Shape:
        """Local shape of an output whose rule states shapes."""
        return local_shape(self.output_layout(index), self.output_shape(index))
