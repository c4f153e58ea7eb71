"""Many ranks in one process: threads that exchange messages, and tensors that say they are pieces.

The package under test sees a Coordinator and the layout protocol, exactly as with real processes.
"""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from vescale_ckpt._load.load import LoadOptions, load_with
from vescale_ckpt._save.save import SaveOptions, save_with
from vescale_ckpt._storage.local import LocalStorage


class Exchange:
    """Where the threads of one world meet."""

    def __init__(self, world_size):
        self.messages = [b""] * world_size
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.world_size, self._next, self._lock = world_size, None, threading.Lock()

    def background(self):
        """The one other room of the same ranks."""
        with self._lock:
            self._next = self._next or Exchange(self.world_size)
            return self._next


@dataclass
class ThreadRank:
    rank: int
    world_size: int
    room: Exchange

    def exchange(self, message):
        self.room.messages[self.rank] = message
        self.room.barrier.wait()
        everyone = list(self.room.messages)
        self.room.barrier.wait()
        return everyone

    def meet(self, call):
        return lambda: None

    def refuse(self, call, error):
        raise AssertionError("no call of these threads fails before it begins")

    def background(self):
        return ThreadRank(self.rank, self.world_size, self.room.background())


def on_ranks(world_size, work):
    """Call `work(coordinator)` on every rank; returns each rank's value or exception."""
    room = Exchange(world_size)

    def guarded(rank):
        try:
            return work(ThreadRank(rank, world_size, room))
        except BaseException as error:
            # Where one rank is killed the others must not wait for it. An exception is no reason:
            # all ranks raise, or the test fails because one of them waits until the timeout.
            if not isinstance(error, Exception):
                room.barrier.abort()
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(guarded, range(world_size)))


def save_on(states, path, *, storages=None, **options):
    """Save `states[rank]` on every rank; returns each rank's None or exception."""

    def work(coordinator):
        storage = storages[coordinator.rank] if storages else LocalStorage()
        save_with(storage, coordinator, path, states[coordinator.rank], SaveOptions(**options))

    return on_ranks(len(states), work)


def load_on(intos, path, *, storages=None, **options):
    """Load into `intos[rank]` on every rank; returns each rank's state or exception."""

    def work(coordinator):
        storage = storages[coordinator.rank] if storages else LocalStorage()
        into = intos[coordinator.rank]
        return load_with(storage, coordinator, path, into, LoadOptions(**options))

    return on_ranks(len(intos), work)


def succeed(outcomes):
    """The outcomes, if no rank raised."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


@dataclass(frozen=True)
class PieceBox:
    global_offset: tuple
    shape: tuple
    local_offset: int
    local_strides: tuple


@dataclass(frozen=True)
class PieceLayout:
    global_shape: tuple
    boxes: tuple
    replica: tuple = (0, 1)


@dataclass
class Piece:
    """A sharded tensor by the protocol between packages."""

    local: torch.Tensor
    layout: PieceLayout

    def __vescale_layout__(self):
        return self.layout

    def to_local(self):
        return self.local


def row_major(shape):
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def piece_of(whole, regions, *, gap=0, fill=True):
    """A Piece that holds `regions` [(offset, shape)] of `whole` in one flat buffer.

    The boxes lie `gap` elements apart, so that a wrong stride or offset would show.
    """
    total = sum(math.prod(shape) + gap for _, shape in regions) + gap
    local = torch.full((total,), 77).to(whole.dtype)
    boxes, position = [], gap
    for offset, shape in regions:
        boxes.append(PieceBox(tuple(offset), tuple(shape), position, row_major(shape)))
        if fill:
            view = local.as_strided(shape, row_major(shape), position)
            view.copy_(region_of(whole, offset, shape))
        position += math.prod(shape) + gap
    return Piece(local, PieceLayout(tuple(whole.shape), tuple(boxes)))


def region_of(whole, offset, shape):
    """The elements of a box."""
    for dim, (start, n) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(dim, start, n)
    return whole


def assert_filled(piece, whole):
    """Every box of `piece` holds what `whole` has there, bit for bit; the gaps are untouched."""
    untouched = torch.ones(piece.local.numel(), dtype=torch.bool)
    for box in piece.layout.boxes:
        view = piece.local.as_strided(box.shape, box.local_strides, box.local_offset)
        assert bits(view).equal(bits(region_of(whole, box.global_offset, box.shape)))
        untouched.as_strided(box.shape, box.local_strides, box.local_offset).fill_(False)
    assert bool((piece.local[untouched] == torch.tensor(77).to(whole.dtype)).all())


def bits(tensor):
    """A tensor as its bytes, so that nan equals nan and 0.0 differs from -0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def cut(n, parts):
    """The torch.chunk rule: (start, length) of every part, empty ones last."""
    share = -(-n // parts)
    return [(min(i * share, n), max(0, min(share, n - i * share))) for i in range(parts)]


def sharded(whole, parts, dim=0, **how):
    """`whole` cut along `dim`: one Piece for every rank, possibly with no box."""
    pieces = []
    for start, length in cut(whole.shape[dim], parts):
        offset = [start if d == dim else 0 for d in range(whole.ndim)]
        shape = [length if d == dim else n for d, n in enumerate(whole.shape)]
        pieces.append(piece_of(whole, [(offset, shape)] if length else [], **how))
    return pieces
