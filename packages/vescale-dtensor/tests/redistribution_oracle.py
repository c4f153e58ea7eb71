"""What redistribution means, in dense torch: how values lie under placements, and back."""

from __future__ import annotations

from functools import reduce
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from vescale_dtensor._placements import Partial
from vescale_dtensor._redistribution_boxes import Frame, Grid, varied

_UNIT = 24
_FOLD = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


class Case(NamedTuple):
    """A redistribution of a tensor of `shape` on a mesh of `sizes`."""

    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    source: tuple[object, ...]
    target: tuple[object, ...]


def coordinates(sizes):
    return list(varied((0,) * len(sizes), tuple(range(len(sizes))), sizes))


def frame_of(case, coordinate, itemsize=8):
    return Frame(case.sizes, case.shape, coordinate, itemsize)


def dense(shape, seed=0):
    """Different integers that averages divide, so that every reduction below is exact."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randperm(prod(shape), generator=generator) - prod(shape) // 2
    return (_UNIT * numbers).to(torch.float64).reshape(shape)


def take(x, box):
    for dim, (low, high) in enumerate(box):
        x = x.narrow(dim, low, high - low)
    return x.clone()


def boxes(placements, sizes, shape):
    grid = Grid(placements, Frame(sizes, shape, (0,) * len(sizes), 1))
    return {c: grid.box(c) for c in coordinates(sizes)}


def spread(x, placements, sizes, seed=0):
    """Local tensors, by coordinate, that together mean `x`."""
    generator = torch.Generator().manual_seed(seed)
    terms = _terms(x, placements, sizes, generator)
    return {c: take(terms[c], box) for c, box in boxes(placements, sizes, tuple(x.shape)).items()}


def _terms(x, placements, sizes, generator):
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
        inner = _terms(value, placements[1:], sizes[1:], generator)
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


def complete(local_by_coordinate, placements, sizes):
    """The tensors of all coordinates after every reduction that is owed, inner axes first."""
    values = dict(local_by_coordinate)
    for axis in reversed(range(len(sizes))):
        if isinstance(placements[axis], Partial):
            op = placements[axis].reduce_op
            values = {c: fold([values[m] for m in varied(c, (axis,), sizes)], op) for c in values}
    return values


def fold(tensors: list[Tensor], op: str) -> Tensor:
    if op == "norm2":
        return sum(t.square() for t in tensors).sqrt()
    total = reduce(_FOLD[op], tensors)
    return total / len(tensors) if op == "avg" else total


def check(case, outputs, x):
    """Assert that outputs, by coordinate, are `x` in the target's placements."""
    complete_ones = complete(outputs, case.target, case.sizes)
    for coordinate, box in boxes(case.target, case.sizes, case.shape).items():
        found, wanted = complete_ones[coordinate], take(x, box)
        assert torch.equal(found, wanted), f"{case} at {coordinate}: {found} is not {wanted}"
