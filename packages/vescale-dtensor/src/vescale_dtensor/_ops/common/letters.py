"""Letters for dims, as in einsum: what most rules say of their operands (see `Signature`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import overload

from torch import Tensor

from vescale_dtensor._planning import Dims


@overload
def letters(ndim: int) -> tuple[int, ...]: ...
@overload
def letters(ndim: int, without: Collection[int | None]) -> tuple[int | None, ...]: ...
def letters(ndim: int, without: Collection[int | None] = ()) -> tuple[int | None, ...]:
    """A letter for each of so many dims, but for those that may not be sharded.

    Letters are numbers, so that dims of one number in several operands go together.
    """
    return tuple([None if dim in without else dim for dim in range(ndim)])


def no_letters(operand: Tensor) -> Dims:
    """Those of an operand that every rank needs all of."""
    return (None,) * operand.ndim


def broadcast_letters(shapes: Sequence[Sequence[int]]) -> tuple[tuple[Dims, ...], Dims]:
    """A letter per output dim, counted from the right; None where an operand is broadcast."""
    ndim = max(map(len, shapes))
    extents = [1] * ndim
    for shape in shapes:
        for back in range(1, len(shape) + 1):
            if shape[-back] != 1:
                extents[-back] = shape[-back]
    # Loops: most first calls come here, and until 3.12 each comprehension is a call.
    inputs: list[Dims] = []
    for shape in shapes:
        dims: list[int | None] = []
        for at, extent in enumerate(shape, ndim - len(shape)):
            dims.append(None if extent == 1 != extents[at] else at)
        inputs.append(tuple(dims))
    return tuple(inputs), letters(ndim)


def added_letters(shape: Sequence[int], dims: Dims, extents: Sequence[int]) -> Dims | None:
    """Letters of an operand that is broadcast to `dims` of these extents, from the right.

    None where it has more dims than those.
    """
    front = len(dims) - len(shape)
    if front < 0:
        return None
    pairs = zip(shape, extents[front:], dims[front:], strict=True)
    return tuple([letter if n == extent else None for n, extent, letter in pairs])


def drop_letter(dims: Dims, letter: int | None) -> Dims:
    """The same dims, of which the one with this letter may not be sharded."""
    return tuple([None if each == letter else each for each in dims])
