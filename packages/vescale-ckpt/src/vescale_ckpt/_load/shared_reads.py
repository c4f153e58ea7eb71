"""Reads once what several ranks of one machine need.

Each rank reads and verifies a share of it into memory that all of them see, and then takes what it
needs from there. Who reads what follows from what all ranks have told all, so no further message is
needed.
"""

import itertools
import os
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from vescale_ckpt._coordination.hosts import have_own_processes
from vescale_ckpt._coordination.pipe_barrier import PipeBarrier, in_rounds
from vescale_ckpt._coordination.shared_memory import SharedMemory, shared_memory
from vescale_ckpt._format.manifest import Chunk, TensorRecord
from vescale_ckpt._load.fetch import WINDOW_BYTES, OpenFiles
from vescale_ckpt._load.open import Checkpoint
from vescale_ckpt._load.reads import SlabId, SlabRead, blocks_nbytes, scatter, slab_regions
from vescale_ckpt._progress import ByteCounter
from vescale_ckpt._storage.base import Storage
from vescale_ckpt._tensors.dtypes import STORED_AS
from vescale_ckpt._tensors.regions import first_byte, merge_ranges

# Bytes below which setting up the memory costs more than reading twice.
WORTH_BYTES = 4 << 20
# Bytes of a round, and how many rounds the shared memory holds: some are filled while others are
# emptied. More costs more in page faults than it saves in waiting.
ARENA_BYTES = 4 << 20
SLOTS = 2
# From an object store: there, every round takes as long as its slowest request.
REMOTE_ARENA_BYTES = 64 << 20
# Ranges of blocks that a rank tells the others at most: messages grow with ranks times slabs.
_MOST_SPANS = 50_000
_ALIGNMENT = 64


def needs_of(reads: list[SlabRead]) -> list[Any] | None:
    """Encode what a rank reads, for the others, as JSON; None if that were too much."""
    if sum(len(read.blocks) for read in reads) > _MOST_SPANS:
        return None
    return [[*read.id, [[span.start, span.stop] for span in read.blocks]] for read in reads]


class _SharedSlab(NamedTuple):
    """A slab that several ranks need: the blocks that any of them needs, and where they are."""

    id: SlabId
    chunk: Chunk
    name: str
    begin: int
    nbytes: int
    blocks: list[range]
    # Bytes of shared memory: its first block may begin before it, and its last one end after it.
    room: int


@dataclass
class SharePlan:
    """The rounds of one machine: in each, as many slabs as the shared memory holds."""

    ranks: list[int]
    rounds: list[list[_SharedSlab]] = field(default_factory=list)

    @property
    def arena_bytes(self) -> int:
        return max((sum(slab.room for slab in one) for one in self.rounds), default=0)

    @property
    def slabs(self) -> set[SlabId]:
        return {slab.id for one in self.rounds for slab in one}


def plan_sharing(
    checkpoint: Checkpoint, answers: list[dict[str, Any]], *, remote: bool
) -> dict[str, SharePlan]:
    """Plan for each machine what its ranks share: a pure function of what all exchanged."""
    arena_bytes = REMOTE_ARENA_BYTES if remote else ARENA_BYTES
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, answer in enumerate(answers):
        by_host[answer["host"]].append(rank)
    plans = {}
    for host, ranks in by_host.items():
        plans[host] = SharePlan(ranks)
        # All ranks of a machine or none: one that cannot share would be missing in every round.
        if len(ranks) > 1 and _can_share([answers[rank]["offer"] for rank in ranks]):
            plans[host].rounds = _rounds(
                checkpoint, [answers[rank]["needs"] for rank in ranks], arena_bytes
            )
    return plans


def _can_share(offers: list[list[Any] | None]) -> bool:
    # Ranks that are threads of one process must not wait in pipes for each other.
    return None not in offers and have_own_processes(
        [("", handles[2]) for handles in offers if handles]
    )


