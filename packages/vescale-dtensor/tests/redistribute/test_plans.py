"""Plans between any two layouts are right, agreed on by all ranks, and send no more than needed.

No processes: the planner is pure, so all ranks' plans are made, and run, in this one.
"""

from __future__ import annotations

from itertools import groupby
from math import prod

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redistribution_oracle import Case, check, coordinates, dense, legal, local_tensors, pieces
from redistribution_simulation import plans_of, signature, simulate
from vescale_dtensor import InterleavedShard, Partial, RaggedShard, Replicate, Shard
from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.placements import REDUCE_OPS
from vescale_dtensor._layout.shard_geometry import check_fits
from vescale_dtensor._redistribute.regions import is_run
from vescale_dtensor._redistribute.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    GatherPieces,
    Mask,
    PackedAllGather,
    PackedAllToAll,
    PackedReduceScatter,
    Pad,
    Rearrange,
    ReduceScatter,
    Scale,
    Slice,
)
from vescale_dtensor.placement_types import StridedShard

MESHES = [(4,), (2, 2), (2, 2, 2), (3, 2), (2, 1, 3)]
SIGNED = [op for op in REDUCE_OPS if op != "norm2"]  # a norm is never negative
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


@st.composite
def random_shards(draw, count, ndim):
    dim = draw(st.integers(0, ndim - 1))
    kind = draw(st.sampled_from([Shard, Shard, InterleavedShard, StridedShard, RaggedShard]))
    if kind is Shard:
        return Shard(dim)
    if kind is RaggedShard:
        dims = tuple(range(dim, draw(st.integers(dim + 1, ndim))))
        return RaggedShard(dims, draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    return kind(dim, draw(st.integers(1, 4)))


@st.composite
def placements(draw, sizes, shape):
    result = []
    for count in sizes:
        kind = draw(st.sampled_from("RPSSS" if shape else "RP"))
        if kind == "S":
            placement = draw(random_shards(count, len(shape)))
            fits = legal((*result, placement), sizes[: len(result) + 1], shape)
            result.append(placement if fits else Replicate())
        else:
            result.append(Replicate() if kind == "R" else Partial(draw(st.sampled_from(SIGNED))))
    return tuple(result)


@st.composite
def cases(draw):
    sizes = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 12]), max_size=3)))
    source, target = draw(placements(sizes, shape)), draw(placements(sizes, shape))
    return Case(sizes, shape, source, target)


@settings(max_examples=200, deadline=None)
@given(cases())
@example(Case((2, 2), (3,), (R, S0), (RaggedShard((0,), (0, 1)), S0)))
def test_any_layout_becomes_any_other(case):
    x = dense(case.shape)
    plans = plans_of(case, coordinates(case.sizes))
    check(case, simulate(case, plans, local_tensors(x, case.source, case.sizes)), x)


I02 = InterleavedShard(0, 2)


@pytest.mark.parametrize(
    ("sizes", "source", "target", "shape"),
    [
        ((3, 2, 2, 2, 2, 2), (P, R, P, P, P, S0), (I02, I02, S1, I02, S1, P), (48, 4)),
        (
            (2, 2, 2, 2, 2, 2),
            (RaggedShard((1,), (2, 1)), P, S0, P, R, Partial("avg")),
            (I02, RaggedShard((0,), (0, 0)), S1, Partial("max"), S0, Partial("max")),
            (0, 24),
        ),
    ],
)
def test_six_axes_have_a_path_however_many_candidates_do_not_fit(sizes, source, target, shape):
    """More candidates than are looked at, and in none of the first do all shards fit."""
    case = Case(sizes, shape, source, target)
    x = dense(shape)
    plans = plans_of(case, coordinates(case.sizes))
    check(case, simulate(case, plans, local_tensors(x, case.source, case.sizes)), x)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_no_plan_sends_more_than_gathering_everything(case):
    plans = plans_of(case, coordinates(case.sizes))
    sent = sum(step.wire_bytes for steps in plans.values() for step in steps)
    assert sent <= bytes_to_replicate(case)


