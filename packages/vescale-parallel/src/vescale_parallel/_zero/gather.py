"""The one autograd node of a unit: stored shards in, gathered values out, one reduction back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from vescale_parallel._errors import ParallelError


class Gathers(Protocol):
    """What the node needs of a unit."""

    def views(self) -> list[Tensor]:
        """Return the gathered values, one per stored parameter, without a history."""

    def reduce(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """From contributions to full parameters to gradients of what is stored. Collective."""


class GatherUnit(torch.autograd.Function):
    """Inputs are the local leaves of a unit, outputs the gathered values, in the same order.

    The node is made before any other of its unit, so the engine runs it after all of them: when it
    runs, every gradient of the unit has arrived, and nothing has to be counted.
    """

    @staticmethod
    def forward(ctx: Any, unit: Gathers, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Return the gathered values."""
        # None and not zeros for what was not used: its gradient stays None, as on one device.
        ctx.set_materialize_grads(False)
        ctx.unit = unit
        # Detached: views of a buffer that is written to would have their nodes made anew.
        outputs = tuple(view.detach() for view in unit.views())
        pairs = zip(leaves, outputs, strict=True)
        ctx.mark_non_differentiable(*(out for leaf, out in pairs if not leaf.requires_grad))
        return outputs

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
    """Return the gathered values of a unit, recorded where a gradient is wanted."""
    apply: Callable[..., tuple[Tensor, ...]] = GatherUnit.apply
    return apply(unit, *leaves)
