"""Redistribution between meshes of the same ranks: right forward and backward, nothing sent twice.

The meshes differ in shape, in the names of axes, or in the order of ranks.
"""

from __future__ import annotations

import random
from inspect import signature
from itertools import permutations, product

import pytest
import torch
import vescale_dtensor as vd
from redistribution_oracle import dense
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import trace
from vescale_comm.testing import device_mesh, on_ranks, outcomes, run
from vescale_dtensor import InterleavedShard, Partial, RaggedShard, Replicate, Shard
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._redistribute.plan import plan_redistribution
from vescale_dtensor.placement_types import StridedShard

R, S0, S1, P, AVG = Replicate(), Shard(0), Shard(1), Partial(), Partial("avg")
FUSED, STRIDED = InterleavedShard(0, 2), StridedShard(1, 2)
SHAPES = [(8, 6), (4, 3), (2, 4)]
# From torch 2.15 on groups of a mesh may have its order of ranks; else they are sorted.
ASKED = {"preserve_rank_order": True}
IN_THEIR_ORDER = ASKED if ASKED.keys() <= signature(DeviceMesh.__init__).parameters.keys() else {}


def all_meshes():
    return [
        device_mesh((4,), ("all",)),
        device_mesh((2, 2), ("dp", "tp")),
        DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("u", "v")),
        DeviceMesh("cpu", [[2, 0, 3, 1]], mesh_dim_names=("one", "four"), **IN_THEIR_ORDER),
    ]


def placements_on(mesh):
    if mesh.ndim == 1:
        flat = RaggedShard((0, 1), (3, 0, 2, 1))
        return [(p,) for p in (R, S0, S1, P, AVG, FUSED, STRIDED, flat)]
    each = [
        [R, S0, S1, P, FUSED, RaggedShard((0, 1), (1, 1) if n == 2 else (1,) * n)]
        for n in mesh.shape
    ]
    return list(product(*each))


def fits(layout, shape):
    try:
        plan_redistribution(layout, layout, shape)
    except vd.LayoutError:
        return False
    return True


def cases(meshes, count):
    """Up to `count` cases for every pair of meshes: layouts and a shape."""
    chosen = random.Random(5)
    for source, target in permutations(meshes, 2):
        pairs = list(product(placements_on(source), placements_on(target), SHAPES))
        found = 0
        for before, after, shape in chosen.sample(pairs, len(pairs)):
            layouts = Layout.of(source, before), Layout.of(target, after)
            if all(fits(layout, shape) for layout in layouts):
                yield *layouts, shape
                found += 1
            if found == count:
                break


def crossed(rank, world_size, count):
    number = 0
    for number, (source, target, shape) in enumerate(cases(all_meshes(), count)):
        leaf = unsharded(dense(shape), source.mesh).requires_grad_()
        before = leaf.redistribute(placements=source.placements)
        plan = plan_redistribution(source, target, shape, 8)
        with trace() as seen:
            after = before.redistribute(target.mesh, target.placements)
        assert seen.bytes() == plan.wire_bytes, f"{plan}\n{seen.records}"
        assert len(seen.records) == plan.collectives
        assert after.device_mesh is target.mesh
        assert after.placements == target.placements
        weight = dense(shape, seed=number)
        result = after.redistribute(placements=[R] * target.mesh.ndim)
        torch.testing.assert_close(result.to_local(), dense(shape), msg=str(plan))
        (result * unsharded(weight, target.mesh)).sum().backward()
        found = vd.gradient_total(leaf).full_tensor()
        torch.testing.assert_close(found, weight, msg=f"backward of {plan}")
    return number


def unsharded(tensor, mesh):
    return vd.distribute_tensor(tensor, mesh, [R] * mesh.ndim, src_data_rank=None)


def test_any_layout_becomes_any_other_on_another_mesh():
    assert run(crossed, 4, 7, timeout=120) == [7 * 12 - 1] * 4


