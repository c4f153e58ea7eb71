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
from vescale_comm.agreement import message_device, named

from vescale_parallel._errors import DisagreementError, ParallelError
from vescale_parallel._invariant.tree import Span


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
    problem: Exception | None,
    spans: Sequence[Span],
    group: Group | None,
) -> Told:
    """Return what all ranks know. Collective.

    Args:
        losses: of this rank's shards.
        arrived: whether this rank has a gradient, for each parameter.
        alike: seeds and rows of all shards, checksums of some batches, calls of batch norms: every
            rank has the same.
        problem: what is wrong here, if anything. It is raised.
        spans: the shards of each rank.
        group: the ranks that share the batch; None: this one alone.

    Raises:
        ParallelError: on every rank: some rank has a problem.
        DisagreementError: on every rank: ranks have drawn different seeds, or cut other rows.
    """
    low, _ = spans[group.rank if group else 0]
    # Rows of one collective are equally long: as those of the rank with most shards.
    room = max(stop - start for start, stop in spans)
    form = struct.Struct(f"<?I{room}d")
    own = [losses.get(shard, 0.0) for shard in range(low, low + room)]
    flags = sum(has << at for at, has in enumerate(arrived))
    # Not `hash`, which is another one in each process.
    head = form.pack(problem is not None, zlib.crc32(repr(list(alike)).encode()), *own)
    rows = _gathered(head + flags.to_bytes(-(-len(arrived) // 8), "little"), group)
    told = [form.unpack_from(row) for row in rows]
    # Before anything is compared: what else a rank in trouble has told may mean nothing.
    troubled = [
        rank for rank, row in zip(group.ranks if group else (0,), told, strict=True) if row[0]
    ]
    if troubled:
        words = f"the step was given up: see the error of {named(troubled)}."
        raise problem or ParallelError(words)
    if len({row[1] for row in told}) > 1:
        raise DisagreementError(
            "ranks have drawn different seeds for the logical shards, as their random generators "
            "differ, or have cut different numbers of rows, or rows of other values. Call "
            "torch.manual_seed with the same seed on every rank before the step, draw the same "
            "numbers on every rank, and pass the whole batch on every rank."
        )
    every = {
        shard: loss
        for span, row in zip(spans, told, strict=True)
        for shard, loss in zip(range(*span), row[2:], strict=False)
    }
    anywhere = 0
    for row in rows:
        anywhere |= int.from_bytes(row[form.size :], "little")
    return Told(every, [bool(anywhere >> at & 1) for at in range(len(arrived))])


def _gathered(row: bytes, group: Group | None) -> list[bytes]:
    if group is None or group.size == 1:
        return [row]
    # On the host where it can be: what a device has still to do is not waited for.
    own = torch.tensor([list(row)], dtype=torch.uint8, device=message_device(group))
    return [bytes(one) for one in all_gather(own, group).tolist()]
