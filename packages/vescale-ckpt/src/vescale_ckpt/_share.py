"""Reading once what several ranks of one machine need.

Each of them reads and verifies a share of it into memory that all of them see, and then takes what
it needs from there. Who reads what follows from what all ranks have told all: nothing is asked.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vescale_ckpt._boxes import first_byte, merged
from vescale_ckpt._coordinator import Coordinator, together
from vescale_ckpt._dtypes import STORED_AS
from vescale_ckpt._fetch import WINDOW_BYTES, OpenFiles
from vescale_ckpt._hosts import SharedMemory
from vescale_ckpt._manifest import Chunk
from vescale_ckpt._open import Checkpoint
from vescale_ckpt._reads import SlabId, SlabRead, blocks_nbytes, scatter, slab_regions
from vescale_ckpt._storage import Storage

# Below this, agreeing costs more than reading twice.
WORTH_BYTES = 4 << 20
# Shared memory is used twice as much as this: one half is filled while the other is emptied. More
# costs more in page faults than it saves in rounds.
ARENA_BYTES = 16 << 20
# What a rank tells the others about its reads is limited: many ranks times many slabs is a lot.
_MOST_SPANS = 20_000
_ALIGNMENT = 64


def needs_of(reads: list[SlabRead]) -> list[Any] | None:
    """What a rank tells the others about what it reads, as JSON; None if that were too much."""
    if sum(len(read.blocks) for read in reads) > _MOST_SPANS:
        return None
    return [[*read.id, [[span.start, span.stop] for span in read.blocks]] for read in reads]


class _Shared(NamedTuple):
    """A slab that several ranks need: the blocks that any of them needs, and where they lie."""

    id: SlabId
    chunk: Chunk
    name: str
    begin: int
    nbytes: int
    blocks: list[range]
    # How much memory it takes: its first block may begin before it, its last may end after it.
    room: int


@dataclass
class SharePlan:
    """The rounds of one machine: in each, as many slabs as the shared memory holds."""

    ranks: list[int]
    rounds: list[list[_Shared]] = field(default_factory=list)

    @property
    def arena_bytes(self) -> int:
        return max((sum(slab.room for slab in one) for one in self.rounds), default=0)

    @property
    def slabs(self) -> set[SlabId]:
        return {slab.id for one in self.rounds for slab in one}


def plan_sharing(checkpoint: Checkpoint, answers: list[dict[str, Any]]) -> dict[str, SharePlan]:
    """For each machine what its ranks share. A pure function of what all told all."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, answer in enumerate(answers):
        by_host[answer["host"]].append(rank)
    plans = {}
    for host, ranks in by_host.items():
        plans[host] = SharePlan(ranks)
        if len(ranks) > 1 and all(answers[rank]["memory"] for rank in ranks):
            plans[host].rounds = _rounds(checkpoint, [answers[rank]["needs"] for rank in ranks])
    return plans


def _rounds(checkpoint: Checkpoint, needs: list[list[Any]]) -> list[list[_Shared]]:
    wanted: dict[SlabId, list[range]] = defaultdict(list)
    for tensor, chunk, slab, spans in itertools.chain.from_iterable(needs):
        wanted[SlabId(tensor, chunk, slab)].extend(range(a, b) for a, b in spans)
    shared = []
    for id, spans in wanted.items():
        union = merged(spans)
        if sum(map(len, spans)) > sum(map(len, union)):
            shared.append(_shared(checkpoint, id, union))
    block_bytes = checkpoint.manifest.block_bytes
    if sum(blocks_nbytes(slab.chunk, slab.blocks, block_bytes) for slab in shared) < WORTH_BYTES:
        return []
    rounds: list[list[_Shared]] = [[]]
    room = ARENA_BYTES
    for slab in sorted(shared, key=lambda s: (s.chunk.file, s.chunk.start + s.begin)):
        if rounds[-1] and slab.room > room:
            rounds.append([])
            room = ARENA_BYTES
        rounds[-1].append(slab)
        room -= slab.room
    return rounds


