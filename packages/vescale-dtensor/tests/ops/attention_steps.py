"""A step of attention, with whole tensors and with distributed ones, and how the two compare."""

from __future__ import annotations

from math import prod

import torch
from one_device import full_tensors
from vescale_comm import simulate
from vescale_dtensor import distribute_tensor, init_device_mesh, sequence_attention


def laid(parts, mesh, *placements):
    """Leaves: the parts, or DTensors where there is a mesh. One list of placements is for all."""
    if mesh is not None:
        each = placements if len(placements) > 1 else placements * len(parts)
        pairs = zip(parts, each, strict=True)
        parts = [distribute_tensor(one, mesh, where) for one, where in pairs]
    return [one.requires_grad_() for one in parts]


def with_gradients(result, leaves):
    """The whole result, and whole gradients of the sum of its squares."""
    result.square().sum().backward()
    return full_tensors([result, *[one.grad for one in leaves]])


def require_same(step, sizes, names=None, *, way="auto", rtol=1e-10, atol=1e-12):
    """What a step finds on every rank of a mesh is what it finds without one."""

    def program(rank, world_size):
        with sequence_attention(way):
            return step(init_device_mesh("cpu", sizes, mesh_dim_names=names))

    wanted = step(None)
    for found in simulate(prod(sizes)).run(program):
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)
