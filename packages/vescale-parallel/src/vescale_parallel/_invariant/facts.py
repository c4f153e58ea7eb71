"""Exchanges between ranks what sums need to know: one collective of a few bytes.

Losses of the shards, which parameters have a gradient anywhere, a digest of seeds and rows, and
whether all is well: a rank that found a problem takes part first, and then all raise.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from vescale_comm import Group, all_gather

from vescale_parallel._common.messages import numbers
from vescale_parallel._errors import DisagreementError, ParallelError
from vescale_parallel._invariant.tree import Span

_BITS = 62
"""Flags in one number: torch's integers have a sign."""


@dataclass(frozen=True)
class Told:
    """What all ranks know.

    Attributes:
        losses: by shard.
        arrived: for each parameter, whether some shard has a gradient of it.
    """

    losses: dict[int, float]
    arrived: list[bool]


def tell(
    losses: Mapping[int, float],
    arrived: Sequence[bool],
    alike: Sequence[object],
    problem: str,
    spans: Sequence[Span],
    group: Group | None,
    device_type: str,
) -> Told:
    """Return what all ranks know. Collective.

    Args:
        losses: of this rank's shards.
        arrived: whether this rank has a gradient, for each parameter.
        alike: seeds and rows of all shards, checksums of some batches, calls of batch norms: every
            rank has the same.
        problem: what is wrong here; empty if nothing is.
        spans: the shards of each rank.
        group: the ranks that share the batch; None: this one alone.
        device_type: of the mesh, for a group that cannot send from the host.

    Raises:
        ParallelError: on every rank: some rank has a problem.
        DisagreementError: on every rank: ranks have drawn different seeds, or cut other rows.
    """
    own = spans[group.rank if group else 0]
    # Rows of one collective are equally long: as those of the rank with most shards.
    room = max(high - low for low, high in spans)
    rows = _gathered(_row(losses, arrived, alike, problem, own, room), group, device_type)
    ranks = group.ranks if group else (0,)
    # Before anything is compared: what else a rank in trouble has told may mean nothing.
    troubled = [rank for rank, row in zip(ranks, rows, strict=True) if row[0]]
    if troubled:
        raise ParallelError(
            problem or f"the step was given up: see the error of rank {numbers(troubled)}."
        )
    if len({row[1] for row in rows}) > 1:
        raise DisagreementError(
            "ranks have drawn different seeds for the logical shards, as their random generators "
            "differ, or have cut different numbers of rows, or rows of other values. Call "
            "torch.manual_seed with the same seed on every rank before the step, draw the same "
            "numbers on every rank, and pass the whole batch on every rank."
        )
    found = {}
    for (low, high), row in zip(spans, rows, strict=True):
        for shard in range(low, high):
            found[shard] = _float(row[2 + shard - low])
    words = [_any(column) for column in zip(*(row[2 + room :] for row in rows), strict=True)]
    flags = [bool(words[at // _BITS] >> at % _BITS & 1) for at in range(len(arrived))]
    return Told(found, flags)


def _row(
    losses: Mapping[int, float],
    arrived: Sequence[bool],
    alike: Sequence[object],
    problem: str,
    own: Span,
    room: int,
) -> list[int]:
    low, high = own
    # The bits of a float64 as an integer: so one collective of integers carries all that is told,
    # and no loss is rounded on its way.
    bits = [_bits(losses.get(shard, 0.0)) for shard in range(low, high)]
    words = [0] * -(-len(arrived) // _BITS)
    for at, has in enumerate(arrived):
        words[at // _BITS] |= has << at % _BITS
    # Not `hash`, which is another one in each process.
    digest = zlib.crc32(repr(list(alike)).encode())
    return [int(bool(problem)), digest, *bits, *[0] * (room - len(bits)), *words]


def _gathered(row: list[int], group: Group | None, device_type: str) -> list[list[int]]:
    if group is None or group.size == 1:
        return [row]
    # On the host where it can be: what a device has still to do is not waited for.
    device = "cpu" if "cpu" in group.backends else device_type
    found: list[list[int]] = all_gather(torch.tensor([row], device=device), group).tolist()
    return found


def _any(column: Sequence[int]) -> int:
    found = 0
    for word in column:
        found |= word
    return found


def _bits(value: float) -> int:
    (found,) = struct.unpack("<q", struct.pack("<d", value))
    return int(found)


def _float(bits: int) -> float:
    (found,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(found)
