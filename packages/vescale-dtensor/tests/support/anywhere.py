"""A program that must give what one device gives, wherever its tensors lie.

`check` runs it on one device, and then on simulated ranks with layouts drawn at random for each
tensor: cut along any dims, replicated, and terms of sums and averages, on one and on two mesh axes.
"""

from __future__ import annotations

import random
import warnings

import torch
import vescale_dtensor as vd
from one_device import differences, full_tensors
from vescale_comm import simulate
from vescale_dtensor import Partial, Replicate, Shard

MESHES = {(4,): ("a",), (2, 2): ("dp", "tp")}
DRAWS = 4


class Anywhere:
    """Puts tensors somewhere: `mesh` is None for one device."""

    def __init__(self, mesh=None, seed=0):
        self.mesh, self.random = mesh, random.Random(seed)

    def __call__(self, tensor, grad=False):
        if self.mesh is None:
            return tensor.clone().requires_grad_(grad)
        averages = [Partial("avg")] if tensor.is_floating_point() else []
        kinds = [Replicate(), Partial(), *averages, *map(Shard, range(tensor.ndim))]
        placements = self.random.choices(kinds, k=self.mesh.ndim)
        placed = vd.distribute_tensor(tensor, self.mesh, placements, src_data_rank=None)
        return placed.requires_grad_(grad)


def _run(program, place):
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        return full_tensors(program(place))


def check(program):
    """Raise where ranks find something else than one device does.

    Where a view had to be a copy (a slice of nested cuts, say), writing to it may be refused: on
    every rank, and not in every draw.
    """
    wanted = _run(program, Anywhere())

    def on_a_rank(rank, world_size, sizes, seed):
        mesh = vd.init_device_mesh("cpu", sizes, mesh_dim_names=MESHES[sizes])
        try:
            found = _run(program, Anywhere(mesh, seed))
        except vd.UnsupportedError as problem:
            if "forced a copy" not in str(problem):
                raise
            return None
        return differences(found, wanted)

    refused = 0
    for sizes in MESHES:
        for seed in range(DRAWS):
            found = simulate(4)(on_a_rank, sizes, seed)
            if found == [None] * 4:
                refused += 1
                continue
            assert found == [[]] * 4, f"{sizes}, draw {seed}: {found}"
    assert refused < DRAWS
