"""Any range of an op's elements, drawn by ATen itself from a shifted offset.

All threads together fill a *wave* of elements, then each moves on by one block of its stream. So
ATen's kernel on a tensor of its own, from an offset a few blocks on, gives complete waves of the
larger tensor, beginning with that one.
"""

from collections.abc import Callable

import torch

from vescale_rng._cuda.thread_map import WORDS_PER_TURN, Segment, Segments

# Elements of scratch: a fraction of what any GPU has, and several waves of the largest.
WINDOW = 1 << 23


class Waves:
    """The values of one op, range by range, in any order.

    Args:
        draw: fills its first argument from an offset, in words since the start of the op.
        segments: the launches of the op on one device.
        wave: elements that all threads fill in one turn.
        scratch: a contiguous tensor of the op's dtype: `room` says of how many elements.
        turn: words that a thread passes with each wave.
    """

    def __init__(
        self,
        draw: Callable[[torch.Tensor, int], None],
        segments: Segments,
        wave: int,
        scratch: torch.Tensor,
        turn: int = WORDS_PER_TURN,
    ) -> None:
        self._draw = draw
        self._segments = segments
        self._wave = wave
        self._scratch = scratch
        self._turn = turn

    @staticmethod
    def room(longest: int, wave: int, numel: int) -> int:
        """Count the elements of scratch for ranges of at most `longest` of `numel` elements."""
        return min(numel, longest + wave)

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Draw elements [start, stop) in memory order, contiguous, valid until the next call."""
        parts = list(self._segments.meeting(start, stop))
        if len(parts) == 1:
            return self._take(parts[0], start, stop)
        # Across the seam of two launches: a copy, once in half a billion elements.
        ranges = [(part, max(start, part.start), min(stop, part.stop)) for part in parts]
        return torch.cat([self._take(*each).clone() for each in ranges])

    def _take(self, part: Segment, start: int, stop: int) -> torch.Tensor:
        turn = (start - part.start) // self._wave
        first = part.start + turn * self._wave
        # From the start of a wave any length will do: fewer elements use fewer threads, and
        # each of those has the element that it has among more.
        drawn = self._scratch[: stop - first]
        self._draw(drawn, part.words + turn * self._turn)
        return drawn[start - first :]
