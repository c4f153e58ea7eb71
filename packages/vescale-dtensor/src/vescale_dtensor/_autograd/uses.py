"""Varying and invariant uses of replicated activations: the typed rule for gradients of non-leaves.

Along a mesh axis where a tensor is replicated, its cotangent is either *invariant* (every
coordinate has all of it) or *varying* (every coordinate has one term of a sum), depending on the
operation that used the tensor. So a replicated activation has one alias per set of varying axes,
all of them outputs of a single autograd node. Backward sees every cotangent at once: it keeps the
invariant ones on coordinate 0 only, where others are partial, adds, and communicates once.

Aliases are made by `detach()`, never as views: an optimizer's write to the base would make autograd
rebuild the nodes of views. The node saves no tensor (checkpointing counts those), and its context
holds layouts and never the wrapper, so that no cycle keeps memory alive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.cotangent import (
    GradType,
    TypedMove,
    dual,
    is_noop,
    redistribute_local,
)
from vescale_dtensor._layout.layout import Layout, axes_in
from vescale_dtensor._layout.placements import Partial
from vescale_dtensor._torch.bounded_cache import BoundedCache
from vescale_dtensor._torch.compat import applied
from vescale_dtensor._torch.overridable import overridable

# There is one alias per subset of these axes, so their number is bounded; uses that vary on further
# axes get a node of their own, which costs one more collective in backward.
_MOST_SHARED_AXES = 3
_UNKNOWN: Any = object()


@dataclass(frozen=True)
class CotangentReduction:
    """The backward of a shared-use node: a cotangent of `target` becomes one of the source.

    Attributes:
        source: layout of the source.
        source_varying: axes on which the source is used varyingly, so that its cotangent may stay
            partial.
        target: layout of the tensor whose aliases the shared-use node's outputs are.
        scale: factor for averaged partial sums on either side.
        comm_dtype: dtype in which the cotangent is sent; None: its own.
    """

    source: Layout
    source_varying: int
    target: Layout
    scale: float = 1.0
    comm_dtype: torch.dtype | None = None
    _typed_moves: BoundedCache[tuple[int, tuple[int, ...]], TypedMove | None] = field(
        default_factory=lambda: BoundedCache(256), init=False, repr=False, compare=False
    )

    def reduce(
        self, masks: tuple[int, ...], cotangents: tuple[Tensor | None, ...], shape: Any
    ) -> Any:
        """Combine the cotangents of all aliases into the one of the source. Collective."""
        found = sum_cotangents(self.target, masks, cotangents, shape)
        if found is None:
            return None
        total, varying = found
        move = self._typed_move(varying, tuple(shape))
        if move is None:
            pass
        elif self.comm_dtype is None:
            total = redistribute_local(total, move)
        else:
            total = redistribute_local(total.to(self.comm_dtype), move).to(total.dtype)
        return total if self.scale == 1.0 else total * self.scale

    def _typed_move(self, varying: int, shape: tuple[int, ...]) -> TypedMove | None:
        """The redistribution from the aliases' cotangent to the source's; None if they agree."""
        known: TypedMove | None = self._typed_moves.get((varying, shape), _UNKNOWN)
        if known is _UNKNOWN:
            arrived = dual(GradType(self.target, varying))
            left = dual(GradType(self.source, self.source_varying))
            known = None if arrived == left else TypedMove(arrived, left, shape)
            self._typed_moves.store((varying, shape), known)
        return known

    def is_identity(self, masks: tuple[int, ...], shape: Any) -> bool:
        """Whether backward hands the cotangent on unchanged, on every rank."""
        if len(masks) != 1 or self.scale != 1.0 or self.comm_dtype is not None:
            return False
        move = self._typed_move(masks[0], tuple(shape))
        return move is None or is_noop(move)


class SharedUseNode(torch.autograd.Function):
    """One node, one output per alias. See the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        data: Tensor,
        masks: tuple[int, ...],
        reduction: CotangentReduction,
        shape: Any,
    ) -> tuple[Tensor, ...]:
        """Return one alias of `data` for each mask."""
        # An alias that nobody used must arrive as None: zeros would be added, and sent.
        ctx.set_materialize_grads(False)
        ctx.masks, ctx.owed, ctx.shape = masks, reduction, shape
        # Never views: an optimizer's write to what they alias would make torch rebuild the nodes of
        # views, and the second step would fail. detach() shares memory and version, and no history.
        return tuple(data.detach() for _ in masks)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Return the source's cotangent: one collective at most per kind that is owed."""
        return ctx.owed.reduce(ctx.masks, cotangents, ctx.shape), None, None, None, None


