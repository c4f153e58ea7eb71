"""Gradients that a layer above keeps outside of `.grad`, where torch's contract finds them still.

Such a layer packs contributions of several backwards into memory of its own and reduces them once.
Meanwhile `.grad` reads as what they are: a DTensor that is partial on the axes over which the
parameter is sharded flat, in the layer's memory. So `zero_grad` finds them: setting `.grad` to None
or to another gradient drops them, and what is written in place reaches them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vescale_dtensor._autograd.cotangent import cotangent_layout
from vescale_dtensor._autograd.leaf_gradient import LeafGradient
from vescale_dtensor._autograd.local_use import leaf_gradient_of
from vescale_dtensor._autograd.uses import zero_off_first
from vescale_dtensor._errors import DTensorError
from vescale_dtensor._layout.placements import Partial, RaggedShard
from vescale_dtensor._tensor.dtensor import DTensor, wrap_as
from vescale_dtensor._tensor.lineage import note_part


class GradientKeeper(Protocol):
    """What keeps contributions to the gradient of one parameter. No method communicates."""

    def add(self, shard: Tensor) -> None:
        """Add what this rank's local `.grad` held, of the shape of the local tensor."""

    def drop(self) -> None:
        """Forget what was kept: `.grad` was set."""


class KeptGradient:
    """The gradient of a leaf that is kept elsewhere.

    Attributes:
        keeper: holds the memory of it.
    """

    __slots__ = ("_wrapper", "keeper")

    def __init__(self, wrapper: DTensor, keeper: GradientKeeper) -> None:
        self._wrapper, self.keeper = wrapper, keeper

    @property
    def wrapper(self) -> DTensor:
        """What `.grad` reads as."""
        return self._wrapper

    def gradient(self, leaf: LeafGradient) -> DTensor:
        """The whole gradient; what `.grad` holds itself becomes part of what is kept."""
        local = leaf.local
        if local.grad is not None:
            found = local.grad.detach()
            with torch.no_grad():
                # A total is on all coordinates, and is to be counted once.
                if leaf.is_reduced:
                    found = zero_off_first(found, leaf.layout, leaf.partial)
                self.keeper.add(found)
            local.grad = None
            leaf.forget_gradient()
        return self.wrapper

    def drop(self) -> None:
        """`.grad` is set to something else."""
        self.keeper.drop()


def keep_gradient(parameter: Tensor, contribution: Tensor, keeper: GradientKeeper) -> None:
    """Let `.grad` of a parameter tell of contributions that are not in it yet.

    Args:
        parameter: a leaf, sharded flat (`RaggedShard`) over axes that the layer above reduces.
        contribution: this rank's, as large as the local values without that sharding; a view of the
            memory that will be reduced.
        keeper: is told when `.grad` is set, or holds something that has to be added.

    Raises:
        DTensorError: the parameter is no leaf DTensor.
    """
    if not isinstance(parameter, DTensor) or not parameter._local_tensor.is_leaf:
        raise DTensorError(f"keep_gradient: {parameter!r} is not a leaf DTensor")
    leaf = leaf_gradient_of(parameter)
    layout = cotangent_layout(leaf.layout, leaf.partial)
    placements = [
        Partial("sum") if isinstance(one, RaggedShard) else one for one in layout.placements
    ]
    with torch.no_grad():
        wrapper = wrap_as(contribution, layout.with_placements(placements), parameter.shape)
    note_part(wrapper, parameter)
    leaf.kept = KeptGradient(wrapper, keeper)
    parameter._leaf_holds.gradient = None  # so that `.grad` looks for what is kept


def release_kept_gradient(parameter: Tensor) -> None:
    """Say that nothing is kept of the gradient of a parameter: it was reduced, or dropped."""
    leaf = parameter._leaf_gradient if isinstance(parameter, DTensor) else None
    if leaf is not None:
        leaf.kept = None
        holds = leaf.holds
        if holds is not None:
            holds.gradient = leaf.wrapper  # that was read before, if somebody has it still
