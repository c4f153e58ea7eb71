"""Offers the ways in which ranks share attention beside gathering keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vescale_dtensor._errors import LayoutError
from vescale_dtensor._ops.nn.attention_exchange import exchange_candidates, shared_rows
from vescale_dtensor._ops.nn.attention_ring import ring_candidates
from vescale_dtensor._planning import AxisStrategy, Dims, OpCall
from vescale_dtensor._planning.attention_way import attention_way


class SharedCandidates(NamedTuple):
    """Candidates for each mesh axis, in which keys stay where they are; () where there are none.

    `in_ring`: whether a ring is what runs then; else rows are exchanged for heads.
    """

    candidates: tuple[tuple[AxisStrategy, ...], ...]
    in_ring: bool


def shared_way(call: OpCall, letters: Sequence[Dims]) -> SharedCandidates:
    """The way that `sequence_attention` asks for; of "auto", what it offers beside gathering.

    Args:
        call: of query, key and value, of four dims each, and perhaps a mask.
        letters: of its operands.

    Raises:
        LayoutError: rows are to be exchanged for heads, which the ranks do not divide.
    """
    asked = attention_way()
    sizes, lies = shared_rows(call)
    if asked == "gather" or not lies:
        return SharedCandidates((), in_ring=False)
    if asked != "ring":
        found = exchange_candidates(call, letters, free=asked == "ulysses")
        # Rather than a ring, as these are torch's own kernels, and a ring's are tiles of products.
        if found:
            return SharedCandidates(found, in_ring=False)
    if asked == "ulysses":
        raise _no_exchange(call, {axis: sizes[axis] for axis in lies})
    return SharedCandidates(ring_candidates(call, letters, free=asked == "ring"), in_ring=True)


def _no_exchange(call: OpCall, shares: dict[int, int]) -> LayoutError:
    query, key = call.operands[:2]
    return LayoutError(
        f"attention of {query.shape[1]} heads, with {key.shape[1]} key heads and sequences over "
        f"{' x '.join(map(str, shares.values()))} ranks, was to exchange rows for heads "
        f"({query._spec.layout}): the ranks that shard rows and those that shard heads have to "  # type: ignore[attr-defined]
        "divide the heads of query and key together, heads be sharded by Shard() alone, and a mask "
        'have none of its own. Take "ring", "gather" or "auto" instead'
    )
