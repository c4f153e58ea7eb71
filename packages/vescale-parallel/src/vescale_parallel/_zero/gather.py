"""The two autograd nodes of a unit: stored shards in, gathered values out, one reduction back.

Two, since the engine frees what arrives at a node when it has run: gradients of the gathered values
are packed in the first, and are gone when the second one communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from vescale_parallel._errors import ParallelError

Kept = list[Tensor | None]
"""Gradients that are in no buffer, from one node to the other."""


class Gathers(Protocol):
    """What the nodes need of a unit."""

    def aliases(self) -> tuple[list[Tensor], list[int]]:
        """Return the gathered values by use, without a history, and which get no gradient."""

    def pack(self, gradients: Sequence[Tensor | None]) -> Kept:
        """Pack what has arrived at the aliases; return what belongs into no buffer."""

    def reduce(self, kept: Kept) -> list[Tensor | None]:
        """From what was packed to gradients of what is stored. Collective."""


class StoredUnit(torch.autograd.Function):
    """Inputs are the local leaves of a unit; its output only leads back to them.

    It and the node after it are made before any other that uses the unit's values, so the engine
    runs them after all of them, one after the other: nothing has to be counted.
    """

    @staticmethod
    def forward(ctx: Any, unit: Gathers, kept: Kept, *leaves: Tensor) -> Tensor:
        """Return an empty tensor."""
        ctx.unit, ctx.kept = unit, kept
        return torch.empty(0, device=leaves[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        """Reduce all gradients of the unit in one collective."""
        return (None, None, *ctx.unit.reduce(ctx.kept))


class GatherUnit(torch.autograd.Function):
    """Its input leads to the stored leaves, its outputs are the gathered values, by use."""

    @staticmethod
    def forward(ctx: Any, unit: Gathers, kept: Kept, stored: Tensor) -> tuple[Tensor, ...]:
        """Return the aliases."""
        # None and not zeros for what was not used: its gradient stays None, as on one device.
        ctx.set_materialize_grads(False)
        ctx.unit, ctx.kept = unit, kept
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
        if torch.is_grad_enabled() and any(g is not None for g in gradients):
            raise ParallelError(
                "create_graph=True: gradients of parameters that are sharded by zero=... cannot be "
                "differentiated again. Take the gradient with respect to activations, or "
                "parallelize with zero=0 for this step."
            )
        ctx.kept[:] = ctx.unit.pack(gradients)
        device = next((g.device for g in gradients if g is not None), None)
        # Not None, without which the engine would not go on to the stored leaves.
        return None, None, torch.empty(0, device=device)


def gather_unit(unit: Gathers, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the aliases of a unit's gathered values, recorded where a gradient is wanted."""
    if not leaves:  # the root of a model whose units hold everything
        return ()
    stored: Callable[..., Tensor] = StoredUnit.apply
    gathered: Callable[..., tuple[Tensor, ...]] = GatherUnit.apply
    kept: Kept = []
    return gathered(unit, kept, stored(unit, kept, *leaves))