def _rounds(
    checkpoint: Checkpoint, needs: list[list[Any]], arena_bytes: int
) -> list[list[_SharedSlab]]:
    wanted: dict[SlabId, list[range]] = defaultdict(list)
    for tensor, chunk, slab, spans in itertools.chain.from_iterable(needs):
        wanted[SlabId(tensor, chunk, slab)].extend(range(a, b) for a, b in spans)
    # As a list, once: slabs name tensors by their number.
    tensors = list(checkpoint.manifest.tensors.items())
    block_bytes = checkpoint.manifest.block_bytes
    shared = []
    for id, spans in wanted.items():
        union = merge_ranges(spans)
        # Some block is named twice: at least two ranks need it.
        if sum(map(len, spans)) > sum(map(len, union)):
            shared.append(_shared(*tensors[id.tensor], id, union, block_bytes))
    if sum(blocks_nbytes(slab.chunk, slab.blocks, block_bytes) for slab in shared) < WORTH_BYTES:
        return []
    rounds: list[list[_SharedSlab]] = [[]]
    room = arena_bytes
    # In the order of the disk, and the same on every rank.
    for slab in sorted(shared, key=lambda s: (s.chunk.file, s.chunk.start + s.begin)):
        if rounds[-1] and slab.room > room:
            rounds.append([])
            room = arena_bytes
        rounds[-1].append(slab)
        room -= slab.room
    return rounds


