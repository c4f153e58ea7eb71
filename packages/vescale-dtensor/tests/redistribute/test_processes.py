"""Redistribution in real processes moves the right values, and exactly the bytes that were planned.

Each worker call takes many cases; what the ranks return is judged here, against dense torch.
Boxes of several members make one tensor, also where they divide it at different rows.
"""

from __future__ import annotations

import random
from itertools import product
from math import prod

import pytest
import torch
from redistribution_oracle import Case, check, coordinates, dense, legal, local_tensors, piece
from redistribution_simulation import plans_of, simulate
from vescale_comm import trace
from vescale_comm.testing import device_mesh, outcomes, run
from vescale_dtensor import InterleavedShard, Partial, RaggedShard, Replicate, Shard
from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._redistribute import execute as _transport
from vescale_dtensor._redistribute.exchange import LocalBox, pack, packing_of, unpack
from vescale_dtensor._redistribute.plan import plan_redistribution
from vescale_dtensor._redistribute.steps import AllReduce
from vescale_dtensor.placement_types import StridedShard

R, S0, S1 = Replicate(), Shard(0), Shard(1)
P, AVG, MAX, MIN = Partial(), Partial("avg"), Partial("max"), Partial("min")
FUSED, STRIDED = InterleavedShard(0, 2), StridedShard(1, 2)


def ragged(count):
    return RaggedShard((0,), units(count))


def flat(count):
    return RaggedShard((0, 1), units(count))


def units(count):
    return (2, 0, 1, 1)[:count] if count > 2 else (3, 1)


def plan_of(mesh, case, dtype):
    source, target = Layout.of(mesh, case.source), Layout.of(mesh, case.target)
    return plan_redistribution(source, target, case.shape, dtype.itemsize)


def redistribute_all(rank, world_size, sizes, cases, dtype):
    mesh = device_mesh(sizes)
    at = tuple(mesh.get_coordinate())
    return [
        one(mesh, at, case, local_tensors(dense(case.shape), case.source, sizes)[at].to(dtype))
        for case in cases
    ]


def sent_by(plan, dtype):
    """What the plan says; few halves that are summed up for all, and maxima, take 32 bits each."""
    if dtype != torch.bfloat16:
        return plan.wire_bytes
    wide = plan.rounding_steps or range(0)
    twice = [
        index in wide or isinstance(step, AllReduce) or getattr(step, "op", "") in ("max", "min")
        for index, step in enumerate(plan.steps)
    ]
    return sum(step.wire_bytes * (1 + more) for step, more in zip(plan.steps, twice, strict=True))


def one(mesh, at, case, local):
    local = reversed_in_memory(local)
    before = local.clone()
    plan = plan_of(mesh, case, local.dtype)
    with trace() as seen:
        result = _transport.run_redistribution(plan, local)
    assert torch.equal(local, before), f"{case}: the input changed"
    assert seen.bytes() == sent_by(plan, local.dtype), f"{case}: {seen.records}\n{plan}"
    assert len(seen.records) == plan.collectives, f"{case}: {seen.records}\n{plan}"
    if plan.steps:
        assert result.is_contiguous(), f"{case}: {result.stride()}"
        shared = result.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        assert result.numel() == 0 or not shared, f"{case}: the result aliases the input"
    else:
        assert result is local
    return result.clone()


def reversed_in_memory(local):
    """The same values with the strides of a transposed tensor: they are nobody else's affair."""
    dims = tuple(reversed(range(local.ndim)))
    return local.permute(dims).contiguous().permute(dims)


def judge(sizes, cases, dtype=torch.float64):
    """Run all cases in one go, and compare what all ranks got with the dense tensor."""
    by_rank = run(redistribute_all, prod(sizes), sizes, cases, dtype)
    for number, case in enumerate(cases):
        outputs = [results[number].to(torch.float64) for results in by_rank]
        check(case, dict(zip(coordinates(sizes), outputs, strict=True)), dense(case.shape))


def fits(case):
    return all(legal(p, case.sizes, case.shape) for p in (case.source, case.target))


def all_cases(sizes, shapes, count, seed):
    """Up to `count` cases for each shape, drawn from all pairs of all placements."""
    each = [[R, S0, S1, ragged(n), flat(n), FUSED, STRIDED, P, AVG, MAX] for n in sizes]
    pairs = list(product(product(*each), product(*each)))
    chosen = random.Random(seed)
    cases = []
    for shape in shapes:
        found = [
            Case(sizes, shape, *pair) for pair in chosen.sample(pairs, len(pairs))[: 2 * count]
        ]
        cases += [case for case in found if fits(case)][:count]
    return cases


@pytest.mark.parametrize("shape", [(8, 4), (4, 3), (8, 0), (0, 3)])
def test_every_pair_on_one_axis(shape):
    cases = all_cases((4,), [shape], 50, seed=0)
    assert len(cases) >= 40
    judge((4,), cases)