def bytes_to_replicate(case):
    """All ranks together: all-reduce what is owed, then gather everything to everyone."""
    pairs = [pair for pair in zip(case.source, case.sizes, strict=True) if pair[1] > 1]
    owed = groupby((pair for pair in pairs if pair[0].is_partial()), key=lambda pair: pair[0])
    groups = [prod(n for _, n in group) for _, group in owed]
    total = 0.0
    for held in pieces(dense(case.shape), case.source, case.sizes).values():
        numel = held.numel()
        total += sum(2 * numel * (members - 1) / members for members in groups)
        total += numel * (prod(n for p, n in pairs if p.is_sharded()) - 1)
    return 8 * total


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_layout_costs_nothing_to_itself(case):
    same = case._replace(target=case.source)
    assert all(not steps for steps in plans_of(same, coordinates(case.sizes)).values())


@pytest.mark.parametrize("other", [R, S0, S1, P, Partial("max")])
@pytest.mark.parametrize("beside", [R, S0, Partial("norm2")])
def test_norms_of_pieces_combine_as_roots_of_sums_of_squares(other, beside):
    norm = Partial("norm2")
    x = 625 * dense((4, 6)).abs()
    for source, target in [((norm, beside), (other, beside)), ((other, beside), (norm, beside))]:
        case = Case((2, 2), (4, 6), source, target)
        if norm in source and any(p in source for p in (P, Partial("max"))):
            continue  # terms of a norm that are themselves sums of negative terms are none
        plans = plans_of(case, coordinates(case.sizes))
        check(case, simulate(case, plans, local_tensors(x, case.source, case.sizes)), x)


def kinds(sizes, source, target, shape=(8, 8)):
    """The steps that all ranks take, which have to agree in everything that is communicated."""
    plans = list(plans_of(Case(sizes, shape, source, target), coordinates(sizes)).values())
    agreed = [[signature(step) for step in steps if step.axes] for steps in plans]
    assert all(steps == agreed[0] for steps in agreed)
    return [(type(step), step.axes) for step in plans[-1]]


PATHS = [
    ((R, R), (R, R), []),
    ((S0, R), (RaggedShard((0,), (1, 1)), R), []),
    ((R, R), (S0, S1), [(Slice, ())]),
    ((P, P), (R, R), [(AllReduce, (0, 1))]),
    ((P, S0), (R, S0), [(AllReduce, (0,))]),
    ((P, P), (S0, S0), [(ReduceScatter, (0, 1))]),
    ((P, P), (S0, S1), [(PackedReduceScatter, (0, 1))]),
    ((P, P), (S1, R), [(ReduceScatter, (0,)), (AllReduce, (1,))]),
    ((P, R), (R, S0), [(Slice, ()), (AllReduce, (0,))]),
    ((P, S0), (S0, S0), [(ReduceScatter, (0,)), (AllToAll, (0, 1))]),
    ((P, R), (S0, S0), [(PackedReduceScatter, (0,))]),
    ((P, S0), (R, S1), [(ReduceScatter, (0,)), (AllToAll, (0, 1))]),
    ((P, S0), (S0, P), [(PackedReduceScatter, (0,)), (Rearrange, ())]),
    ((R, S0), (S0, P), [(Rearrange, ()), (Rearrange, ())]),
    ((R, P), (P, R), [(Slice, ()), (AllReduce, (1,)), (Pad, ())]),
    ((P, S0), (S1, R), [(ReduceScatter, (0,)), (AllGather, (1,))]),
    ((S0, S0), (S0, R), [(AllGather, (1,))]),
    ((S0, S0), (R, R), [(AllGather, (0, 1))]),
    ((S0, S1), (R, R), [(GatherPieces, (0, 1))]),
    ((S0, R), (R, S1), [(Slice, ()), (AllGather, (0,))]),
    ((S0, R), (S1, R), [(AllToAll, (0,))]),
    ((S0, R), (R, S0), [(AllGather, (0,))]),
    ((S0, S1), (S1, S0), [(AllToAll, (0, 1))]),
    ((R, R), (P, R), [(Mask, ())]),
    ((R, R), (Partial("max"), Partial("avg")), []),
    ((S0, R), (P, R), [(Pad, ())]),
    ((S0, S1), (P, P), [(Pad, ())]),
    ((S0, R), (Partial("avg"), R), [(Pad, ()), (Scale, ())]),
    ((S0, R), (Partial("max"), R), [(Pad, ())]),
    ((P, R), (Partial("avg"), R), [(Scale, ())]),
    ((P, R), (Partial("max"), R), [(ReduceScatter, (0,)), (Pad, ())]),
    ((P, Partial("max")), (R, R), [(ReduceScatter, (1,)), (AllReduce, (0,)), (AllGather, (1,))]),
    ((P, Partial("avg")), (R, Partial("avg")), [(AllReduce, (0,))]),
]


