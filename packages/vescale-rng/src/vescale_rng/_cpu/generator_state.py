"""The bytes of torch's CPU generator, read and written. The one module that knows their layout.

`Generator.get_state` is public, the meaning of its bytes is not: `at::CPUGeneratorImplState`
(aten/src/ATen/CPUGeneratorImpl.cpp). Before the first use the layout is checked against what the
installed torch does, so that another layout is an error and never wrong numbers.
"""

import math
import struct
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from vescale_rng._cpu.mt19937_jump import WORDS, Words, block_after
from vescale_rng._errors import RngError, StateError

# Words at the block's end stay ahead by one: `left` counts down to 1 where `index` counts to 624.
_STATE = np.dtype(
    {
        "names": ["seed", "left", "seeded", "index", "words", "normal", "has_normal"],
        "formats": ["<u8", "<i4", "<i4", "<u8", ("<u8", WORDS), "<f8", "<i4"],
        "offsets": [0, 8, 12, 16, 24, 5024, 5040],
        "itemsize": 5056,
    }
)
# The same offsets, for the few fields that `summary` reads: ten times as fast as numpy's records.
_SEED = struct.Struct("<Q")
_FLAG = struct.Struct("<i")


@dataclass(frozen=True)
class Position:
    """A place in the stream of a CPU generator: all that decides the numbers that follow.

    Attributes:
        seed: what `Generator.initial_seed` answers.
        words: the block of 624 words that is being handed out, as little-endian uint32 bytes.
        index: how many words of the block are used; 0 is a freshly seeded generator, whose block
            precedes the first one and is never handed out.
        normal: the second sample of the last pair of normals, kept for the next draw, if any.
    """

    seed: int
    words: bytes
    index: int
    normal: float | None

    def __post_init__(self) -> None:
        """Refuse a sample that no generator draws: the next draw would hand it out."""
        if self.normal is not None and not math.isfinite(self.normal):
            raise StateError(f"a generator keeps no normal sample {self.normal}")

    def after(self, words: int) -> "Position":
        """Return the place after `words` more 32-bit draws; the cost grows with their logarithm.

        Raises:
            RngError: `words` is negative.
        """
        if words < 0:
            raise RngError(f"a stream has no way back: {words} words were asked for")
        if words == 0:
            return self
        # A freshly seeded block is used up, although torch writes index 0 for it.
        used = (self.index or WORDS) + words
        blocks, index = (used - 1) // WORDS, (used - 1) % WORDS + 1
        if blocks == 0:
            return replace(self, index=index)
        block: Words = np.frombuffer(self.words, "<u4").astype(np.uint32)
        # As uint32 of this machine: the jump does arithmetic, and the state's bytes are
        # little-endian.
        moved = block_after(block, blocks).astype("<u4").tobytes()
        return replace(self, words=moved, index=index)


def read(generator: torch.Generator) -> Position:
    """Tell where `generator` stands."""
    _check_layout()
    return _decode(generator.get_state())


def write(generator: torch.Generator, position: Position) -> None:
    """Set `generator` to `position`."""
    _check_layout()
    generator.set_state(_encode(position))


def summary(generator: torch.Generator) -> tuple[int, ...]:
    """Return a few integers that differ where the states of two CPU generators differ.

    The words of a block follow from any of them that is old enough, so a sample of them tells two
    blocks apart; all of them need not be read.
    """
    _check_layout()
    words: Any = generator.get_state().numpy()  # a buffer, as only newer numpy says
    raw = memoryview(words)
    seed, index = _SEED.unpack_from(raw, 0)[0], _SEED.unpack_from(raw, 16)[0]
    sample = (_SEED.unpack_from(raw, 24 + 4 * word)[0] for word in (0, 396, WORDS - 2))
    (has_normal,) = _FLAG.unpack_from(raw, 5040)
    # A normal that was used up leaves its bits behind: they decide nothing any more.
    normal = _SEED.unpack_from(raw, 5024)[0] if has_normal else 0
    return seed, index, *sample, has_normal, normal


def _decode(state: torch.Tensor) -> Position:
    raw = state.numpy().view(_STATE)[0]
    return Position(
        seed=int(raw["seed"]),
        words=raw["words"].astype("<u4").tobytes(),
        index=int(raw["index"]),
        normal=float(raw["normal"]) if raw["has_normal"] else None,
    )


def _encode(position: Position) -> torch.Tensor:
    raw = np.zeros(1, _STATE)
    raw["seed"] = position.seed
    # A fresh generator has left = 1 and index 0: it makes a block at the first draw.
    raw["left"] = WORDS + 1 - position.index if position.index else 1
    raw["seeded"] = 1
    raw["index"] = position.index
    raw["words"] = np.frombuffer(position.words, "<u4")
    raw["normal"] = 0.0 if position.normal is None else position.normal
    raw["has_normal"] = position.normal is not None
    return torch.from_numpy(raw.view(np.uint8))


@cache
def _check_layout() -> None:
    """Move a private generator past three blocks both ways, with a cached normal sample."""
    generator = torch.Generator().manual_seed(20260101)
    torch.empty(3, dtype=torch.float32, device="cpu").normal_(generator=generator)
    before = generator.get_state()
    torch.empty(2000, dtype=torch.uint8, device="cpu").random_(generator=generator)
    after = generator.get_state()
    # Three ways to find out: the size, a round trip without loss, and the engine itself.
    if before.numel() != _STATE.itemsize:
        found = f"{before.numel()} bytes instead of {_STATE.itemsize}"
    elif not torch.equal(_encode(_decode(before)), before):
        found = "fields that this version does not know"
    elif not torch.equal(_encode(_decode(before).after(2000)), after):
        found = "another random engine than mt19937"
    else:
        return
    raise StateError(
        f"torch {torch.__version__} keeps the state of its CPU generator in a form that this "
        f"version of vescale-rng cannot read ({found}); install a version that supports it"
    )
