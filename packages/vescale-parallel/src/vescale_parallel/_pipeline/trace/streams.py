"""Places in the random streams of a rank: the default generators of the host and of its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vescale_rng.cuda import CudaPosition
from vescale_rng.streams import Position, advance, position, seek

from vescale_parallel._errors import PipelineError

Place = tuple[Position | CudaPosition, ...]
"""Where each generator stands: that of the host first."""
Words = tuple[int, ...]
"""How many 32-bit words were drawn of each."""

_BLOCK = 624
_MOST_BLOCKS = 1_000_000


class Streams:
    """The default generators of this rank.

    Args:
        device_type: of the mesh; its generator counts beside that of the host.
    """

    def __init__(self, device_type: str) -> None:
        self._on_device = device_type == "cuda"
        if self._on_device:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # there are no generators before
        # States as torch gives them, and the place that they mean: to compare 5 KB takes a tenth of
        # the time that it takes to read them, and most forwards draw nothing.
        self._states: list[Tensor] = []
        self._place: Place = ()

    def _generators(self) -> list[torch.Generator | None]:
        if not self._on_device:
            return [None]
        return [None, torch.cuda.default_generators[torch.cuda.current_device()]]

    def here(self) -> Place:
        """Where they stand."""
        states = self._read()
        if not self._are(states):
            self._states = states
            self._place = tuple(position(one) for one in self._generators())
        return self._place

    def _read(self) -> list[Tensor]:
        host = torch.default_generator.get_state()
        return [host, torch.cuda.get_rng_state()] if self._on_device else [host]

    def _are(self, states: list[Tensor]) -> bool:
        known = self._states
        return len(known) == len(states) and all(map(torch.equal, known, states))

    def seek(self, place: Place) -> bool:
        """Go there; returns whether they stood elsewhere, as far as is known."""
        if place == self._place and self._are(self._read()):
            return False
        for one, generator in zip(place, self._generators(), strict=True):
            seek(one, generator)
        return True

    def skip(self, words: Sequence[int]) -> None:
        """Pass so many words, as if they had been drawn."""
        for count, generator in zip(words, self._generators(), strict=True):
            if count:
                advance(count, generator)


def drawn_otherwise(stages: Sequence[Sequence[str]], which: Sequence[int]) -> PipelineError:
    """What is wrong where stages have drawn other numbers than others pass for them.

    Returned, and not raised: at the end of a step a rank still takes what others send.

    Args:
        stages: the blocks of each.
        which: the stages of which one has.
    """
    named = [f"stage {at}, from block '{stages[at][0]}' to '{stages[at][-1]}'," for at in which]
    return PipelineError(
        f"{' or '.join(named)} draws other random numbers than it did for a batch of this shape "
        "before, in its blocks, between them or in its backward, so that other stages cannot know "
        "where theirs lie. How much a model draws must not depend on values, and may change with "
        "train mode only."
    )


def after(place: Place, words: Sequence[int]) -> Place:
    """Return the place behind so many words."""
    # Most models draw little, and this is asked at the end of each stage.
    if not any(words):
        return place
    return tuple(_after(one, count) for one, count in zip(place, words, strict=True))


def _after(place: Position | CudaPosition, words: int) -> Position | CudaPosition:
    if isinstance(place, CudaPosition) or not words:
        return place.after(words)
    # To draw what a block draws and drop it takes some microseconds, a jump ten milliseconds;
    # `advance` knows from where on it is the other way round.
    generator = torch.Generator()
    seek(place, generator)
    advance(words, generator)
    return position(generator)


def words_between(start: Place, end: Place, what: str) -> Words:
    """Count what was drawn from one place to another.

    Args:
        start: the earlier place.
        end: the later one, of the same streams.
        what: which part of the model drew, for the message.

    Raises:
        PipelineError: the generator was set to another place meanwhile, or a normal sample that it
            keeps for later came or went: other stages could not know it.
    """
    return tuple(_between(a, b, what) for a, b in zip(start, end, strict=True))


def _between(start: Position | CudaPosition, end: Position | CudaPosition, what: str) -> int:
    if isinstance(start, CudaPosition):
        assert isinstance(end, CudaPosition)
        return end.offset - start.offset
    assert isinstance(end, Position)
    if start.normal != end.normal:
        raise PipelineError(
            f"{what} draws normal numbers in pairs of which it leaves one for later, and its value "
            "is not known on other stages. Draw an even number of them, or 16 or more at once."
        )
    # There is no count in the state, so the stream is walked until both meet: once for each kind
    # of microbatch, and a block of 624 words takes some microseconds.
    at, words = start, 0
    for _ in range(_MOST_BLOCKS):
        if at.words == end.words and (at.index or _BLOCK) <= (end.index or _BLOCK):
            return words + (end.index or _BLOCK) - (at.index or _BLOCK)
        step = _BLOCK - (at.index or _BLOCK) + 1
        at, words = at.after(step), words + step
    raise PipelineError(
        f"{what} set the random generator anew, or drew more than {_MOST_BLOCKS * _BLOCK:,} "
        "numbers. A pipeline has to know how far each part of the model moves the generator."
    )
