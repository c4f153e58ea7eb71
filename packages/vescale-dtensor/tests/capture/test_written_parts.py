"""Captured writes to a part of what has gradients, or to what has parts: eager mode's bits."""

import pytest
import torch
import vescale_dtensor as vd
from vescale_comm import simulate
from vescale_dtensor import Replicate, Shard


def write_row(y):
    y[0] += 1.0
    return y


def write_columns(y):
    y[:, ::2] *= 2.0
    return y


def masked(y):
    y[:, :2] = 0.0
    return y.exp()


def columns_of_others(y):
    y[:, ::2] += y[:, 1::2]
    return y


def by_a_view(y):
    part = y[:, 1:3]
    part.mul_(2.0)
    return y * part.sum()


def below_a_view(y):
    part = y[:, 1:]
    y.mul_(3.0)
    return part.square()


def of_a_view(y):
    part = y.view(2, 2, 6)
    part[1].tanh_()
    return y + 1


PROGRAMS = (write_row, write_columns, masked, columns_of_others, by_a_view, below_a_view, of_a_view)
LAYOUTS = {"plain": None, "rows": [Shard(0)], "columns": [Shard(1)], "whole": [Replicate()]}


def compared(rank, world_size, placements):
    mesh = vd.init_device_mesh("cpu", (world_size,))

    def tensor(seed):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        return x if placements is None else vd.distribute_tensor(x, mesh, placements)

    for program in PROGRAMS:
        weight, other = tensor(0).requires_grad_(), tensor(0).requires_grad_()
        eager = lambda x, program=program, w=other: program(x * w).sum()  # noqa: E731
        step = vd.capture(lambda x, program=program, w=weight: program(x * w).sum())
        for seed in range(1, 4):
            found, expected = step(tensor(seed)), eager(tensor(seed))
            found.backward()
            expected.backward()
            for pair in ((found, expected), (weight.grad, other.grad)):
                one, two = (getattr(each, "full_tensor", each.detach)() for each in pair)
                assert torch.equal(one, two), (program.__name__, seed)
        assert len(step.programs) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_of_eager_mode(layout):
    simulate(1 if layout == "plain" else 2).run(compared, LAYOUTS[layout])
