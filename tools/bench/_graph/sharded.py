"""ZeRO-3 on a graph: the variants of this project for the benchmark `graph`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from vescale_dtensor import Joint
from vescale_parallel import GraphError, Plan, graph, memory, parallelize

from tools.bench._graph.step_parts import Part, parts_of
from tools.bench._train.model import Sizes, seeded
from tools.bench._train.ours import PLAN_ZERO3
from tools.bench._train.training import adamw

CAP_BYTES = 2 << 20
WIDE = 256
"""Hidden size from which units are larger than buckets: nothing is merged that would hold memory,
and there is room, below what FSDP2 takes, for what travels while the backward goes on."""


_STEP = 0.05  # of what a graph makes


def _recomputed(module: fx.GraphModule, share: float, before: int) -> tuple[fx.GraphModule, float]:
    """The graph with a part computed twice, and the bytes that it was asked to take."""
    while True:
        try:
            return graph.recompute(module, share * before).graph_module, share * before
        except GraphError:
            if share >= 1:
                raise
            share = min(1.0, share + _STEP)


class OnGraph:
    """The whole training step as one graph; the flags say what is done with it, in their order.

    `share`: of what it makes as traced, which is all that it may take: the rest is computed twice.
    Where gathers and gradients rule, so little is out of reach, and more is allowed in steps.
    """

    def __init__(
        self,
        sizes: Sizes,
        mesh: DeviceMesh,
        *,
        plan: Plan = PLAN_ZERO3,
        share: float | None = None,
        scheduled: bool = False,
        planned: bool = False,
        compiled: bool = False,
    ) -> None:
        self.model = parallelize(seeded(sizes), mesh, plan)
        self.optimizer: Optimizer = adamw(self.model.parameters())
        self.share, self.scheduled, self.planned, self.compiled = (
            share,
            scheduled,
            planned,
            compiled,
        )
        self.wide = sizes.hidden >= WIDE
        self._step: Joint | None = None

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The graph is made at the first step."""
        if self._step is None:
            self._step = self._made(tokens, targets)
        loss: Tensor = self._step(tokens, targets)
        return loss

    def _made(self, tokens: Tensor, targets: Tensor) -> Joint:
        model = self.model
        made = graph.train_step(model, lambda x, y: model(x, y), tokens, targets)
        made = made.with_optimizer(self.optimizer)
        bound: float | Literal["traced"] | None = None if self.wide else "traced"
        if self.share is not None:
            before = memory.plan(made.graph_module, solver="rules", seconds=0).program_peak
            # Buckets take what is left of it, away from the peak: less gave them no more room.
            smaller, bound = _recomputed(made.graph_module, self.share, before)
            made = made.running(smaller)
        if self.scheduled:
            found = graph.schedule(made.graph_module, cap_bytes=CAP_BYTES, memory_bytes=bound)
            made = made.running(found.graph_module)
        if self.planned:
            made = made.running(memory.plan(made.graph_module, solver="rules", seconds=0).apply())
        if self.compiled:
            made = made.running(graph.compile_regions(made.graph_module).graph_module)
        return made

    def parts_alone(self, batch: Sequence[Tensor]) -> dict[str, Part]:
        """What the step is made of, each by itself; of a graph that is no compiled code."""
        return {} if self._step is None or self.compiled else parts_of(self._step, batch)

    def value(self, loss: Tensor) -> float:
        """The global loss: `item` of a distributed tensor is that."""
        return loss.item()