class _SingleUse(torch.autograd.Function):
    """A shared-use node with one alias that changes nothing of a cotangent, but its type."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, data: Tensor, mask: int, reduction: CotangentReduction, shape: Any
    ) -> Tensor:
        ctx.mask, ctx.owed, ctx.shape = mask, reduction, shape
        return data.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        if torch.is_grad_enabled():  # its type matters to second derivatives
            cotangent = ctx.owed.reduce((ctx.mask,), (cotangent,), ctx.shape)
        return cotangent, None, None, None, None


_shared_use_node, _single_use = applied(SharedUseNode), applied(_SingleUse)


def alias_for_use(
    source: Tensor, data: Tensor, mask: int, reduction: CotangentReduction, shape: Any
) -> Tensor:
    """The alias of a node with nothing to do in backward; see `CotangentReduction.is_identity`."""
    alias: Tensor = _single_use(source, data, mask, reduction, shape)
    return alias


@overridable
def fork_uses(
    source: Tensor, data: Tensor, masks: tuple[int, ...], reduction: CotangentReduction, shape: Any
) -> tuple[Tensor, ...]:
    """Make a shared-use node; return one alias of `data` for each mask of varying axes."""
    outputs: tuple[Tensor, ...] = _shared_use_node(source, data, masks, reduction, shape)
    return outputs


class UseAliases:
    """The aliases of one tensor, valid for one version of its local data."""

    __slots__ = ("by_mask", "local", "version")

    def __init__(self, local: Tensor, by_mask: dict[int, Tensor]) -> None:
        self.local = local
        # In-place ops change the version and not the object. `.data =` changes neither, and
        # drops aliases itself.
        self.version = local._version
        self.by_mask = by_mask

    def is_current(self, local: Tensor) -> bool:
        """Whether these are still aliases of `local` (not replaced, not changed in place)."""
        return self.local is local and self.version == local._version


def use_masks(layout: Layout) -> tuple[int, ...]:
    """The sets of axes on which uses of a tensor of this layout may vary, the empty one first."""
    # A mask for each set of axes, so that uses on different sets still meet in one node, which
    # backward runs once, with all of their cotangents.
    axes = axes_in(layout.replicated)[:_MOST_SHARED_AXES]
    masks = [0]
    for axis in axes:
        masks += [mask | 1 << axis for mask in masks]
    return tuple(masks)


def fork_local(local: Tensor, layout: Layout, shape: Any, mask: int) -> UseAliases:
    """Aliases of a tensor that no redistribution made: all shared ones, and `mask`."""
    masks, reduction = _fork_of(layout, mask)
    outputs = fork_uses(local, local, masks, reduction, shape)
    return UseAliases(local, dict(zip(masks, outputs, strict=True)))


@lru_cache(maxsize=1024)
def _fork_of(layout: Layout, mask: int) -> tuple[tuple[int, ...], CotangentReduction]:
    masks = tuple(m for m in use_masks(layout) if m)
    return (masks if mask in masks else (*masks, mask)), CotangentReduction(layout, 0, layout)


def average_factor(layout: Layout) -> int:
    """Product of the sizes of the axes on which a tensor is an average of its terms."""
    return prod(
        size
        for size, placement in zip(layout.sizes, layout.placements, strict=True)
        if isinstance(placement, Partial) and placement.reduce_op == "avg"
    )


def sum_cotangents(
    layout: Layout, masks: tuple[int, ...], cotangents: tuple[Tensor | None, ...], shape: Any
) -> tuple[Tensor, int] | None:
    """The sum of the cotangents of several aliases, and the axes on which it is partial.

    None where no alias got a cotangent. No communication.
    """
    # The usual case: nothing to add, nothing to mask.
    if len(masks) == 1:
        return None if cotangents[0] is None else (cotangents[0], masks[0])
    present = [(m, c) for m, c in zip(masks, cotangents, strict=True) if c is not None]
    if not present:
        return None
    varying = 0
    for mask, _ in present:
        varying |= mask
    # A cotangent that is whole on an axis where another is a term would be counted once for each
    # coordinate by the sum that follows: it is kept on one.
    partials = [as_partial(c, layout, mask, varying, shape) for mask, c in present]
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total, varying


def as_partial(cotangent: Tensor, layout: Layout, mask: int, varying: int, shape: Any) -> Tensor:
    """A cotangent that is partial on the axes in `mask`, as one that is partial on all `varying`.

    It is kept on coordinate 0 of the axes that are new. No communication, forward or backward.
    """
    if mask == varying:
        return cotangent
    # Without a second derivative in sight the mask needs no node.
    if not (cotangent.requires_grad and torch.is_grad_enabled()):
        return zero_off_first(cotangent, layout, varying & ~mask)
    types = dual(GradType(layout, mask)), dual(GradType(layout, varying))
    return redistribute_local(cotangent, TypedMove(*types, tuple(shape)))


def zero_off_first(tensor: Tensor, layout: Layout, axes: int) -> Tensor:
    """`tensor` on coordinate 0 of the axes in the mask, zeros elsewhere. Not differentiable."""
    # Zeros instead of nothing: every rank goes on to the same collectives, whatever it holds.
    if not axes or all(layout.coordinate[a] == 0 for a in axes_in(axes)):
        return tensor
    return torch.zeros_like(tensor)
