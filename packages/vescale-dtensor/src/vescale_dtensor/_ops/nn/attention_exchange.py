"""Attention of a sharded sequence by an exchange of rows for heads, as DeepSpeed-Ulysses does it.

Where an axis shards the rows of query, key and value, each rank may send its rows of the others'
heads and get all rows of some heads. It computes these as one device would, and sends the result
back: four all-to-alls of a shard each, where gathering keys and values sends whole tensors. Which
of the two sends less depends on the number of ranks, and on how many heads keys have.

Source: Jacobs et al., arXiv 2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vescale_dtensor._autograd.cotangent import GradType, TypedMove, redistribute_local
from vescale_dtensor._layout.derived_placements import nested
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import Replicate, Shard
from vescale_dtensor._planning import AxisStrategy, Dims, LocalContext, OpCall
from vescale_dtensor._planning.plan import OperandUse
from vescale_dtensor._planning.select import axis_cost, relative_sizes
from vescale_dtensor._tensor.dtensor import DTensor

_REPLICATE = Replicate()
# Of query, key and value: (batch, heads, rows, features).
_HEADS, _ROWS = 1, 2


class _OperandShape(NamedTuple):
    """All that local kernels ask an operand for."""

    shape: torch.Size
    ndim: int


def exchange_candidates(
    call: OpCall, letters: Sequence[Dims], *, free: bool = False
) -> tuple[tuple[AxisStrategy, ...], ...]:
    """For each mesh axis, the candidate that exchanges rows for heads; none where it cannot be.

    The number of heads has to be a multiple of the ranks that share them then. Fewer key heads are
    repeated, as seldom as that allows.

    Args:
        call: of query, key and value, of four dims each, and perhaps a mask.
        letters: of its operands.
        free: whether it is to be taken whatever it costs.
    """
    query, key, value = call.operands[:3]
    # Each head of a mask that has some would have to follow its head of the query.
    mask_has_heads = any(len(dims) > 2 and dims[-3] is not None for dims in letters[3:])
    sizes, lies = shared_rows(call)
    if mask_has_heads or not lies:
        return ()
    heads = _head_axes([one._spec.layout for one in (query, key, value)])  # type: ignore[attr-defined]
    if heads is None:
        return ()
    repeats = _repeats(query.shape[_HEADS], key.shape[_HEADS], _ranks(sizes, {*lies, *heads}))
    # Each rank repeats the key heads that it has, so there have to be as many everywhere.
    if not repeats or key.shape[_HEADS] % _ranks(sizes, heads):
        return ()
    asked, keys, values = relative_sizes(
        call.size_ratios(), [one.element_size() for one in call.operands]
    )[:3]
    # The result is as large as the query, but for its features.
    result = asked * value.shape[-1] / max(1, query.shape[-1])
    sent = (asked, keys * repeats, values * repeats, result)

    # Of the query's bytes, since those are in another unit.
    mask = asked * mask_share(call)

    def candidate(axis: int) -> AxisStrategy:
        rows = lies[axis]
        masks = (_REPLICATE,) * (len(call.operands) - 3)
        bytes_ = sum(axis_cost(rows, Shard(_HEADS), size, sizes[axis]) for size in sent)
        return AxisStrategy(
            (rows, rows, rows, *masks),
            (rows,),
            fixed_placement=True,
            # What gathered keys would have a rank keep is no part of what this way costs.
            local_bytes=0.0 if free else max(0.0, bytes_ - mask / sizes[axis]),
        )

    return tuple((candidate(axis),) if axis in lies else () for axis in range(len(sizes)))


def shared_rows(call: OpCall) -> tuple[tuple[int, ...], dict[int, Sharded]]:
    """The sizes of the mesh, and by which placement its axes share rows of query, key and value.

    Only axes that shard the rows of all three alike.
    """
    layouts = [one._spec.layout for one in call.operands[:3] if isinstance(one, DTensor)]
    sizes = layouts[0].sizes if layouts else ()
    found: dict[int, Sharded] = {}
    for axis in range(len(sizes)) if len(layouts) == 3 else ():
        placements = {layout.placements[axis] for layout in layouts}
        for one in placements:
            if len(placements) == 1 and isinstance(one, Sharded) and _is_rows(one):
                found[axis] = one
    return sizes, found


def mask_share(call: OpCall) -> float:
    """How large a causal mask of all rows is beside the query; 0 where none is made.

    Where keys are gathered each rank keeps a mask of its rows for its backward, which of long
    sequences is more than all else: a byte of it is counted as one that is sent.
    """
    query, key = call.operands[:2]
    if not call.argument(5, "is_causal", False):
        return 0.0
    return key.shape[_ROWS] / max(1, query.shape[0] * query.shape[_HEADS] * query.shape[-1])


def exchanged_axes(context: LocalContext) -> list[int]:
    """The mesh axes on which a plan exchanges rows for heads: keys stay sharded by rows there."""
    if context.call.operands[1].ndim != 4:
        return []
    placements = context.input_layout(1).placements
    return [axis for axis, one in enumerate(placements) if _is_rows(one)]


def exchange_attention(
    context: LocalContext,
    axes: Sequence[int],
    given: dict[str, Any],
    attention: Callable[[LocalContext, dict[str, Any]], Tensor],
) -> Tensor:
    """Attention with all rows of some heads on each rank of these axes. Collective.

    Args:
        context: of the call.
        axes: from `exchanged_axes`.
        given: local arguments by name.
        attention: of what a rank has then.
    """
    uses, sizes = context.plan.uses[:3], context.input_layout(0).sizes
    # Those of the query: keys that are replicated there follow it, as a part of their heads.
    heads = _axes_of_heads(uses[0].layout)
    targets = [_by_heads(use, heads, axes) for use in uses]
    shapes = [list(one.shape) for one in context.call.operands[:3]]
    repeats = _repeats(shapes[0][_HEADS], shapes[1][_HEADS], _ranks(sizes, {*axes, *heads}))
    moved = {}
    for at, name in enumerate(("query", "key", "value")):
        own = given[name]
        if at and repeats > 1:
            shapes[at][_HEADS] *= repeats
            own = own.repeat_interleave(repeats, _HEADS)
        moved[name] = _moved(own, uses[at], targets[at], shapes[at])
    rows = OperandUse(context.output_layout(), 0)
    output = _by_heads(rows, heads, axes)
    result = attention(_context(context, targets, output.layout, shapes), given | moved)
    return _moved(result, output, rows, [*shapes[0][:-1], shapes[2][-1]])


def _context(
    context: LocalContext,
    uses: Sequence[OperandUse],
    output: Layout,
    shapes: Sequence[Sequence[int]],
) -> LocalContext:
    """The same call, of query, key and value in other layouts, and perhaps of repeated heads."""
    plan, call = context.plan, context.call
    operands = [
        *[_OperandShape(torch.Size(shape), len(shape)) for shape in shapes],
        *call.operands[3:],
    ]
    known = OpCall.known(call.func, call.args, call.kwargs, operands, call.differentiable)
    return LocalContext(known, replace(plan, uses=(*uses, *plan.uses[3:]), outputs=(output,)))


def _ranks(sizes: Sequence[int], axes: Iterable[int]) -> int:
    return prod(sizes[axis] for axis in axes)


def _repeats(heads: int, keys: int, ranks: int) -> int:
    """How often each key head is repeated, so that ranks share them; 0 where they cannot."""
    if heads % ranks or not keys or heads % keys:
        return 0
    group = heads // keys
    return next(n for n in range(1, group + 1) if not group % n and not keys * n % ranks)


def _moved(local: Tensor, source: OperandUse, target: OperandUse, shape: Sequence[int]) -> Tensor:
    types = GradType(source.layout, source.varying), GradType(target.layout, target.varying)
    return redistribute_local(local, TypedMove(*types, tuple(shape)))


def _by_heads(use: OperandUse, heads: Sequence[int], axes: Sequence[int]) -> OperandUse:
    """The use in which these axes shard heads, within what the axes of `heads` leave of them."""
    found = nested(_HEADS, [*heads, *axes], use.layout.sizes)
    placements = [found.get(axis, one) for axis, one in enumerate(use.layout.placements)]
    layout = use.layout.with_placements(placements).with_order(None)
    return OperandUse(layout, use.varying & layout.replicated)


def _axes_of_heads(layout: Layout) -> list[int]:
    return [axis for axis, one in enumerate(layout.placements) if _is_heads(one)]


def _head_axes(layouts: Sequence[Layout]) -> set[int] | None:
    """The axes that shard heads already; None where one does otherwise than `Shard`."""
    found: set[int] = set()
    for layout in layouts:
        for axis, one in enumerate(layout.placements):
            if _is_heads(one):
                found.add(axis)
            elif isinstance(one, Sharded) and _HEADS in one.cut_dims():
                return None
    return found


def _is_rows(placement: Placement) -> bool:
    return isinstance(placement, Sharded) and placement.cut_dims() == (_ROWS,)


def _is_heads(placement: Placement) -> bool:
    return type(placement) is Shard and placement.dim == _HEADS
