"""The map of ATen's fused dropout kernel on CUDA, in numbers.

`F.dropout` on CUDA is `native_dropout`. Its kernel loads V neighbours at once, and from the same
blocks come V neighbouring numbers; V depends on the dtype and on the size of the global tensor.
Source: ATen/native/cuda/Dropout.cu. CUDA.md has the map in words.
"""

import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vescale_rng._cuda.device import Drawer
from vescale_rng._cuda.generator_state import CudaPosition
from vescale_rng._cuda.philox import philox4x32, split64
from vescale_rng._cuda.recipes import Recipe
from vescale_rng._cuda.thread_map import WORDS_PER_TURN, Segment, Segments, increment
from vescale_rng._layout.layout import ShardLayout


@dataclass(frozen=True)
class DropoutOp:
    """What is dropped out, and where.

    Attributes:
        p: probability of an element to be zeroed.
        dtype: of the tensor.
        device: the device that draws.
        threads: those whose numbers they are.
    """

    p: float
    dtype: torch.dtype
    device: Drawer
    threads: int


@dataclass(frozen=True)
class DropoutShape:
    """How a tensor of some size is dropped out.

    Attributes:
        vector: neighbours that a thread takes at once; 1 is the map of other random kernels, over
            the elements in row-major order whatever their memory order.
        threads: those whose numbers they are.
        numel: elements of the global tensor.
    """

    vector: int
    threads: int
    numel: int

    @property
    def wave(self) -> int:
        """Elements that all threads fill in one turn."""
        return self.threads * (4 if self.vector == 1 else self.vector)

    @property
    def turn(self) -> int:
        """Words that a thread passes in one turn."""
        return WORDS_PER_TURN * max(1, self.vector // 4)

    @property
    def segments(self) -> Segments:
        """One launch, for any size: this kernel is not split."""
        # The words are reserved as if there were no vectors.
        words = increment(self.numel, self.threads * 4)
        return Segments((Segment(0, self.numel, 0),), words)

    def order(self, layout: ShardLayout) -> ShardLayout:
        """Return the layout whose memory order is the one that elements are counted in."""
        return replace(layout, memory_order=None) if self.vector == 1 else layout

    def recipe(self, p: float, dtype: torch.dtype) -> tuple[str, Recipe]:
        """Return the map and the arithmetic of the kernel."""
        name, unroll = ("grid", 4) if self.vector == 1 else ("vectors", self.vector)
        bits: int = struct.unpack("<q", struct.pack("<d", threshold(p, dtype)))[0]
        return name, Recipe(unroll, "bernoulli", (bits, 0, 0))


def threshold(p: float, dtype: torch.dtype) -> float:
    """Return the fp32 number below which an element's uniform number keeps it.

    The numbers are fp32 for every dtype; for fp64 they are compared with an fp64 probability,
    which comes to the same as the next fp32 number that is not smaller.
    """
    keep = 1.0 - p
    rounded = float(np.float32(keep))
    if dtype == torch.float64 and rounded < keep:
        rounded = float(np.nextafter(np.float32(keep), np.float32(2)))
    return rounded


def scales(p: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return what kept elements and their gradients are multiplied by: not always the same."""
    keep = 1.0 - p
    # In the forward pass the probability is rounded first.
    forward = keep if dtype == torch.float64 else float(np.float32(keep))
    return 1.0 / forward, 1.0 / keep


def vector_of(numel: int, widest: int) -> int:
    """Return the vector of a tensor: the widest, halved until it divides the number of elements."""
    vector = widest
    while numel % vector:
        vector //= 2
    return vector


def kept_elements(
    vector: int, count: int, place: CudaPosition
) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Tell what is kept of so few elements with probability one half, by vectors of that width."""
    index = np.arange(count, dtype=np.int64)
    # So few elements are one for each thread: no turns, no lanes far apart.
    thread, inside = (index, index * 0) if vector == 1 else (index // vector, index % vector)
    low, high = split64(place.offset // 4 + inside // 4)
    key = (place.seed & 0xFFFFFFFF, place.seed >> 32)
    words = np.stack(philox4x32((low, high, thread, 0), key))
    word = np.take_along_axis(words, (inside % 4)[None], 0)[0]
    uniform = word.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    return np.asarray(uniform < np.float32(0.5))
