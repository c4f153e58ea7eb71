"""Operands on several spellings of one mesh compute what one device does, values and gradients.

Spellings differ in the order of the axes, in their names, and in axes of one rank. Where layouts
mean the same on both, nothing is sent.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import simulate, trace
from vescale_dtensor import InterleavedShard, Partial, RaggedShard, Replicate, Shard, local_map
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.spellings import axes_between, nearest, respelled
from vescale_dtensor._redistribute.plan import plan_redistribution

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def meshes():
    """Three spellings of one mesh of four ranks, and another mesh of them."""
    ranks = torch.arange(4).view(2, 2)
    return (
        DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")),
        DeviceMesh("cpu", ranks.t().contiguous(), mesh_dim_names=("tp", "dp")),
        DeviceMesh("cpu", ranks.t().reshape(2, 1, 2).contiguous(), mesh_dim_names=("a", "b", "c")),
        DeviceMesh("cpu", torch.tensor([[0, 3], [1, 2]]), mesh_dim_names=("dp", "tp")),
    )


def cube():
    """Two spellings of a mesh of eight ranks."""
    ranks = torch.arange(8).view(2, 2, 2)
    return (
        DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b", "c")),
        DeviceMesh("cpu", ranks.permute(2, 0, 1).contiguous(), mesh_dim_names=("c", "a", "b")),
    )


def laid(value, mesh, pick):
    """A leaf with these values in a layout drawn at random, and a copy that is none."""
    kinds = [R, P, *[Shard(d) for d in range(value.ndim)]]
    if value.ndim:
        kinds.append(RaggedShard(tuple(range(value.ndim)), (1, 2)))
    while True:
        chosen = [R if n == 1 else pick.choice(kinds) for n in mesh.shape]
        try:
            leaf = vd.distribute_tensor(value, mesh, [R] * mesh.ndim, src_data_rank=None)
            return leaf.redistribute(placements=chosen), chosen
        except vd.LayoutError:
            continue  # the flat one before another, or of an extent that it does not divide


def operations():
    """Name -> an operation of a matrix (6, 4), a row (4,), a number, and a matrix (4, 6)."""
    return {
        "add": lambda x, row, n, w: x + row,
        "row first": lambda x, row, n, w: row * x,
        "by a number": lambda x, row, n, w: x / (n * n + 1),
        "number first": lambda x, row, n, w: (n * n + 1) * x,
        "matmul": lambda x, row, n, w: x @ w,
        "linear": lambda x, row, n, w: F.linear(x, w.t(), row[:1] + n),
        "addmm": lambda x, row, n, w: torch.addmm(n, x, w),
        "einsum": lambda x, row, n, w: torch.einsum("ij,jk,j->ki", x, w, row),
        "where": lambda x, row, n, w: torch.where(x > 0, n, row),
        "cat": lambda x, row, n, w: torch.cat([x, w.t(), row[None]]),
        "stack": lambda x, row, n, w: torch.stack([n, x.sum(), w.square().sum()]),
        "layer norm": lambda x, row, n, w: F.layer_norm(x, (4,), row, row),
        "losses": lambda x, row, n, w: F.mse_loss(x, w.t()) + F.huber_loss(row, x[0] * n),
        "lerp": lambda x, row, n, w: torch.lerp(x, row, n),
        "clamp": lambda x, row, n, w: torch.clamp(x, max=row),
        "cosine": lambda x, row, n, w: F.cosine_similarity(x, row, dim=1),
        "no rule": lambda x, row, n, w: torch.cdist(x, w.t()),
        "embedding": lambda x, row, n, w: F.embedding(w.argmax(0), x),
        "bags": lambda x, row, n, w: F.embedding_bag(w.argmax(0)[None], x, mode="sum"),
        "index": lambda x, row, n, w: x[w.argmax(1)] + row,
        "gather": lambda x, row, n, w: x.gather(0, w.t().argsort(0)),
        "index_add": lambda x, row, n, w: torch.index_add(x, 0, w.argmax(1), w[:, :4]),
        "foreach": lambda x, row, n, w: torch.cat(
            [one.flatten() for one in torch._foreach_mul([x, row], [w.t(), x[0]])]
        ),
        "in place": lambda x, row, n, w: x.clone().mul_(row).add_(w.t(), alpha=2).div_(n * n + 1),
        "written": lambda x, row, n, w: x.clone().index_copy_(0, w.argmax(1)[:1], row[None] * n),
        "parts": lambda x, row, n, w: written(x.clone(), row, n),
        "attention": lambda x, row, n, w: F.scaled_dot_product_attention(
            x[None, None], w.t()[None, None], (x + row)[None, None]
        ),
    }


def written(x, row, n):
    x[2] = row
    x[:, 1] = n
    return x


def agrees(operation, values, meshes, pick):
    """Compare an operation twice, the second time from what was compiled, in one set of layouts."""
    leaves = [value.clone().requires_grad_() for value in values]
    expected = operation(*leaves)
    wanted = torch.autograd.grad(expected.square().sum(), leaves, allow_unused=True)
    drawn = [laid(value, pick.choice(meshes), pick) for value in values]
    shown = [f"{chosen} on {tensor.device_mesh.mesh_dim_names}" for tensor, chosen in drawn]
    for _ in range(2):
        leaves = [tensor.detach().requires_grad_() for tensor, _ in drawn]
        with torch.no_grad():
            still = operation(*leaves)
        result = operation(*leaves)
        for one in (still, result):
            torch.testing.assert_close(
                one.full_tensor().detach(), expected.detach(), msg=f"{shown}"
            )
        found = torch.autograd.grad(result.square().sum(), leaves, allow_unused=True)
        for gradient, want in zip(found, wanted, strict=True):
            assert (gradient is None) == (want is None), shown
            if want is not None:
                msg = f"gradient: {shown}"
                torch.testing.assert_close(gradient.full_tensor(), want, msg=msg)


def sweep(names, rounds, make=lambda: meshes()[:3]):
    def body(rank, world_size):
        generator = torch.Generator().manual_seed(1)
        shapes = [(6, 4), (4,), (), (4, 6)]
        values = [torch.randn(n, generator=generator, dtype=torch.float64) for n in shapes]
        spellings = make()
        for name in names:
            pick = random.Random(name)
            for _ in range(rounds):
                agrees(operations()[name], values, spellings, pick)

    return body


def test_operations():
    simulate(4).run(sweep(["add", "number first", "matmul", "no rule", "in place"], 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", operations())
def test_every_operation(name):
    simulate(4).run(sweep([name], 12))


@pytest.mark.slow
@pytest.mark.parametrize("name", operations())
def test_every_operation_on_three_axes(name):
    simulate(8).run(sweep([name], 3, cube))


def layouts():
    def body(rank, world_size):
        one, turned, long, other = meshes()
        assert axes_between(turned, one) == (1, 0)
        assert axes_between(long, one) == (1, None, 0)
        assert axes_between(other, one) is None
        flat, fused = RaggedShard((0, 1), (1, 2)), InterleavedShard(1, 2)
        same = [((S0, R), (R, S0)), ((P, S1), (S1, P)), ((S0, fused), (fused, S0))]
        for before, after in same:
            assert respelled(Layout.of(one, before), turned) == Layout.of(turned, after)
            plan = plan_redistribution(Layout.of(one, before), Layout.of(turned, after), (6, 12))
            assert not plan.steps
        # Outer and inner shards would change places.
        for before, near in [((S0, S0), (S0, S0)), ((S0, flat), (R, S0))]:
            assert respelled(Layout.of(one, before), turned) is None
            assert nearest(Layout.of(one, before), turned) == Layout.of(turned, near)
        # What is sent goes over the axis that changes alone.
        plan = plan_redistribution(Layout.of(one, (S0, flat)), Layout.of(turned, (R, S0)), (6, 12))
        assert [step.title for step in plan.steps] == ["all_gather runs"]

    return body


def test_layouts_of_two_spellings():
    simulate(4).run(layouts())


def counted(rank, world_size):
    one, turned, *_ = meshes()
    x = vd.distribute_tensor(torch.randn(6, 4), one, [S0, R], src_data_rank=None)
    w = vd.distribute_tensor(torch.randn(4), turned, [R, R], src_data_rank=None)
    total = vd.DTensor.from_local(torch.ones(()), turned, [R, P])
    with trace() as seen:
        result = x * w
        loss = result.sum() + total
        result.mul_(w)
        torch._foreach_mul_([result, result], w)
    # A write stays where it is; what is made lies on the first mesh that all have words on.
    assert result.device_mesh is one
    assert loss.device_mesh is one
    assert loss.placements == (P, R)
    flat = vd.distribute_tensor(torch.randn(6, 4), turned, [S0, R], src_data_rank=None)
    flat = flat.redistribute(placements=[S0, RaggedShard((0, 1), (1, 1))])
    number = vd.distribute_tensor(torch.ones(()), one, [R, R], src_data_rank=None)
    with trace() as more:
        assert (number * flat).device_mesh is turned
        assert (flat / number).placements == flat.placements
    return len(seen.records), len(more.records)


def test_nothing_is_sent_where_layouts_mean_the_same():
    assert simulate(4).run(counted) == [(0, 0)] * 4


def test_other_meshes_are_refused():
    def body(rank, world_size):
        one, _, _, other = meshes()
        x, y = (
            vd.distribute_tensor(torch.ones(4), m, [R, R], src_data_rank=None) for m in (one, other)
        )
        for call in (lambda: x + y, lambda: torch.cdist(x[None], y[None]), lambda: x.add_(y)):
            with pytest.raises(vd.MeshError, match="bring them to one mesh"):
                call()

    simulate(4).run(body)


def test_local_map_takes_spellings():
    def body(rank, world_size):
        one, turned, *_ = meshes()
        x, w = torch.arange(24.0).view(6, 4), torch.arange(4.0)
        rows = vd.distribute_tensor(x, one, [S0, R], src_data_rank=None)
        for mesh, placed in ((turned, [R, R]), (turned, [S0, R])):
            row = vd.distribute_tensor(w, mesh, placed, src_data_rank=None)
            scaled = local_map(torch.mul, [S0, R], ([S0, R], [R, R]), redistribute_inputs=True)(
                rows, row
            )
            assert scaled.device_mesh is one
            torch.testing.assert_close(scaled.full_tensor(), x * w)
        row = vd.distribute_tensor(w, turned, [R, R], src_data_rank=None)
        torch.testing.assert_close(local_map(torch.mul, [S0, R])(rows, row).full_tensor(), x * w)

    simulate(4).run(body)
