"""Varying and invariant uses of replicated activations: the typed rule for gradients of non-leaves.

On a mesh axis where a tensor is replicated, its cotangent is either complete on every coordinate
(the op that used the tensor was *invariant* there) or partial (the op was *varying*). So a
replicated activation has one alias per set of varying axes, all of them outputs of a single
autograd node. Its backward sees all cotangents at once: it keeps the complete ones on coordinate 0
only where others are partial, adds them, and communicates once.

Aliases are made by `detach()`, never as views: an optimizer's write to the base would make autograd
rebuild the nodes of views. The node saves no tensor (checkpointing counts saved tensors), and its
context holds layouts and never the wrapper, so that no cycle keeps memory alive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.cotangent import (
    GradType,
    PreparedMove,
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
from vescale_dtensor._torch.worlds import cached

# The aliases are one per subset of the replicated axes, 2**n in all. Beyond this n, a use that
# varies on further axes gets a node of its own, which costs one more collective in backward.
_MOST_SHARED_AXES = 3
# A sentinel: None is a valid entry of `_moves`.
_UNKNOWN: Any = object()


@dataclass(frozen=True)
class CotangentReduction:
    """The backward of a shared-use node: combines its outputs' cotangents into its source's.

    Attributes:
        source: layout of the node's input.
        source_varying: mask of the axes on which the source is used varyingly, so that its
            cotangent may stay partial there.
        target: layout of the node's outputs. Differs from `source` where the node is the backward
            of a redistribution.
        scale: factor on the cotangent, not 1 where either side is `Partial("avg")`.
        comm_dtype: dtype in which the cotangent is sent; None: its own.
    """

    source: Layout
    source_varying: int
    target: Layout
    scale: float = 1.0
    comm_dtype: torch.dtype | None = None
    # A cache, so no part of equality. Shapes are in its key: plans of uneven shards depend on them.
    _moves: BoundedCache[tuple[int, tuple[int, ...]], PreparedMove | None] = field(
        default_factory=lambda: BoundedCache(256), init=False, repr=False, compare=False
    )

    def reduce(
        self, masks: tuple[int, ...], cotangents: tuple[Tensor | None, ...], shape: Any
    ) -> Any:
        """Combine the cotangents of all aliases into the source's. Collective.

        Args:
            masks: the varying axes of each alias.
            cotangents: local ones, in the order of `masks`; None for an alias without uses.
            shape: global shape.

        Returns:
            The local cotangent of the source; None if no alias has one.
        """
        found = sum_cotangents(self.target, masks, cotangents, shape)
        if found is None:
            return None
        total, varying = found
        move = self._move(varying, tuple(shape))
        if move is None:
            pass
        elif self.comm_dtype is None:
            total = move.run(total)
        else:
            total = move.run(total.to(self.comm_dtype)).to(total.dtype)
        return total if self.scale == 1.0 else total * self.scale

    def _move(self, varying: int, shape: tuple[int, ...]) -> PreparedMove | None:
        """The redistribution from the aliases' cotangent to the source's; None if they agree."""
        known: PreparedMove | None = self._moves.get((varying, shape), _UNKNOWN)
        if known is _UNKNOWN:
            arrived = dual(GradType(self.target, varying))
            left = dual(GradType(self.source, self.source_varying))
            known = None if arrived == left else PreparedMove(TypedMove(arrived, left, shape))
            self._moves.store((varying, shape), known)
        return known

    def is_identity(self, masks: tuple[int, ...], shape: Any) -> bool:
        """Whether backward returns the cotangent unchanged. The same answer on every rank."""
        if len(masks) != 1 or self.scale != 1.0 or self.comm_dtype is not None:
            return False
        move = self._move(masks[0], tuple(shape))
        return move is None or is_noop(move.move)


class SharedUseNode(torch.autograd.Function):
    """The autograd node with one output per alias; see the module's docstring.

    `source` receives the gradient. `data` is what the outputs alias: the source's own data, or what
    it was redistributed to outside of autograd.
    """

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
        # An alias without uses then arrives as None in backward, not as zeros to add and send.
        ctx.set_materialize_grads(False)
        # Constants only. A saved tensor would be counted by checkpointing; a wrapper would close a
        # cycle through its aliases.
        ctx.masks, ctx.owed, ctx.shape = masks, reduction, shape
        # Never views: an optimizer's write to what they alias would make torch rebuild the nodes of
        # views, and the second step would fail. detach() shares memory and the version counter, so
        # autograd still notices a write to data that it saved, but no history.
        return tuple(data.detach() for _ in masks)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Return the source's cotangent: added up first, then redistributed once for all."""
        return ctx.owed.reduce(ctx.masks, cotangents, ctx.shape), None, None, None, None


