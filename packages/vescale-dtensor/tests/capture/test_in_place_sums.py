"""Programs sum over ranks in place where nothing else reads the terms, and give eager's bits.

Each step is trained beside an eager copy of itself, in processes of their own over dp=2 x tp=2, and
says whether its program sums in place.
"""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import nn
from vescale_comm.testing import on_ranks
from vescale_dtensor import Replicate, Shard


def attended(x, up, down):
    return F.linear(F.gelu(F.linear(x, up)), down)


def residual(x, up, down):
    x = x + attended(x, up, down)
    return x + attended(x, up, down)


def used_twice(x, up, down):
    terms = attended(x, up, down)
    return terms.square() + terms * 2  # of the total both


def terms_used(x, up, down):
    terms = attended(x, up, down)
    return terms.sum() * 0.5 + terms.square()  # of which the result is summed in place alone


def scaled(x, up, down):
    return (attended(x, up, down) * 0.5).exp()


def viewed(x, up, down):
    terms = attended(x, up, down)
    return terms.view(-1).cos().sum() + terms.square()


def hooked(x, up, down):
    terms = attended(x, up, down)
    terms.register_hook(lambda gradient: gradient * 2)
    return terms.square()


def transposed(x, up, down):
    return torch.mm(down, F.gelu(F.linear(x, up)).t()).t().square()


# By name: the loss of the last tensor, whether the backward is inside, and how many sums are.
CASES = {
    "residual": (residual, True, 2),
    "scaled": (scaled, True, 1),
    "used twice": (used_twice, True, 1),
    "terms used": (terms_used, True, 1),
    "viewed": (viewed, True, 0),
    "hooked": (hooked, True, 0),
    "transposed": (transposed, True, 0),
    "backward outside": (residual, False, 0),
}


class Training:
    def __init__(self, function, inside, wrap=lambda step: step):
        self.mesh = vd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        self.up = self.weight(torch.randn(6, 4), Shard(0))
        self.down = self.weight(torch.randn(4, 6), Shard(1))
        self.function, self.inside = function, inside
        self.step = wrap(self.loss)

    def weight(self, value, placement):
        layout = [Replicate(), placement]
        return nn.Parameter(vd.distribute_tensor(value, self.mesh, layout, src_data_rank=None))

    def loss(self, x):
        self.up.grad = self.down.grad = None
        loss = self.function(x, self.up, self.down).square().sum()
        if self.inside:
            loss.backward()
            return loss.detach()
        return loss

    def run(self, seed):
        torch.manual_seed(seed)
        layout = [Shard(0), Replicate()]
        x = vd.distribute_tensor(torch.randn(6, 4), self.mesh, layout, src_data_rank=None)
        before = x.to_local().clone()
        loss = self.step(x)
        if not self.inside:
            loss.backward()
        assert torch.equal(x.to_local(), before)
        return loss.detach().full_tensor(), self.up.grad.full_tensor(), self.down.grad.full_tensor()


@pytest.mark.parametrize("name", CASES)
@on_ranks(4, timeout=60)
def test_sums_in_place(name):
    function, inside, count = CASES[name]
    eager, captured = Training(function, inside), Training(function, inside, vd.capture)
    for seed in range(5):
        found = zip(eager.run(seed), captured.run(seed), strict=True)
        assert all(torch.equal(*pair) for pair in found)
    assert captured.step.replays >= 3
    (program,) = captured.step.programs
    targets = [getattr(node.target, "__name__", "") for node in program.graph.nodes]
    assert targets.count("sum_in_place") == count, program.explain()
    # No copy of a residual, which nothing but an addition reads; only of what is cut out of more.
    copied = [node.args[0].target for node in program.graph.nodes if node.target == "clone"]
    assert set(copied) <= {"narrow"}, program.explain()
