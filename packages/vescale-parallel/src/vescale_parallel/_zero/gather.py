"""The one autograd node of a unit: stored shards in, gathered values out, one reduction back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from vescale_parallel._errors import ParallelError


class Gathers(Protocol):
    """What the node needs of a unit."""

    def aliases(self) -> tuple[list[Tensor], list[int]]:
        """Return the gathered values by use, without a history, and which get no gradient."""

    def reduce(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """From what arrives at the aliases to gradients of what is stored. Collective."""


class GatherUnit(torch.autograd.Function):
    """Inputs are the local leaves of a unit, outputs the gathered values, an alias for each use.

    The node is made before any other of its unit, so the engine runs it after all of them: when it
    runs, every gradient of the unit has arrived, and nothing has to be counted.
    """

    @staticmethod
    def forward(ctx: Any, unit: Gathers, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Return the aliases."""
        # None and not zeros for what was not used: its gradient stays None, as on one device.
        ctx.set_materialize_grads(False)
        ctx.unit = unit
        outputs, frozen = unit.aliases()
        if frozen:
            ctx.mark_non_differentiable(*(outputs[number] for number in frozen))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Reduce all gradients of the unit in one collective.

        Raises:
            ParallelError: this backward is itself recorded, which a reduction is not.
        """
        if torch.is_grad_enabled() and any(g is not None for g in gradients):
            raise ParallelError(
                "create_graph=True: gradients of parameters that are sharded by zero=... cannot be "
                "differentiated again. Take the gradient with respect to activations, or "
                "parallelize with zero=0 for this step."
            )
        return (None, *ctx.unit.reduce(gradients))


def gather_unit(unit: Gathers, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the aliases of a unit's gathered values, recorded where a gradient is wanted."""
    apply: Callable[..., tuple[Tensor, ...]] = GatherUnit.apply
    return apply(unit, *leaves)
