"""Schedules which ranks send keys and values to which, turn by turn, and sends them.

In turn t each rank sends its own block to the rank t further on, and has that of the rank t behind
while it computes with the one that came before. That is as many bytes as to hand every block on
from neighbour to neighbour, and a rank to which a block is of no use (behind its rows in a causal
attention, outside of a sliding window) is left out, wherever it stands. The gradient of a block
goes back to its rank by itself, where gradients are added in single precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from vescale_comm import Group, Pending, all_gather, permute

from vescale_dtensor._layout.intervals import Intervals

Uses = tuple[tuple[bool, ...], ...]
"""For each member whether its rows look at the keys of each."""


@dataclass(frozen=True)
class Ring:
    """Who has which part of a sequence.

    Attributes:
        group: of the ranks.
        rows: of the query, for each member.
        keys: likewise.
        causal: whether rows see the keys up to their own place only.
    """

    group: Group
    rows: tuple[Intervals, ...]
    keys: tuple[Intervals, ...]
    causal: bool

    def uses(self) -> Uses:
        """Who looks at whose keys, as far as that follows from their places."""
        return tuple(
            tuple(_looks_at(rows, keys, self.causal) for keys in self.keys) for rows in self.rows
        )


class Turn(NamedTuple):
    """One turn: the pairs (from, to), and where this rank's part is from and to; None: none."""

    pairs: tuple[tuple[int, int], ...]
    source: int | None
    target: int | None


def _looks_at(rows: Intervals, keys: Intervals, causal: bool) -> bool:
    some = extent(rows) > 0 and extent(keys) > 0
    return some and (not causal or keys[0][0] < rows[-1][1])


def extent(places: Intervals) -> int:
    """How many places there are."""
    return sum(high - low for low, high in places)


def turns(uses: Uses, me: int) -> list[Turn]:
    """Return the turns in which anything is sent; the same pairs on every member."""
    count, found = len(uses), []
    for distance in range(1, count):
        pairs = tuple(
            (source, target)
            for target in range(count)
            if uses[target][source := (target - distance) % count]
        )
        if pairs:
            sources = {target: source for source, target in pairs}
            found.append(Turn(pairs, sources.get(me), dict(pairs).get(me)))
    return found


def agreed_uses(mask: Tensor, ring: Ring, uses: Uses) -> Uses:
    """Without those whose keys are masked for all rows. Collective, and waits for the device.

    Args:
        mask: of this rank's rows, (..., rows or 1, all keys).
        ring: who has what.
        uses: as far as they are known without the mask.
    """
    seen = mask if mask.dtype == torch.bool else ~mask.isneginf()
    # Any keys, of all rows, heads and batches.
    keys = seen.flatten(0, -2).any(0)
    mine = torch.stack([part.any() for part in by_keys(keys, ring.keys)])
    told = all_gather(mine.to(torch.uint8).unsqueeze(0), ring.group).tolist()
    return tuple(
        tuple(one and bool(other) for one, other in zip(known, heard, strict=True))
        for known, heard in zip(uses, told, strict=True)
    )


def by_keys(x: Tensor, keys: tuple[Intervals, ...]) -> list[Tensor]:
    """The parts of a tensor, whose last dim is all keys, that are about each member's."""
    return [of_places(x, one) for one in keys]


def of_places(x: Tensor, places: Intervals) -> Tensor:
    """These places of the last dim; all of a dim of one, which stands for every key."""
    if x.shape[-1] == 1:
        return x
    parts = [x[..., low:high] for low, high in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def blocks(
    key: Tensor, value: Tensor, ring: Ring, schedule: list[Turn]
) -> Iterator[tuple[int, Tensor, Tensor] | None]:
    """Yield (member, its keys, its values): this rank's own first, then one a turn. Collective.

    None stands for a turn in which nothing comes here: every member takes part in every turn. The
    next block is under way while the caller computes with one.
    """
    flat = torch.cat([key.reshape(-1), value.reshape(-1)]) if schedule else key
    coming = _asked(flat, (key, value), ring, schedule[:1])
    yield ring.group.rank, key, value
    for index, turn in enumerate(schedule):
        (came,) = [one.wait() for one in coming]
        coming = _asked(flat, (key, value), ring, schedule[index + 1 : index + 2])
        if turn.source is None:
            yield None
            continue
        shapes = _shapes((key, value), ring, turn)
        keys, values = torch.split(came, [one.numel() for one in shapes])
        yield turn.source, keys.view(shapes[0]), values.view(shapes[1])


def _asked(
    flat: Tensor, own: tuple[Tensor, Tensor], ring: Ring, schedule: list[Turn]
) -> list[Pending[Tensor]]:
    """Start the first of these turns, if there is one."""
    return [_sent(flat, turn.pairs, _numbers(own, ring, turn), ring) for turn in schedule[:1]]


def sent_back(
    gradient: Tensor, own: tuple[Tensor, Tensor], ring: Ring, turn: Turn
) -> Pending[Tensor]:
    """Start to send a block's gradient to the rank whose block it is, flat. Collective.

    Args:
        gradient: of keys, then of values; of no elements where this rank had no block.
        own: this rank's keys and values.
        ring: who has what.
        turn: in which the block came.
    """
    back = tuple((target, source) for source, target in turn.pairs)
    size = 0 if turn.target is None else own[0].numel() + own[1].numel()
    return _sent(gradient, back, size, ring)


def _sent(
    flat: Tensor, pairs: tuple[tuple[int, int], ...], size: int, ring: Ring
) -> Pending[Tensor]:
    started: object = permute(flat, ring.group, pairs=pairs, shape=[size], async_op=True)
    return cast(Pending[Tensor], started)


def _numbers(own: tuple[Tensor, Tensor], ring: Ring, turn: Turn) -> int:
    return sum(one.numel() for one in _shapes(own, ring, turn))


def _shapes(own: tuple[Tensor, Tensor], ring: Ring, turn: Turn) -> list[torch.Size]:
    """Of the keys and values that come: as this rank's, but for how many they are."""
    if turn.source is None:
        return []
    keys = extent(ring.keys[turn.source])
    return [torch.Size([*one.shape[:-2], keys, one.shape[-1]]) for one in own]
