"""Attention of a sharded sequence by an exchange of rows for heads, as DeepSpeed-Ulysses does it.

Where an axis shards the rows of query, key and value, each rank may send its rows of the others'
heads and get all rows of some heads. It computes these as one device would, and sends the result
back: four all-to-alls of a shard each, where gathering keys and values sends whole tensors. Which
of the two sends less depends on the number of ranks, and on how many heads keys have.

Source: Jacobs et al., arXiv 2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor

from vescale_dtensor._autograd.cotangent import GradType, TypedMove, redistribute_local
from vescale_dtensor._layout.derived_placements import nested
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import Replicate, Shard
from vescale_dtensor._planning import AxisStrategy, Dims, LocalContext, OpCall
from vescale_dtensor._planning.select import axis_cost, relative_sizes
from vescale_dtensor._tensor.dtensor import DTensor

_REPLICATE = Replicate()
# Of query, key and value: (batch, heads, rows, features).
_HEADS, _ROWS = 1, 2


def exchange_candidates(
    call: OpCall, letters: Sequence[Dims]
) -> tuple[tuple[AxisStrategy, ...], ...]:
    """For each mesh axis, the candidate that exchanges rows for heads; none where it cannot be.

    The numbers of heads have to be multiples of the ranks that share them then.

    Args:
        call: of query, key and value, of four dims each, and perhaps a mask.
        letters: of its operands.
    """
    query, key, value = call.operands[:3]
    layouts = [one._spec.layout for one in (query, key, value) if isinstance(one, DTensor)]
    # Each head of a mask that has some would have to follow its head of the query.
    mask_has_heads = any(len(dims) > 2 and dims[-3] is not None for dims in letters[3:])
    if len(layouts) < 3 or mask_has_heads:
        return ()
    sizes = layouts[0].sizes
    lies = [[layout.placements[axis] for layout in layouts] for axis in range(len(sizes))]
    axes = [axis for axis, placements in enumerate(lies) if _shares_rows(placements)]
    heads = _head_axes(layouts)
    if heads is None or not axes:
        return ()
    shares = prod(sizes[axis] for axis in {*axes, *heads})
    if any(one.shape[_HEADS] % shares for one in (query, key, value)):
        return ()
    bytes_ = relative_sizes(call.size_ratios(), [one.element_size() for one in call.operands])[:3]

    def candidate(axis: int) -> AxisStrategy:
        rows = lies[axis][0]
        masks = (_REPLICATE,) * (len(call.operands) - 3)
        # The result is as large as the query, but for its features.
        sent = [*bytes_, bytes_[0] * value.shape[-1] / max(1, query.shape[-1])]
        return AxisStrategy(
            (rows, rows, rows, *masks),
            (rows,),
            fixed_placement=True,
            local_bytes=sum(axis_cost(rows, Shard(_HEADS), size, sizes[axis]) for size in sent),
        )

    return tuple((candidate(axis),) if axis in axes else () for axis in range(len(sizes)))


def exchanged_axes(context: LocalContext) -> list[int]:
    """The mesh axes on which a plan exchanges rows for heads: keys stay sharded by rows there."""
    if context.call.operands[1].ndim != 4:
        return []
    placements = context.input_layout(1).placements
    return [axis for axis, one in enumerate(placements) if _is_rows(one)]


def exchanged(
    context: LocalContext,
    axes: Sequence[int],
    given: dict[str, Any],
    local: Callable[[LocalContext, dict[str, Any]], Tensor],
) -> Tensor:
    """Attention with all rows of some heads on each rank of these axes. Collective.

    Args:
        context: of the call.
        axes: from `exchanged_axes`.
        given: local arguments by name.
        local: attention of what a rank has then.
    """
    plan = context.plan
    uses = [replace(use, layout=_by_heads(use.layout, axes)) for use in plan.uses[:3]]
    output = _by_heads(context.output_layout(), axes)
    heads = LocalContext(
        context.call, replace(plan, uses=(*uses, *plan.uses[3:]), outputs=(output,))
    )
    shapes = [tuple(one.shape) for one in context.call.operands[:3]]
    moved = {
        name: _moved(given[name], context.input_layout(at), uses[at].layout, shapes[at])
        for at, name in enumerate(("query", "key", "value"))
    }
    result = local(heads, given | moved)
    return _moved(result, output, context.output_layout(), (*shapes[0][:-1], shapes[2][-1]))


def _moved(local: Tensor, source: Layout, target: Layout, shape: tuple[int, ...]) -> Tensor:
    return redistribute_local(local, TypedMove(GradType(source, 0), GradType(target, 0), shape))


def _by_heads(layout: Layout, axes: Sequence[int]) -> Layout:
    """The layout in which these axes shard heads, within what other axes leave of them."""
    others = [axis for axis, one in enumerate(layout.placements) if _is_heads(one)]
    found = nested(_HEADS, [*others, *axes], layout.sizes)
    placements: list[Placement] = [
        found[axis] if axis in axes else one for axis, one in enumerate(layout.placements)
    ]
    return layout.with_placements(placements).with_order(None)


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


def _shares_rows(placements: Sequence[Placement]) -> bool:
    return _is_rows(placements[0]) and all(one == placements[0] for one in placements)


def _is_rows(placement: Placement) -> bool:
    return isinstance(placement, Sharded) and placement.cut_dims() == (_ROWS,)


def _is_heads(placement: Placement) -> bool:
    return type(placement) is Shard and placement.dim == _HEADS
