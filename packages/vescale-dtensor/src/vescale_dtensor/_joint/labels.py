"""Labels of traced operators: which step of a program, and which pass over it, they come from.

The steps of the forward are labelled as they run. In the backward the autograd node of a step's
result comes first, and what follows is that step's until the next labelled node comes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from vescale_dtensor._torch.compat import traced_graph


@dataclass(frozen=True)
class Label:
    """Where an operator comes from.

    Attributes:
        direction: "forward", "backward", "total" (of a gradient) or "update".
        op: the public function that was called.
        line: of the user's code.
        parameter: of which the gradient is summed.
        module: that called the function, by its name in the model; "" outside of its parts.
    """

    direction: str
    op: str = ""
    line: str = ""
    parameter: str = ""
    module: str = ""


class Labels:
    """Puts labels on the nodes that appear in the graph that is traced."""

    def __init__(self) -> None:
        self._now: Label | None = None
        self._seen: fx.Node | None = None

    def enter(self, label: Label | None) -> None:
        """What is traced from here on comes from `label`."""
        graph = traced_graph()
        if graph is None:
            return
        for node in reversed(graph.nodes):
            if node is self._seen:
                break
            if self._now is not None:
                node.meta.setdefault("label", self._now)
        self._seen, self._now = next(iter(reversed(graph.nodes)), None), label


class LabelledRun(fx.Interpreter):
    """Runs a program's graph, and labels what is traced of it."""

    def __init__(self, module: fx.GraphModule, labels: Labels) -> None:
        super().__init__(module)
        self._labels = labels

    def run_node(self, n: fx.Node) -> Any:
        """Run one step."""
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        op, line, module = (str(n.meta.get(key, "")) for key in ("op", "line", "module"))
        label = Label("forward", op, line, module=module)
        self._labels.enter(label)
        value = super().run_node(n)
        self._labels.enter(None)
        back = replace(label, direction="backward")
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                # Before the node runs; the first label of a node that several steps return holds.
                tensor.grad_fn.register_prehook(lambda _, back=back: self._labels.enter(back))
        return value
