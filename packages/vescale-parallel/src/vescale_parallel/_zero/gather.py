"""The two autograd nodes of a unit: stored shards in, gathered values out, one reduction back.

Two, since the engine frees what arrives at a node when it has run: gradients of the gathered values
are packed in the first, and are gone when the second one communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch import Tensor

from vescale_parallel._errors import ParallelError

_wants = attrgetter("requires_grad")

Kept = list[Tensor | None]
"""Gradients that are in no buffer."""


@dataclass(slots=True)
class NodeState:
    """What one run of a unit hands from its first node in backward to its second.

    Attributes:
        is_early: whether other units compute between the two, so the first starts the reduction.
        kept: gradients that are in no buffer.
        started: the reductions that are under way; None: the second node does it all.
    """

    is_early: bool = False
    kept: Kept = field(default_factory=list)
    started: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True)
class Early:
    """The second node of a unit, made before those of the units that run ahead of it.

    The engine takes nodes that were made later first: so it comes to this one when the backward of
    those units is done, and their computing hides the reduction.

    Attributes:
        stored: the output of the node.
        passed: what it will be handed.
        leaves: its inputs.
        trained: which of them wanted a gradient then.
    """

    stored: Tensor
    passed: NodeState
    leaves: Sequence[Tensor]
    trained: Sequence[bool]

    def fits(self, leaves: Sequence[Tensor]) -> bool:
        """Whether it leads back to these leaves, all as they are now."""
        # Without a line of Python for each: this is asked of every unit at every step.
        return (
            torch.is_grad_enabled()
            and len(leaves) == len(self.leaves)
            and all(map(is_, leaves, self.leaves))
            and list(map(_wants, leaves)) == self.trained
        )


class Gathers(Protocol):
    """What the nodes need of a unit."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def aliases(self) -> tuple[list[Tensor], list[int]]:
        """Return the gathered values by use, without a history, and which get no gradient."""

    def pack(self, gradients: Sequence[Tensor | None]) -> Kept:
        """Pack what has arrived at the aliases; return what belongs into no buffer."""

    def start_reduce(self) -> Sequence[Any] | None:
        """Start to reduce what was packed; None: not now. Collective."""

    def reduce(self, kept: Kept, started: Sequence[Any] | None) -> list[Tensor | None]:
        """From what was packed, or is on its way, to gradients of what is stored. Collective."""


class StoredUnit(torch.autograd.Function):
    """Inputs are the local leaves of a unit; its output only leads back to them.

    It and the node after it are made before any other that uses the unit's values, so the engine
    runs them after all of them, one after the other: nothing has to be counted.
    """

    @staticmethod
    def forward(ctx: Any, unit: Gathers, passed: NodeState, *leaves: Tensor) -> Tensor:
        """Return an empty tensor."""
        ctx.unit, ctx.passed = unit, passed
        # Not that of the leaves, which may lie on the host: the engine would run the node in
        # another thread, beside those of other units, and ranks reduce in different orders.
        return torch.empty(0, device=unit.device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        """Reduce all gradients of the unit in one collective."""
        passed: NodeState = ctx.passed
        # Taken: a graph that is kept may be run again.
        started, passed.started = passed.started, None
        return (None, None, *ctx.unit.reduce(passed.kept, started))


class GatherUnit(torch.autograd.Function):
    """Its input leads to the stored leaves, its outputs are the gathered values, by use."""

    @staticmethod
    def forward(ctx: Any, unit: Gathers, passed: NodeState, stored: Tensor) -> tuple[Tensor, ...]:
        """Return the aliases."""
        # None and not zeros for what was not used: its gradient stays None, as on one device.
        ctx.set_materialize_grads(False)
        ctx.unit, ctx.passed = unit, passed
        ctx.stands_for_leaves = True
        outputs, frozen = unit.aliases()
        if frozen:
            ctx.mark_non_differentiable(*(outputs[number] for number in frozen))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Pack all gradients of the unit.

        Raises:
            ParallelError: this backward is itself recorded, which a reduction is not.
        """
        first = None
        for first in gradients:
            if first is not None:
                break
        if first is not None and torch.is_grad_enabled():
            raise ParallelError(
                "create_graph=True: gradients of parameters that are sharded by zero=... cannot be "
                "differentiated again. Take the gradient with respect to activations, or "
                "parallelize with zero=0 for this step."
            )
        passed: NodeState = ctx.passed
        passed.kept = ctx.unit.pack(gradients)
        if passed.is_early:
            passed.started = ctx.unit.start_reduce()
        device = None if first is None else first.device
        # Not None, without which the engine would not go on to the stored leaves.
        return None, None, torch.empty(0, device=device)


def early_node(unit: Gathers, leaves: Sequence[Tensor]) -> Early | None:
    """Make the node that ends the backward of a unit, before the unit runs.

    None where no backward comes to it.
    """
    passed = NodeState(is_early=True)
    trained = list(map(_wants, leaves))
    if True not in trained:
        return None
    return Early(_stored(unit, passed, leaves), passed, leaves, trained)


def gather_unit(
    unit: Gathers, leaves: Sequence[Tensor], early: Early | None = None
) -> tuple[Tensor, ...]:
    """Return the aliases of a unit's gathered values, recorded where a gradient is wanted.

    Args:
        unit: it.
        leaves: local tensors of what it stores.
        early: the node at the end of its backward, where one was made already.
    """
    if not leaves:  # the root of a model whose units hold everything
        return ()
    gathered: Callable[..., tuple[Tensor, ...]] = GatherUnit.apply
    if early is not None and early.fits(leaves):
        return gathered(unit, early.passed, early.stored)
    passed = NodeState()
    return gathered(unit, passed, _stored(unit, passed, leaves))


def _stored(unit: Gathers, passed: NodeState, leaves: Sequence[Tensor]) -> Tensor:
    apply: Callable[..., Tensor] = StoredUnit.apply
    return apply(unit, passed, *leaves)
