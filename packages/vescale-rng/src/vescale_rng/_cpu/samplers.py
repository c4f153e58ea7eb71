"""Any increasing ranges of the elements of one op, drawn by torch itself into bounded scratch.

A sampler stands for one op on one device. `take` returns the values of a range of its elements in
memory order, `finish` leaves the generator where the op leaves it. Ranges come in increasing
order and do not overlap. Between them the generator is moved, never copied or seeded anew.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from vescale_rng._cpu import stream
from vescale_rng._cpu.draw_order import BLOCK, Blocks, DrawOrder, Elements, Pairs
from vescale_rng._distributions import Distribution


@dataclass(frozen=True)
class SerialOp:
    """One random op on one device: what, how many elements, which dtype, from which generator."""

    distribution: Distribution
    numel: int
    dtype: torch.dtype
    generator: torch.Generator


class Sampler(ABC):
    """The values of one op, range by range."""

    def __init__(self, op: SerialOp, scratch: int) -> None:
        self._op = op
        self._scratch = torch.empty(scratch, dtype=op.dtype, device="cpu")
        # Where the generator stands, in words since the start of the op.
        self._word = 0

    @abstractmethod
    def take(self, start: int, stop: int) -> torch.Tensor:
        """Draw elements [start, stop) in memory order, contiguous, valid until the next call."""

    @abstractmethod
    def finish(self) -> None:
        """Leave the generator, its cached normal included, where the global op leaves it."""

    def _move_to(self, word: int) -> None:
        stream.advance(word - self._word, self._op.generator)
        self._word = word

    def _draw(self, out: torch.Tensor, words: int) -> None:
        self._op.distribution.draw(out, self._op.generator)
        self._word += words


class ElementSampler(Sampler):
    """An op that takes the same number of words for every element."""

    def __init__(self, op: SerialOp, draw_order: Elements, longest: int) -> None:
        super().__init__(op, longest)
        self._draw_order = draw_order

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Draw elements [start, stop) in memory order, contiguous, valid until the next call."""
        words = self._draw_order.words
        self._move_to(start * words)
        out = self._scratch[: stop - start]
        self._draw(out, out.numel() * words)
        return out

    def finish(self) -> None:
        """See `Sampler.finish`."""
        self._move_to(self._op.numel * self._draw_order.words)


class BlockSampler(Sampler):
    """A `normal_` in blocks of 16: complete ones are drawn, also where a range ends inside one."""

    def __init__(self, op: SerialOp, draw_order: Blocks, longest: int) -> None:
        super().__init__(op, longest + 2 * BLOCK)
        self._draw_order = draw_order
        self._drawn = 0
        # From here on the elements are those that are drawn anew at the end.
        self.tail = op.numel - BLOCK if op.numel % BLOCK else op.numel
        # The last block drawn: the next range may begin inside it.
        self._last = torch.empty(BLOCK, dtype=op.dtype, device="cpu")
        self._tail: torch.Tensor | None = None

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Draw elements [start, stop) in memory order, contiguous, valid until the next call."""
        numel, tail = self._op.numel, self.tail
        if start >= tail:
            return self._draw_tail()[start - tail : stop - tail]
        first = start // BLOCK * BLOCK
        self._take_blocks(first, -(-min(stop, tail) // BLOCK) * BLOCK)
        if stop > tail:
            self._scratch[tail - first : numel - first] = self._draw_tail()
        return self._scratch[start - first : stop - first]

    def draw_blocks(self, out: torch.Tensor, first: int) -> None:
        """Draw complete blocks, of which `first` is the first element, straight into `out`."""
        words = self._draw_order.words
        self._move_to(first * words)
        self._draw(out, out.numel() * words)
        self._drawn = first + out.numel()

    def _take_blocks(self, first: int, stop: int) -> None:
        """Draw the blocks [first, stop) to the beginning of scratch."""
        if stop <= first:
            return
        # At most one block is wanted again: ranges do not overlap.
        again = first < self._drawn
        if again:
            self._scratch[:BLOCK] = self._last
        fresh = first + BLOCK * again
        if fresh < stop:
            self.draw_blocks(self._scratch[fresh - first : stop - first], fresh)
            self._last.copy_(self._scratch[stop - first - BLOCK : stop - first])

    def _draw_tail(self) -> torch.Tensor:
        # Drawn once, kept for every range that reaches into it, and after all other draws.
        if self._tail is None:
            self._move_to(self._draw_order.body(self._op.numel))
            self._tail = torch.empty(BLOCK, dtype=self._op.dtype, device="cpu")
            self._draw(self._tail, BLOCK * self._draw_order.words)
        return self._tail

    def finish(self) -> None:
        """See `Sampler.finish`."""
        self._move_to(self._draw_order.total(self._op.numel, cached=False))


class PairSampler(Sampler):
    """An op that draws two elements at a time and keeps the odd one out in the generator."""

    def __init__(self, op: SerialOp, draw_order: Pairs, longest: int) -> None:
        # Twice the room: `normal_` draws in pairs where its output is not contiguous. At least one
        # pair: `finish` may need it.
        super().__init__(op, 2 * (max(longest, 1) + 1))
        self._draw_order = draw_order
        # The first element may come from a pair of an earlier op.
        self._cached = int(stream.has_normal(op.generator))
        self._next = 0

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Draw elements [start, stop) in memory order, contiguous, valid until the next call."""
        first = start
        if start > self._next:
            # Begin at a pair: the first element's other half says where pairs begin.
            first -= (start - self._cached) % 2
            # A sample waits in the generator when the elements so far end inside a pair.
            if (self._next - self._cached) % 2:
                stream.drop_normal(self._op.generator)
            self._move_to(self._words_before(first))
        out = self._scratch[: 2 * (stop - first) : 2]
        self._draw(out, self._words_before(stop) - self._word)
        self._next = stop
        return out[start - first :].contiguous()

    def finish(self) -> None:
        """See `Sampler.finish`."""
        # The sample that stays cached belongs to the last pair, so that pair must be drawn.
        if self._next < self._op.numel:
            self.take(self._op.numel - 1, self._op.numel)

    def _words_before(self, element: int) -> int:
        return self._draw_order.total(element, bool(self._cached))


def sampler_of(op: SerialOp, draw_order: DrawOrder, longest: int) -> Sampler:
    """Return the sampler for ranges of at most `longest` elements of `op`."""
    match draw_order:
        case Elements():
            return ElementSampler(op, draw_order, longest)
        case Blocks():
            return BlockSampler(op, draw_order, longest)
        case Pairs():
            return PairSampler(op, draw_order, longest)
