"""What redistribution means, in dense torch: how values lie under placements, and back."""

from __future__ import annotations

from functools import reduce
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.placements import InterleavedShard, Partial, Shard, StridedShard
from vescale_dtensor._layout.shard_geometry import check_fits
from vescale_dtensor._redistribute.ownership import PlanContext, coordinates_along

_UNIT = 24
_FOLD = dict(sum=torch.add, avg=torch.add, max=torch.maximum, min=torch.minimum, prod=torch.mul)


class Case(NamedTuple):
    """A redistribution of a tensor of `shape` on a mesh of `sizes`."""

    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    source: tuple[object, ...]
    target: tuple[object, ...]


def coordinates(sizes):
    return list(coordinates_along((0,) * len(sizes), tuple(range(len(sizes))), sizes))


def frame_of(case, coordinate, itemsize=8):
    return PlanContext(case.sizes, case.shape, coordinate, itemsize)


def dense(shape, seed=0):
    """Different integers that averages divide, so that every reduction below is exact."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randperm(prod(shape), generator=generator) - prod(shape) // 2
    return (_UNIT * numbers).to(torch.float64).reshape(shape)


def piece(x, placements, sizes, coordinate):
    """What a coordinate holds of a dense tensor, by chunk, split, flatten and cat alone."""
    place = {dim: dim for dim in range(x.ndim)}  # where the global dims are in what is left
    for placement, count, index in zip(placements, sizes, coordinate, strict=True):
        if not placement.is_sharded():
            continue
        dims = placement.cut_dims()
        first, last = place[dims[0]], place[dims[-1]]
        if last > first:
            x = x.flatten(first, last)
            place = {d: min(p, first) if p <= last else p - last + first for d, p in place.items()}
        x = _chunk_of(x, placement, first, count, index)
    return x.clone()


def _chunk_of(x, placement, dim, count, index):
    if isinstance(placement, Shard):
        return _chunks(x, count, dim)[index]
    if isinstance(placement, InterleavedShard):
        blocks = x.split([x.shape[dim] // placement.blocks] * placement.blocks, dim)
        return torch.cat([_chunks(block, count, dim)[index] for block in blocks], dim)
    if isinstance(placement, StridedShard):
        blocks = _chunks(x, placement.split_factor, dim)
        return torch.cat([_chunks(block, count, dim)[index] for block in blocks], dim)
    unit = x.shape[dim] // max(1, sum(placement.local_units))
    return x.split([unit * n for n in placement.local_units], dim)[index]


def _chunks(x, count, dim):
    found = list(x.chunk(count, dim))[:count]
    return found + [x.narrow(dim, 0, 0)] * (count - len(found))


def pieces(x, placements, sizes):
    return {c: piece(x, placements, sizes, c) for c in coordinates(sizes)}


def legal(placements, sizes, shape):
    """Whether placements fit a shape."""
    try:
        check_fits(placements, sizes, shape)
    except LayoutError:
        return False
    return True


def local_tensors(x, placements, sizes, seed=0):
    """Local tensors, by coordinate, that together mean `x`."""
    generator = torch.Generator().manual_seed(seed)
    terms = _partial_values(x, placements, sizes, generator)
    return {c: piece(terms[c], placements, sizes, c) for c in coordinates(sizes)}


def _partial_values(x, placements, sizes, generator):
    if not placements:
        return {(): x}
    first, count = placements[0], sizes[0]
    values = _split(x, first.reduce_op, count, generator) if first.is_partial() else [x] * count
    # A replica is one value, so its terms have to be the same ones, too.
    state = generator.get_state()
    result = {}
    for index, value in enumerate(values):
        if not first.is_partial():
            generator.set_state(state)
        inner = _partial_values(value, placements[1:], sizes[1:], generator)
        result |= {(index, *rest): term for rest, term in inner.items()}
    return result


def _split(x, op, count, generator):
    """`count` integer tensors whose reduction is `x`."""
    noise = [
        _UNIT * torch.randint(-4, 5, x.shape, generator=generator).to(x.dtype)
        for _ in range(count - 1)
    ]
    if op in ("max", "min"):
        sign = -1 if op == "max" else 1
        return _shuffled([x, *(x + sign * n.abs() for n in noise)], generator)
    if op == "prod":
        signs = [n.sign() + (n == 0) for n in noise]
        return [reduce(torch.mul, signs, x), *signs]
    if op == "norm2":  # 3, 4 and 5 keep roots exact
        return [0.6 * x, 0.8 * x, *[0 * n for n in noise[1:]]]
    total = x * count if op == "avg" else x
    return [total - sum(noise), *noise]


def _shuffled(tensors, generator):
    return [tensors[i] for i in torch.randperm(len(tensors), generator=generator)]


def reduced(local_by_coordinate, placements, sizes):
    """The tensors of all coordinates after every reduction that is owed, inner axes first."""
    values = dict(local_by_coordinate)
    for axis in reversed(range(len(sizes))):
        if isinstance(placements[axis], Partial):
            op = placements[axis].reduce_op
            values = {
                c: fold([values[m] for m in coordinates_along(c, (axis,), sizes)], op)
                for c in values
            }
    return values


def fold(tensors: list[Tensor], op: str) -> Tensor:
    if op == "norm2":
        return sum(t.square() for t in tensors).sqrt()
    total = reduce(_FOLD[op], tensors)
    return total / len(tensors) if op == "avg" else total


def check(case, outputs, x):
    """Assert that outputs, by coordinate, are `x` in the target's placements."""
    complete_ones = reduced(outputs, case.target, case.sizes)
    for coordinate, wanted in pieces(x, case.target, case.sizes).items():
        found = complete_ones[coordinate]
        assert torch.equal(found, wanted), f"{case} at {coordinate}: {found} is not {wanted}"
