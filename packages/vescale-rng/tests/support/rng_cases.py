"""Random tensors, meshes, placements and distributions, and the assembly of a tensor from shards.

No process group: every coordinate of a mesh is played in turn, each with its own generator.
"""

from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from hypothesis import strategies as st
from rng_pieces import FLOATS, Replicate, Shard, boxes_of, strided
from vescale_rng import (
    Bernoulli,
    Cauchy,
    Exponential,
    Geometric,
    LogNormal,
    Normal,
    RandInt,
    Random,
    Uniform,
    layout_of,
)

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)

FLOAT_DISTRIBUTIONS = (
    Uniform(),
    Uniform(-2.0, 3.5),
    Normal(),
    Normal(1.0, 0.02),
    LogNormal(),
    Bernoulli(0.3),
    Exponential(1.5),
    Geometric(0.25),
    Cauchy(),
    Random(),
    RandInt(-3, 9),
)
OTHERS = (
    (Bernoulli(0.3), torch.bool),
    (Bernoulli(0.5), torch.int64),
    (Random(), torch.bool),
    (RandInt(0, 2), torch.bool),
    (RandInt(0, 100), torch.uint8),
    (RandInt(-5, 2**40), torch.int64),
    (RandInt(0, 2**28), torch.int64),
    (RandInt(0, 2**28 - 1), torch.int64),
    (RandInt(0, 2**30), torch.int32),
    (Random(), torch.int64),
    (Random(), torch.int32),
    (Geometric(0.25), torch.int16),
)


@dataclass(frozen=True)
class Case:
    """A tensor of one device, and a mesh that shards it."""

    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    mesh: tuple[int, ...]
    placements: tuple[object, ...]
    backwards: bool = False

    def coordinates(self):
        return product(*(range(n) for n in self.mesh))

    def layout(self, coordinate):
        layout = layout_of(
            self.shape, self.placements, self.mesh, coordinate, memory_order=self.order
        )
        # Nothing says in which order a layout lists its boxes.
        return replace(layout, boxes=layout.boxes[::-1]) if self.backwards else layout


def cut(whole, layout, order):
    """The local part of a whole tensor."""
    local = strided(layout.local_shape, order, whole.dtype)
    for slices, view in boxes_of(local, layout):
        view.copy_(whole[slices])
    return local


def check_every_rank(case, one_device, piece, *, order=None, seed=77, warmup=0):
    """Compare what each rank draws, and leaves of the default generator, with one device.

    `one_device()` gives the whole, `piece(layout)` a rank's part of it, `order` is the memory
    order of the results.
    """
    torch.manual_seed(seed)
    torch.empty(warmup).normal_()
    before = torch.get_rng_state()
    expected = one_device()
    after = torch.get_rng_state()
    for coordinate in case.coordinates():
        layout = case.layout(coordinate)
        torch.set_rng_state(before)
        found = piece(layout)
        assert found.dtype == expected.dtype
        assert torch.equal(
            found, cut(expected, replace(case, order=order).layout(coordinate), order)
        )
        assert torch.equal(torch.get_rng_state(), after)


def placed(ndim):
    """A placement for a tensor of `ndim` dims."""
    shard = st.builds(Shard, st.integers(0, ndim - 1), st.sampled_from((1, 1, 1, 2, 3)))
    return shard | st.just(Replicate()) if ndim else st.just(Replicate())


@st.composite
def cases(draw, most=4000, orders=True):
    """Shapes of 0-4 dims (also empty), any memory order, meshes of 1-4 axes."""
    shape = tuple(draw(st.lists(st.integers(0, 40), max_size=4)))
    while prod(shape) > most:
        widest = shape.index(max(shape))
        shape = (*shape[:widest], shape[widest] // 2, *shape[widest + 1 :])
    order = draw(st.permutations(range(len(shape))).map(tuple)) if orders else None
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    while prod(mesh) > 16:
        mesh = mesh[1:]
    placements = tuple(draw(placed(len(shape))) for _ in mesh)
    return Case(shape, order, mesh, placements, draw(st.booleans()))


def draws():
    """A distribution and a dtype that torch draws it for."""
    floats = st.tuples(st.sampled_from(FLOAT_DISTRIBUTIONS), st.sampled_from(FLOATS))
    return floats | st.sampled_from(OTHERS)
