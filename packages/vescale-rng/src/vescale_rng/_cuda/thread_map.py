"""The map of ATen's random kernels on CUDA, in integers: threads, waves, segments, offsets.

Sources: ATen/native/cuda/DistributionTemplates.h (`calc_execution_policy`,
`distribution_nullary_kernel`) and TensorIterator.cpp (`SplitUntil32Bit`). CUDA.md has it in words.
"""

from collections.abc import Iterator
from dataclasses import dataclass

# Threads of a block of a random kernel.
THREADS_PER_BLOCK = 256
# 32-bit words that a generator's offset moves for one turn of a thread, whatever it uses of them.
WORDS_PER_TURN = 4
_INT32_MAX = 2**31 - 1


def threads_of_processors(processors: int, threads_per_processor: int) -> int:
    """Return the most threads that ATen launches for a random kernel.

    Args:
        processors: multiprocessors of the device.
        threads_per_processor: the most threads that reside on one of them.
    """
    return processors * (threads_per_processor // THREADS_PER_BLOCK) * THREADS_PER_BLOCK


@dataclass(frozen=True)
class Segment:
    """A range of an op's elements that one launch fills.

    Attributes:
        start: its first element, by place in global memory.
        stop: one past its last.
        words: what the op moves the generator before this launch, in 32-bit words.
    """

    start: int
    stop: int
    words: int


@dataclass(frozen=True)
class Segments:
    """All launches of an op, in order, and how far it moves the generator in all."""

    parts: tuple[Segment, ...]
    words: int

    def meeting(self, start: int, stop: int) -> Iterator[Segment]:
        """Yield those with elements in [start, stop)."""
        return (part for part in self.parts if part.start < stop and start < part.stop)


def increment(numel: int, wave: int) -> int:
    """Tell how far one launch over `numel` elements moves the generator, in 32-bit words.

    Args:
        numel: at least one.
        wave: elements that all threads together fill in one turn.
    """
    return ((numel - 1) // wave + 1) * WORDS_PER_TURN


def segments_of(numel: int, itemsize: int, wave: int) -> Segments:
    """Plan the launches of an op on a dense tensor: several where 32 bits cannot index it.

    Args:
        numel: elements of the global tensor.
        itemsize: bytes of one.
        wave: elements that all threads together fill in one turn.
    """
    words = 0
    parts = []
    if numel and not _fits(numel, itemsize):
        # The op reserves a place in the stream for all elements before it splits; it is not used.
        words += increment(numel, wave)
    for start, stop in _halved(0, numel, itemsize):
        parts.append(Segment(start, stop, words))
        words += increment(stop - start, wave)
    return Segments(tuple(parts), words)


def _fits(numel: int, itemsize: int) -> bool:
    return numel <= _INT32_MAX and (numel - 1) * itemsize + 1 <= _INT32_MAX


def _halved(start: int, stop: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Halve a range until 32 bits can index each part, in order; the first half is the smaller."""
    if start == stop:
        return
    if _fits(stop - start, itemsize):
        yield start, stop
        return
    middle = start + (stop - start) // 2
    yield from _halved(start, middle, itemsize)
    yield from _halved(middle, stop, itemsize)
