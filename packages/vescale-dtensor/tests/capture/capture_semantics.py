"""What the tests of captured semantics share: data, and the comparison of a case with eager."""

import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import nn
from torch.utils._pytree import tree_flatten
from vescale_comm.testing import device_mesh
from vescale_dtensor import Replicate, Shard


def eager(function, **how):
    return function


def grid():
    return device_mesh((2, 2), ("dp", "tp"))


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spread(value, dp=None, tp=None, grad=False):
    layout = [dp or Replicate(), tp or Replicate()]
    whole = value.clone().requires_grad_(grad)
    return vd.distribute_tensor(whole, grid(), layout, src_data_rank=None)


class Mlp(nn.Module):
    """A residual block of which tp cuts the weights."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        for linear, dim in ((self.up, 0), (self.down, 1)):
            whole, layout = linear.weight.detach(), [Replicate(), Shard(dim)]
            weight = vd.distribute_tensor(whole, mesh, layout, src_data_rank=None)
            linear.weight = nn.Parameter(weight)
        vd.distribute_module(self, mesh)

    def forward(self, x):
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


def plainly(value):
    """What can be compared: layouts and local data."""
    if isinstance(value, vd.DTensor):
        return value.placements, value.shape, value.requires_grad, value._local_tensor.detach()
    return value.detach() if isinstance(value, torch.Tensor) else value


def same(one, two):
    ones, twos = tree_flatten(one), tree_flatten(two)
    assert ones[1] == twos[1]
    for x, y in zip(ones[0], twos[0], strict=True):
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, y)
        else:
            assert x == y


CALLS = 4


def check(rank, world_size, case):
    """Run a case on a rank, in eager mode and captured."""
    torch.manual_seed(0)
    expected = case(eager)
    torch.manual_seed(0)
    made = []

    def captured(function, **how):
        made.append(vd.capture(function, **how))
        return made[-1]

    found = case(captured)
    state = torch.get_rng_state()
    for step in range(CALLS):
        torch.set_rng_state(state)
        wanted = torch.utils._pytree.tree_map(plainly, expected(step))
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        same(torch.utils._pytree.tree_map(plainly, found(step)), wanted)
        assert torch.equal(after, torch.get_rng_state())
        state = after
    for one in made[-1:]:
        assert 1 <= len(one.programs) <= 2, [p.key for p in one.programs]