@pytest.mark.parametrize(("source", "target", "steps"), PATHS)
def test_the_path_chosen(source, target, steps):
    assert kinds((2, 2), source, target) == steps


FLAT, HALVES, SKEW = (
    RaggedShard((0, 1), (3, 1)),
    RaggedShard((0, 1), (1, 1)),
    RaggedShard((0,), (3, 1)),
)
FUSED, STRIDED = InterleavedShard(0, 2), StridedShard(0, 2)


PATHS_OF_NO_BOX = [
    ((P, R), (FLAT, R), [(PackedReduceScatter, (0,))]),
    ((P, R), (FUSED, R), [(PackedReduceScatter, (0,))]),
    ((P, P), (FUSED, S0), [(PackedReduceScatter, (0, 1))]),
    ((P, S1), (FLAT, R), [(AllReduce, (0,)), (PackedAllGather, (1,))]),
    ((FLAT, R), (R, R), [(PackedAllGather, (0,))]),
    ((FUSED, S0), (R, R), [(PackedAllGather, (0, 1))]),
    ((R, R), (FUSED, R), [(Rearrange, ())]),
    ((FUSED, R), (P, R), [(Rearrange, ())]),
    ((FLAT, R), (SKEW, R), [(Rearrange, ())]),
    ((FLAT, R), (HALVES, R), [(PackedAllToAll, (0,))]),
    ((FUSED, R), (S0, R), [(PackedAllToAll, (0,))]),
    ((FUSED, R), (STRIDED, R), []),
    ((STRIDED, S0), (S0, StridedShard(0, 1)), [(PackedAllToAll, (0, 1))]),
    ((FUSED, FLAT), (FUSED, R), [(PackedAllGather, (1,))]),
]


@pytest.mark.parametrize(("source", "target", "steps"), PATHS_OF_NO_BOX)
def test_the_path_of_what_is_no_box(source, target, steps):
    assert kinds((2, 2), source, target) == steps


def test_what_lies_in_one_run_is_not_copied():
    """A flattened piece is sent and received as it lies in memory."""
    run = RaggedShard((0, 1), (3, 0, 1, 4))
    for source, target in [((P,), (run,)), ((run,), (R,))]:
        case = Case((4,), (4, 6), source, target)
        for (step,) in plans_of(case, coordinates((4,))).values():
            assert all(is_run(regions) for regions in (step.source, step.target) if regions)


NOT_TOGETHER = [
    ((RaggedShard((0, 1), (1, 1)), S0), "no dim 0 of its own"),
    ((RaggedShard((0, 1), (1, 1)), RaggedShard((1, 2), (1, 1))), "no dim 1 of its own"),
    ((S0, InterleavedShard(0, 4)), "extent 2 is not a multiple of 4 blocks"),
    ((RaggedShard((0, 1), (1, 4)), R), "extent 24 is not a multiple of its 5 units"),
]


@pytest.mark.parametrize(("placements", "message"), NOT_TOGETHER)
def test_shards_that_do_not_go_together_are_refused_on_all_ranks(placements, message):
    with pytest.raises(LayoutError, match=message):
        check_fits(placements, (2, 2), (4, 6, 5))


def test_slices_between_nested_shards_are_part_of_the_scatter():
    assert kinds((2, 2, 2), (P, R, P), (S0, S0, S0)) == [(PackedReduceScatter, (0, 2))]


@pytest.mark.parametrize("count", [1, 8])
def test_ranks_that_hold_nothing_take_part(count):
    for target in [(R,), (S1,), (P,)]:
        kinds((count,), (S0,), target, shape=(2, 8))