def test_pairs_on_two_axes():
    judge((2, 2), all_cases((2, 2), [(8, 8), (16, 5), (3, 7), (1, 2), (0, 4)], 60, seed=1))


def test_pairs_on_three_axes():
    judge((2, 2, 2), all_cases((2, 2, 2), [(64, 4), (9, 5), (2, 3)], 25, seed=2))


def test_scalars_and_more_dims():
    some = [R, P, AVG, MAX]
    cases = [Case((2, 2), (), *pair) for pair in product(product(some, some), repeat=2)]
    deep = [(S0, Shard(2)), (Shard(2), Shard(3)), (S1, R), (P, Shard(3)), (R, R)]
    cases += [Case((2, 2), (3, 2, 5, 4), *pair) for pair in product(deep, deep)]
    judge((2, 2), cases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
def test_other_dtypes_move_bitwise(dtype):
    moves = [(S0, S1), (S1, S0), (S0, R), (R, S0), (S0, S0), (R, P), (S1, P)]
    cases = [
        Case((2, 2), (3, 3), *pair) for pair in product(moves, [*moves[:6], (S1, MIN), (MAX, R)])
    ]
    judge((2, 2), cases, dtype)


# --- gradients -----------------------------------------------------------------------------------

SMOOTH = [
    (S0, R),
    (R, S0),
    (S0, S1),
    (S1, S0),
    (P, R),
    (P, S0),
    (R, P),
    (S0, P),
    (AVG, R),
    (AVG, S1),
    (FUSED, R),
    (R, FUSED),
    (FUSED, S1),
    (P, FUSED),
    (FUSED, P),
    (STRIDED, FUSED),
]
FLAT = [
    (0, R),
    (R, 0),
    (0, S1),
    (S0, 0),
    (P, 0),
    (0, P),
    (AVG, 0),
    (0, FUSED),
    (STRIDED, 0),
    (0, 1),
]


def gradients(rank, world_size, sizes, cases):
    """For each case: the gradient, and what a second derivative gives for the weights."""
    mesh = device_mesh(sizes)
    at = tuple(mesh.get_coordinate())
    return [gradient(mesh, at, case) for case in cases]


def gradient(mesh, at, case):
    local = local_tensors(dense(case.shape), case.source, case.sizes)[at].requires_grad_()
    result = _transport.run_redistribution(plan_of(mesh, case, local.dtype), local)
    weight = weight_of(case, at).requires_grad_()
    (first,) = torch.autograd.grad((result * weight * weight).sum(), local, create_graph=True)
    (second,) = torch.autograd.grad((first * first).sum(), weight)
    return first.detach(), second


def weight_of(case, at):
    """Different on every rank, as the rest of a program may be."""
    number = coordinates(case.sizes).index(at)
    return piece(dense(case.shape, seed=number + 1), case.target, case.sizes, at)


def gradients_by_definition(case):
    """The same numbers from one graph of plain torch that holds all ranks' tensors."""
    at = coordinates(case.sizes)
    local = {
        c: x.requires_grad_()
        for c, x in local_tensors(dense(case.shape), case.source, case.sizes).items()
    }
    weights = [weight_of(case, c).requires_grad_() for c in at]
    results = simulate(case, plans_of(case, at), local)
    loss = sum((results[c] * w * w).sum() for c, w in zip(at, weights, strict=True))
    first = torch.autograd.grad(
        loss, [local[c] for c in at], create_graph=True, materialize_grads=True
    )
    squares = sum((g * g).sum() for g in first)
    second = torch.autograd.grad(squares, weights, materialize_grads=True)
    return [g.detach() for g in first], second


@pytest.mark.parametrize("shape", [(4, 8), (5, 3), (2, 2)])
def test_gradients_are_those_of_the_whole_map(shape):
    cases = [Case((4,), shape, (source,), (target,)) for source, target in SMOOTH]
    judge_gradients((4,), [case for case in cases if fits(case)])


@pytest.mark.parametrize("shape", [(4, 8), (3, 4), (2, 2), (1, 12)])
def test_gradients_of_flattened_dims(shape):
    numbered = {0: flat(4), 1: RaggedShard((0, 1), (1, 0, 0, 3))}
    pairs = [tuple((numbered.get(p, p),) for p in pair) for pair in FLAT]
    cases = [Case((4,), shape, *pair) for pair in pairs]
    judge_gradients((4,), [case for case in cases if fits(case)])


def test_gradients_on_two_axes():
    pairs = product(product([R, S0, S1, P], repeat=2), repeat=2)
    judge_gradients((2, 2), [Case((2, 2), (3, 4), *pair) for pair in pairs])
    judge_gradients((2, 2), all_gradients((2, 2), (4, 6), 40))


def all_gradients(sizes, shape, count):
    each = [[R, S0, ragged(n), flat(n), FUSED, STRIDED, P] for n in sizes]
    pairs = list(product(product(*each), product(*each)))
    chosen = random.Random(3).sample(pairs, 3 * count)
    return [case for case in (Case(sizes, shape, *pair) for pair in chosen) if fits(case)][:count]


# What the first input's gradient is on a rank, for weights w[0] and w[1] of the ranks' outputs.
WRITTEN_OUT = [
    (S0, R, lambda rank, w: (w[0] + w[1]).chunk(2)[rank]),
    (R, S0, lambda rank, w: torch.cat([w[i] * (i == rank) for i in range(2)])),
    (P, R, lambda rank, w: w[0] + w[1]),
    (P, S0, lambda rank, w: torch.cat(w)),
    (S0, S1, lambda rank, w: torch.cat(w, 1).chunk(2)[rank]),
    (R, P, lambda rank, w: w[rank] * (rank == 0)),
]


def test_gradients_written_out():
    cases = [Case((2,), (4, 2), (source,), (target,)) for source, target, _ in WRITTEN_OUT]
    for rank, results in enumerate(run(gradients, 2, (2,), cases)):
        for case, (*_, expected), (found, _) in zip(cases, WRITTEN_OUT, results, strict=True):
            weights = [weight_of(case, at).square() for at in coordinates(case.sizes)]
            assert torch.equal(found, expected(rank, weights)), f"{case} on rank {rank}"


def judge_gradients(sizes, cases):
    assert cases
    by_rank = run(gradients, prod(sizes), sizes, cases)
    for number, case in enumerate(cases):
        first, second = gradients_by_definition(case)
        for rank, results in enumerate(by_rank):
            found_first, found_second = results[number]
            assert torch.equal(found_first, first[rank]), f"{case} on rank {rank}"
            assert torch.equal(found_second, second[rank]), f"{case} on rank {rank}, second order"


# --- plans on a mesh -----------------------------------------------------------------------------


def printed_plan(rank, world_size):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    source, target = Layout.of(mesh, (P, S0)), Layout.of(mesh, (S1, R))
    plan = plan_redistribution(source, target, (8, 8), 4)
    assert plan is plan_redistribution(source, target, (8, 8), 4)
    return str(plan)


def test_a_plan_prints_as_a_table():
    assert run(printed_plan, 4)[0].splitlines() == [
        "[8, 8] on mesh(dp=2, tp=2): [Partial(sum), Shard(0)] -> [Shard(1), Replicate()]",
        "  local                                   [4, 8]",
        "  reduce_scatter sum dim 1    dp          [4, 4]                        64 B",
        "  all_gather dim 0            tp          [8, 4]                        64 B",
    ]


def wrong_shape(rank, world_size):
    mesh = device_mesh((2,))
    plan = plan_redistribution(Layout.of(mesh, (S0,)), Layout.of(mesh, (R,)), (4, 3))
    _transport.run_redistribution(plan, torch.zeros(4, 3))


def test_a_local_tensor_of_another_shape_is_refused():
    for outcome in outcomes(wrong_shape, 2):
        assert outcome.type_name == LayoutError.__name__
        assert "should hold [2, 3], but its tensor is [4, 3]" in outcome.message


def divided(start, shape, depth, chosen):
    """Boxes that tile a box: one dim after the other is cut, each part at another place."""
    dims = [dim for dim, extent in enumerate(shape) if extent > 1]
    if not depth or not dims:
        return [LocalBox(tuple(start), tuple(shape))]
    dim = chosen.choice(dims)
    cut = chosen.randrange(1, shape[dim])
    first, second, later = list(shape), list(shape), list(start)
    first[dim], second[dim], later[dim] = cut, shape[dim] - cut, start[dim] + cut
    return [*divided(start, first, depth - 1, chosen), *divided(later, second, depth - 1, chosen)]


@pytest.mark.parametrize("seed", range(40))
def test_boxes_come_back_to_their_places(seed):
    chosen = random.Random(seed)
    shape = tuple(chosen.randrange(1, 6) for _ in range(chosen.randrange(1, 4)))
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    how = packing_of(divided([0] * len(shape), list(shape), 3, chosen), shape)
    assert torch.equal(unpack(pack(x, how), how, shape), x)


def test_columns_that_are_divided_at_different_rows():
    boxes = [
        LocalBox((0, 0), (1, 2)),
        LocalBox((1, 0), (2, 2)),
        LocalBox((0, 2), (2, 2)),
        LocalBox((2, 2), (1, 2)),
    ]
    x = torch.arange(12.0).view(3, 4)
    how = packing_of(boxes, (3, 4))
    assert torch.equal(unpack(pack(x, how), how, (3, 4)), x)