@pytest.mark.slow
def test_many_layouts_become_others_on_another_mesh():
    assert run(crossed, 4, 25, timeout=120) == [25 * 12 - 1] * 4


@on_ranks(4)
def test_second_derivatives():
    """The derivative of a derivative, back and forth between the meshes."""
    line, square, *_ = all_meshes()
    x = dense((8, 6)) / 1000
    for before in [(R,), (S0,), (FUSED,), (RaggedShard((0, 1), (3, 0, 2, 1)),)]:
        for after in [(R, R), (S0, S1), (R, FUSED), (P, S0)]:
            leaf = unsharded(x, line).redistribute(placements=before).requires_grad_()
            result = leaf.redistribute(square, after)
            result = result.redistribute(placements=[R if p is P else p for p in after])
            (first,) = torch.autograd.grad((result**3).sum(), leaf, create_graph=True)
            (second,) = torch.autograd.grad((first * first).sum(), leaf)
            what = f"{before} to {after}"
            torch.testing.assert_close(first.full_tensor().detach(), 3 * x**2, msg=what)
            torch.testing.assert_close(second.full_tensor(), 36 * x**3, msg=what)


def paths(rank, world_size):
    line, square, *_ = all_meshes()
    twin = device_mesh((2, 2), ("x", "y"))
    moves = [
        (line, (S0,), square, (S0, S0)),
        (line, (P,), square, (P, P)),
        (line, (P,), square, (S0, S0)),
        (line, (P,), square, (R, R)),
        (line, (P,), square, (S0, R)),
        (line, (S0,), square, (P, P)),
        (line, (R,), square, (P, S0)),
        (square, (S0, R), line, (S0,)),
        (square, (S0, S1), twin, (S0, S1)),
        (square, (S0, S0), line, (S1,)),
    ]
    plans = [
        plan_redistribution(Layout.of(a, p), Layout.of(b, q), (8, 8), 4) for a, p, b, q in moves
    ]
    return [[step.title for step in plan.steps] for plan in plans], str(plans[-1])


def test_the_path_between_meshes():
    titles, shown = run(paths, 4)[0]
    assert titles == [
        [],
        [],
        ["reduce_scatter sum dim 0"],
        ["all_reduce sum"],
        ["reduce_scatter sum dim 0", "all_reduce sum"],
        ["pad at [0, 0]"],
        ["rearrange", "keep"],
        ["rearrange"],
        [],
        ["all_to_all runs"],
    ]
    assert shown.splitlines() == [
        "[8, 8] on mesh(dp=2, tp=2): [Shard(0), Shard(0)] -> [Shard(1)] on mesh(all=4)",
        "  local                                   [2, 8]",
        "  all_to_all runs             dp, tp      [8, 2]                        48 B",
    ]


def to_other_ranks(rank, world_size):
    square = device_mesh((2, 2), ("dp", "tp"))
    unsharded(torch.zeros(4), square).redistribute(square["tp"], [R])


def test_other_ranks_are_refused_by_name():
    for rank, outcome in enumerate(outcomes(to_other_ranks, 4)):
        assert outcome.type_name == "MeshError"
        tp = [[0, 1], [2, 3]][rank // 2]
        assert "mesh(dp=2, tp=2) of cpu ranks [0, 1, 2, 3]" in outcome.message
        assert f"mesh(tp=2) of cpu ranks {tp}" in outcome.message


@on_ranks(8)
def test_eight_ranks():
    meshes = [device_mesh(sizes) for sizes in [(8,), (2, 4), (2, 2, 2)]]
    some = {1: [(S0,), (FUSED,), (P,)], 2: [(S0, S1), (R, S0)], 3: [(S0, FUSED, R), (S1, P, S0)]}
    x = dense((16, 3))
    for source, target in permutations(meshes, 2):
        for before, after in product(some[source.ndim], some[target.ndim]):
            moved = unsharded(x, source).redistribute(placements=before).redistribute(target, after)
            torch.testing.assert_close(moved.full_tensor(), x, msg=f"{before} to {after}")