def _shared(
    name: str, tensor: TensorRecord, id: SlabId, blocks: list[range], block_bytes: int
) -> _SharedSlab:
    chunk, itemsize = tensor.chunks[id.chunk], STORED_AS[tensor.dtype].bytes_per_element
    region = slab_regions(chunk.region, itemsize)[id.slab]
    # Memory is reserved from the start of the first block, wherever in it the slab begins.
    begin = first_byte(chunk.region, region, itemsize)
    nbytes = region.numel * itemsize
    # From the beginning of its first block to the end of its last one that is wanted.
    end = max(begin + nbytes, min(blocks[-1].stop * block_bytes, chunk.nbytes))
    room = -(-(end - begin // block_bytes * block_bytes) // _ALIGNMENT) * _ALIGNMENT
    return _SharedSlab(id, chunk, name, begin, nbytes, blocks, room)


class SharingHandles:
    """What this rank has that makes sharing possible. Holds pipes and memory until it is closed."""

    def __init__(self, rank: int, memory: SharedMemory) -> None:
        self.memory, self.barrier = memory, PipeBarrier(rank)

    def to_json(self) -> list[Any]:
        """Return what is sent to the other ranks."""
        return [self.memory.name, self.barrier.name, os.getpid()]

    def close(self) -> None:
        """Release both."""
        self.memory.close()
        self.barrier.close()


def open_handles(rank: int) -> SharingHandles | None:
    """Make what this rank shares with; None where the system has no such thing."""
    memory = shared_memory()
    if memory is None:
        return None
    try:
        return SharingHandles(rank, memory)
    except OSError:
        # Pipes may run out where memory did not.
        memory.close()
        return None


@dataclass(frozen=True)
class SharedReadContext:
    """What one rank needs to take part."""

    checkpoint: Checkpoint
    plan: SharePlan
    rank: int
    handles: SharingHandles
    # What the ranks of this machine have told of theirs.
    offers: dict[int, list[Any]]
    reads: dict[SlabId, SlabRead]

    @property
    def memory_bytes(self) -> int:
        return SLOTS * self.plan.arena_bytes

    @property
    def own(self) -> list[SlabRead]:
        """What this rank reads for itself only."""
        shared = self.plan.slabs
        return [read for read in self.reads.values() if read.id not in shared]

    @cached_property
    def windows(self) -> list[list[tuple[_SharedSlab, range]]]:
        """What this rank reads for all in each round, in the order of the disk."""
        step = max(1, WINDOW_BYTES // self.checkpoint.manifest.block_bytes)
        turn, count = self.plan.ranks.index(self.rank), len(self.plan.ranks)
        found = []
        for slabs in self.plan.rounds:
            windows = [
                (slab, range(first, min(first + step, span.stop)))
                for slab in slabs
                for span in slab.blocks
                for first in range(span.start, span.stop, step)
            ]
            total = len(windows)
            # Consecutive windows for each rank, and as many: each reads one stretch of the disk.
            found.append(windows[total * turn // count : total * (turn + 1) // count])
        return found

    @property
    def read_bytes(self) -> int:
        """How many bytes this rank reads for all."""
        block_bytes = self.checkpoint.manifest.block_bytes
        windows = itertools.chain.from_iterable(self.windows)
        return sum(blocks_nbytes(slab.chunk, [window], block_bytes) for slab, window in windows)

    def attach(self) -> bool:
        """Open what the ranks of this machine share; return whether all of them could."""
        barrier, first = self.handles.barrier, self.plan.ranks[0]
        try:
            barrier.attach({rank: names[1] for rank, names in self.offers.items()})
            # The memory of the first of them: all use it.
            self.handles.memory.attach(self.offers[first][0], self.memory_bytes)
        except OSError:
            # Tells the others, who then read for themselves, too.
            barrier.leave()
            return False
        # True on all of them once all have attached, false on all if one could not.
        return barrier.meet()


def fetch_shared(storage: Storage, sharing: SharedReadContext, count: ByteCounter) -> bool:
    """Fill what is shared. False if another rank failed: the exchange that follows says why.

    Round n goes through slot n modulo `SLOTS` of the memory.
    """
    barrier, size, rounds = sharing.handles.barrier, sharing.plan.arena_bytes, sharing.plan.rounds
    try:
        # Mapped only after `attach`: the first rank has reserved the memory by then.
        data = sharing.handles.memory.view(sharing.memory_bytes)
        slots = [data[n * size : (n + 1) * size] for n in range(SLOTS)]
        with OpenFiles(storage, sharing.checkpoint) as files:
            return in_rounds(
                barrier,
                len(rounds),
                SLOTS,
                lambda n: _fill(files, sharing, n, slots[n % SLOTS], count),
                lambda n: _take(sharing, rounds[n], slots[n % SLOTS]),
            )
    except BaseException:
        # Whatever it is, also an interrupt: the others must not go on waiting for this rank.
        barrier.stop()
        raise


def _slab_starts(slabs: list[_SharedSlab]) -> dict[SlabId, int]:
    starts = itertools.accumulate((slab.room for slab in slabs), initial=0)
    return {slab.id: start for slab, start in zip(slabs, starts, strict=False)}


def _fill(
    files: OpenFiles, sharing: SharedReadContext, n: int, data: memoryview, count: ByteCounter
) -> None:
    """Read and verify this rank's share of a round."""
    block_bytes, starts = (
        sharing.checkpoint.manifest.block_bytes,
        _slab_starts(sharing.plan.rounds[n]),
    )
    for slab, window in sharing.windows[n]:
        file = files.chunk(slab.name, slab.chunk)
        span = file.span(window)
        # Blocks are placed as in the chunk, from the start of the slab's first block.
        at = starts[slab.id] + span.start - slab.begin // block_bytes * block_bytes
        file.read(window, data[at : at + span.stop - span.start])
        count.add(span.stop - span.start)


def _take(sharing: SharedReadContext, slabs: list[_SharedSlab], data: memoryview) -> None:
    """Copy what this rank wants of a round to where it belongs."""
    block_bytes, starts = sharing.checkpoint.manifest.block_bytes, _slab_starts(slabs)
    for slab in slabs:
        read = sharing.reads.get(slab.id)
        # None where only other ranks of this machine need the slab.
        if read is not None:
            at = starts[slab.id] + slab.begin % block_bytes
            scatter(read, np.frombuffer(data, np.uint8, slab.nbytes, at))