class _SingleUse(torch.autograd.Function):
    """A shared-use node with one alias, whose backward changes only the type of a cotangent."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, data: Tensor, mask: int, reduction: CotangentReduction, shape: Any
    ) -> Tensor:
        ctx.mask, ctx.owed, ctx.shape = mask, reduction, shape
        return data.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        # The data is the same either way. A recorded backward still needs the change of type, as
        # the gradient of this gradient depends on it.
        if torch.is_grad_enabled():
            cotangent = ctx.owed.reduce((ctx.mask,), (cotangent,), ctx.shape)
        return cotangent, None, None, None, None


# `applied` leaves out `Function.apply`'s look at functorch, half the cost of a call; see there.
_shared_use_node, _single_use = applied(SharedUseNode), applied(_SingleUse)


def alias_for_use(
    source: Tensor, data: Tensor, mask: int, reduction: CotangentReduction, shape: Any
) -> Tensor:
    """One alias of `data` whose node returns the cotangent unchanged.

    Only valid where `CotangentReduction.is_identity` holds.
    """
    alias: Tensor = _single_use(source, data, mask, reduction, shape)
    return alias


@overridable
def fork_uses(
    source: Tensor, data: Tensor, masks: tuple[int, ...], reduction: CotangentReduction, shape: Any
) -> tuple[Tensor, ...]:
    """Make a shared-use node; return one alias of `data` for each mask of varying axes.

    Args:
        source: local tensor that receives the gradient.
        data: local tensor that the outputs alias.
        masks: the varying axes of each output.
        reduction: what backward does.
        shape: global shape.
    """
    outputs: tuple[Tensor, ...] = _shared_use_node(source, data, masks, reduction, shape)
    return outputs


class UseAliases:
    """The aliases of one tensor, valid for one version of its local data.

    Attributes:
        local: the local tensor they were made of.
        version: its version counter at that time.
        by_mask: mask of varying axes -> alias, all outputs of one node and in its order. Includes 0
            only if a redistribution made the aliases; otherwise the local tensor itself serves
            invariant uses.
        apart: the same for aliases of later nodes, made of `local`: what they receive goes through
            it, so whoever asks for the gradient of `local` must not ask for theirs.
    """

    __slots__ = ("apart", "by_mask", "local", "version")

    def __init__(self, local: Tensor, by_mask: dict[int, Tensor]) -> None:
        self.local = local
        # In-place ops change the version but not the object. `.data =` changes neither: there
        # `_tensor.state.data_written` drops the aliases.
        self.version = local._version
        self.by_mask = by_mask
        self.apart: dict[int, Tensor] = {}

    @property
    def known(self) -> dict[int, Tensor]:
        """All aliases, of this node and of later ones."""
        return {**self.by_mask, **self.apart} if self.apart else self.by_mask

    def is_current(self, local: Tensor) -> bool:
        """Whether `local` is the tensor these alias, not written to since they were made."""
        return self.local is local and self.version == local._version


def use_masks(layout: Layout) -> tuple[int, ...]:
    """Masks of the sets of axes on which uses of a tensor may vary, the empty set first."""
    # All subsets at once: a node's outputs are fixed when it is made, and uses on different sets of
    # axes can share one collective in backward only if they share the node.
    axes = axes_in(layout.replicated)[:_MOST_SHARED_AXES]
    masks = [0]
    for axis in axes:
        masks += [mask | 1 << axis for mask in masks]
    return tuple(masks)


def fork_local(local: Tensor, layout: Layout, shape: Any, mask: int) -> UseAliases:
    """Aliases of a tensor that no redistribution made: one per shared set of axes, and `mask`."""
    masks, reduction = _fork_of(layout, mask)
    outputs = fork_uses(local, local, masks, reduction, shape)
    return UseAliases(local, dict(zip(masks, outputs, strict=True)))


@cached(1024)
def _fork_of(layout: Layout, mask: int) -> tuple[tuple[int, ...], CotangentReduction]:
    """Masks of the aliases of a tensor in this layout, and the backward of their node."""
    # Not the empty mask: an invariant use takes the local tensor itself, without a node.
    masks = tuple(m for m in use_masks(layout) if m)
    return (masks if mask in masks else (*masks, mask)), CotangentReduction(layout, 0, layout)


def average_factor(layout: Layout) -> int:
    """Product of the sizes of the mesh axes on which a tensor is `Partial("avg")`."""
    return prod(
        size
        for size, placement in zip(layout.sizes, layout.placements, strict=True)
        if isinstance(placement, Partial) and placement.reduce_op == "avg"
    )


def sum_cotangents(
    layout: Layout, masks: tuple[int, ...], cotangents: tuple[Tensor | None, ...], shape: Any
) -> tuple[Tensor, int] | None:
    """Sum of the cotangents of several aliases, and a mask of the axes on which it is partial.

    None if no alias has a cotangent. No communication.
    """
    # The usual case: nothing to add or to mask.
    if len(masks) == 1:
        return None if cotangents[0] is None else (cotangents[0], masks[0])
    present = [(m, c) for m, c in zip(masks, cotangents, strict=True) if c is not None]
    if not present:
        return None
    varying = 0
    for mask, _ in present:
        varying |= mask
    # A cotangent that is complete on an axis where another is partial would be counted once per
    # coordinate by the reduction that follows, so it is kept on one coordinate.
    partials = [as_partial(c, layout, mask, varying, shape) for mask, c in present]
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total, varying


def as_partial(cotangent: Tensor, layout: Layout, mask: int, varying: int, shape: Any) -> Tensor:
    """Make a cotangent that is partial on the axes in `mask` partial on all axes in `varying`.

    It is kept on coordinate 0 of the new axes, and is zero elsewhere. No communication, neither in
    forward nor in backward.
    """
    if mask == varying:
        return cotangent
    # Unless this backward is recorded, masking needs no autograd node.
    if not (cotangent.requires_grad and torch.is_grad_enabled()):
        return zero_off_first(cotangent, layout, varying & ~mask)
    types = dual(GradType(layout, mask)), dual(GradType(layout, varying))
    return redistribute_local(cotangent, TypedMove(*types, tuple(shape)))


def zero_off_first(tensor: Tensor, layout: Layout, axes: int) -> Tensor:
    """`tensor` on coordinate 0 of the axes in the mask, zeros elsewhere. Not differentiable."""
    # The branch depends on the rank, and no collective follows from it. Zeros and not None: all
    # ranks must go on to the same collectives.
    if not axes or all(layout.coordinate[a] == 0 for a in axes_in(axes)):
        return tensor
    return torch.zeros_like(tensor)