def _shared(checkpoint: Checkpoint, id: SlabId, blocks: list[range]) -> _Shared:
    name, tensor = list(checkpoint.manifest.tensors.items())[id.tensor]
    chunk, itemsize = tensor.chunks[id.chunk], STORED_AS[tensor.dtype].bytes_per_element
    region = slab_regions(chunk.region, itemsize)[id.slab]
    begin = first_byte(chunk.region, region, itemsize)
    nbytes = region.numel * itemsize
    room = -(-(nbytes + 2 * checkpoint.manifest.block_bytes) // _ALIGNMENT) * _ALIGNMENT
    return _Shared(id, chunk, name, begin, nbytes, blocks, room)


class Sharing(NamedTuple):
    """What one rank needs to take part: where it is, and which memory is used there."""

    coordinator: Coordinator
    checkpoint: Checkpoint
    plan: SharePlan
    memory: SharedMemory | None
    # The memory of the first rank of this machine: all of them use it.
    name: str
    reads: dict[SlabId, SlabRead]


def fetch_shared(storage: Storage, sharing: Sharing, rounds: int) -> list[SlabRead]:
    """Fill what is shared, in as many rounds on every machine; returns the reads that are left.

    Where the memory is out of reach for any rank, all read for themselves.
    """
    everything = list(sharing.reads.values())
    half = sharing.plan.arena_bytes
    data: memoryview | None = None
    try:
        if sharing.memory is not None:
            data = sharing.memory.attach(sharing.name, max(2 * half, 1))
    except OSError:
        data = None
    for number in range(rounds + 1):
        # One half of the memory is filled while the other is emptied: nobody waits twice a round.
        step = partial(_step, storage, sharing, data, number)
        if not all(together(sharing.coordinator, step)):
            return everything
    shared = sharing.plan.slabs
    return [read for read in everything if read.id not in shared]


def _step(storage: Storage, sharing: Sharing, data: memoryview | None, number: int) -> bool:
    if data is None:
        return False
    plan, half = sharing.plan, sharing.plan.arena_bytes
    for what, at in ((_take, number - 1), (_fill, number)):
        if 0 <= at < len(plan.rounds):
            begin = half * (at % 2)
            what(storage, sharing, plan.rounds[at], data[begin : begin + half])
    return True


def _places(slabs: list[_Shared]) -> dict[SlabId, int]:
    starts = itertools.accumulate((slab.room for slab in slabs), initial=0)
    return {slab.id: start for slab, start in zip(slabs, starts, strict=False)}


def _fill(storage: Storage, sharing: Sharing, slabs: list[_Shared], data: memoryview) -> None:
    """Read and verify this rank's share of a round, in the order of the disk."""
    block_bytes, places = sharing.checkpoint.manifest.block_bytes, _places(slabs)
    step = max(1, WINDOW_BYTES // block_bytes)
    windows = [
        (slab, range(first, min(first + step, span.stop)))
        for slab in slabs
        for span in slab.blocks
        for first in range(span.start, span.stop, step)
    ]
    ranks = sharing.plan.ranks
    turn = ranks.index(sharing.coordinator.rank)
    mine = windows[len(windows) * turn // len(ranks) : len(windows) * (turn + 1) // len(ranks)]
    with OpenFiles(storage, sharing.checkpoint) as files:
        for slab, window in mine:
            file = files.chunk(slab.name, slab.chunk)
            span = file.span(window)
            at = places[slab.id] + span.start - slab.begin // block_bytes * block_bytes
            file.read(window, data[at : at + span.stop - span.start])


def _take(storage: Storage, sharing: Sharing, slabs: list[_Shared], data: memoryview) -> None:
    """Put what this rank wants of a round where it belongs."""
    block_bytes, places = sharing.checkpoint.manifest.block_bytes, _places(slabs)
    for slab in slabs:
        read = sharing.reads.get(slab.id)
        if read is not None:
            at = places[slab.id] + slab.begin % block_bytes
            scatter(read, np.frombuffer(data, np.uint8, slab.nbytes, at))
