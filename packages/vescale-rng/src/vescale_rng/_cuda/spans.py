"""A layout as few strided spans, each of which one kernel launch fills."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from vescale_rng._layout.layout import Box, Ints, ShardLayout, dense_strides

# Dims that the kernel knows; boxes of more are split along the slowest ones.
DIMS = 4


@dataclass(frozen=True)
class Span:
    """Up to four dims of a box, from slow to fast in the global tensor.

    Attributes:
        shape: four extents; the first ones are 1 where there are fewer dims.
        global_strides: elements from one index to the next in the global tensor.
        local_strides: the same in the local one.
        first: where the first element is in the global tensor.
        local_first: where it is in the local one.
    """

    shape: Ints
    global_strides: Ints
    local_strides: Ints
    first: int
    local_first: int

    @property
    def count(self) -> int:
        """Elements of the span."""
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the last place in the global tensor."""
        return self.first + 1 + _reach(self.shape, self.global_strides)

    @property
    def wide(self) -> bool:
        """Whether 32 bits cannot hold every place of it."""
        local = self.local_first + _reach(self.shape, self.local_strides)
        # Half of the range is left to a program's last block, which reaches beyond the span.
        return max(self.stop, local, self.count) >= 1 << 30


@lru_cache(maxsize=4096)
def spans_of(layout: ShardLayout, order: Ints | None) -> tuple[Span, ...]:
    """Return the spans of all boxes of a layout.

    Args:
        layout: the layout.
        order: dims from slowest to fastest in the order that elements are counted in; None is
            row-major.
    """
    strides = dense_strides(layout.global_shape, order)
    return tuple(
        span for box in layout.boxes if 0 not in box.shape for span in _cut_box(box, strides)
    )


def _cut_box(box: Box, strides: Ints) -> Iterator[Span]:
    first = _dot(box.global_offset, strides)
    # Sorted from slow to fast in the global tensor, so that neighbours can be merged.
    dims = _merged(sorted(zip(strides, box.shape, box.local_strides, strict=True), reverse=True))
    outer, inner = dims[:-DIMS], dims[-DIMS:]
    inner = [(0, 1, 0)] * (DIMS - len(inner)) + inner
    # More than four dims that cannot be merged are rare: a launch for each outer index then.
    for index in product(*(range(size) for _, size, _ in outer)):
        yield Span(
            shape=tuple(size for _, size, _ in inner),
            global_strides=tuple(stride for stride, _, _ in inner),
            local_strides=tuple(stride for _, _, stride in inner),
            first=first + _dot(index, [stride for stride, _, _ in outer]),
            local_first=box.local_offset + _dot(index, [stride for _, _, stride in outer]),
        )


def _merged(dims: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge neighbours among (global stride, extent, local stride), from slow to fast."""
    merged: list[tuple[int, int, int]] = []
    for stride, size, local in dims:
        # Its strides address nothing: kept, they would part neighbours that could be merged.
        if size == 1:
            continue
        if merged and merged[-1][0] == stride * size and merged[-1][2] == local * size:
            merged[-1] = (stride, merged[-1][1] * size, local)
        else:
            merged.append((stride, size, local))
    return merged


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _dot(indices: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * stride for i, stride in zip(indices, strides, strict=True))
