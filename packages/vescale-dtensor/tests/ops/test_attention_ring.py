"""Attention in a ring: results, gradients and dropout of one device, and only what is used is sent.

Every layout of rows, kind of mask and kind of head, alone and beside axes of heads and batches.
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from attention_steps import laid, require_same, with_gradients
from on_mesh import on_mesh
from torch.utils.checkpoint import checkpoint
from vescale_comm import simulate, trace
from vescale_comm.testing import run
from vescale_dtensor import InterleavedShard, Replicate, Shard, init_device_mesh, sequence_attention
from vescale_dtensor._layout.shard_geometry import owned
from vescale_dtensor._ops.nn.ring_tiles import Block, Terms, tiles

LAYOUTS = {
    "rows": Shard(2),
    "halves": InterleavedShard(2, 2),
    "striped": InterleavedShard(2, 8),
    "uneven": vd.RaggedShard((2,), (1, 4, 0, 3)),
}
MASKS = {
    "none": None,
    "causal": None,
    "window": lambda rows, keys: (rows - keys).abs() < 3,
    "packed": lambda rows, keys: (rows // 5 == keys // 5) & (keys <= rows),
    "nothing": lambda rows, keys: (keys <= rows) & (rows != 1) & (keys != 4),
}
CALLS = [
    dict(mask=mask, heads=heads, dropout=dropout)
    for mask, heads, dropout in product(MASKS, [(4, 4), (6, 2), (3, 1)], [0.0, 0.4])
]

SOME = CALLS[::5]  # of every mask, with every count of heads, with and without dropout


def tensors(tokens, heads, batch=2, dtype=torch.float64):
    torch.manual_seed(tokens)
    query, keys = heads
    counts = ((query, 8), (keys, 8), (keys, 6))
    return [torch.randn(batch, count, tokens, width, dtype=dtype) for count, width in counts]


def arguments(call, tokens):
    found = {"dropout_p": call["dropout"], "enable_gqa": len(set(call["heads"])) > 1}
    make = MASKS[call["mask"]]
    if make is not None:
        places = torch.arange(tokens)
        found["attn_mask"] = make(places[:, None], places)
    return found | {"is_causal": call["mask"] == "causal"}


def attend(parts, call, tokens):
    """Result, gradients of what is given, and the next random number."""
    result = F.scaled_dot_product_attention(*parts, **arguments(call, tokens))
    return [*with_gradients(result, parts), torch.rand(())]


def in_ring(program, ranks=4):
    def within(rank, world_size):
        with sequence_attention("ring"):
            return program(rank, world_size)

    return simulate(ranks).run(within)


@pytest.mark.parametrize(
    ("layout", "tokens"),
    [("rows", 10), ("rows", 3), ("halves", 14), ("halves", 2), ("striped", 24), ("uneven", 16)],
)
def test_results_are_those_of_one_device(layout, tokens):
    def step(mesh):
        found = []
        for call in CALLS:
            parts = laid(tensors(tokens, call["heads"]), mesh, [LAYOUTS[layout]])
            with trace() as sent:
                found.append(attend(parts, call, tokens))
            kinds = {one.op for one in sent.records if one.op != "all_gather"}
            assert kinds <= {"permute", "all_reduce"}
        return found

    require_same(step, (4,), way="ring")


AXES = {
    "heads inside": (("cp", "tp"), [Shard(2), Shard(1)]),
    "heads outside": (("tp", "cp"), [Shard(1), Shard(2)]),
    "batch": (("dp", "cp"), [Shard(0), Shard(2)]),
    "batch of one rank": (("dp", "cp"), [Shard(0), InterleavedShard(2, 2)]),
    "two axes of rows": (("a", "b"), [Shard(2), Shard(2)]),
    "a replica": (("r", "cp"), [Replicate(), Shard(2)]),
}


@pytest.mark.parametrize("axes", AXES)
def test_beside_other_axes(axes):
    names, placements = AXES[axes]
    batch = 1 if axes == "batch of one rank" else 2

    def step(mesh):
        each = [laid(tensors(10, call["heads"], batch), mesh, placements) for call in SOME]
        return [attend(parts, call, 10) for parts, call in zip(each, SOME, strict=True)]

    require_same(step, (2, 2), names, way="ring")


@pytest.mark.parametrize("heads", [(8, 4), (6, 2), (6, 3)])
def test_key_heads_that_every_rank_of_another_axis_has(heads):
    """Some of six heads over four ranks share a key head that two of the ranks need."""
    call = dict(mask="causal", heads=heads, dropout=0.4)

    lies = [[Shard(2), Shard(1)], *[[Shard(2), Replicate()]] * 2]
    step = lambda mesh: attend(laid(tensors(10, heads), mesh, *lies), call, 10)  # noqa: E731
    require_same(step, (2, 4), ("cp", "tp"), way="ring")


@pytest.mark.parametrize("shape", [(10, 10), (1, 10), (2, 1, 10, 10), (6, 10, 10), (10, 1)])
def test_a_mask_of_numbers_that_is_learned(shape):
    def step(mesh):
        parts = tensors(10, (6, 2))
        torch.manual_seed(1)
        lies = [*[[Shard(2)]] * 3, [Replicate()]]
        leaves = laid([*parts, torch.randn(shape, dtype=torch.float64)], mesh, *lies)
        result = F.scaled_dot_product_attention(*leaves, enable_gqa=True)
        return with_gradients(result, leaves)

    require_same(step, (4,), way="ring")


def sent_by_all(mask, placement, heads=(4, 2), tokens=16, backward=True):
    """Bytes that all ranks send in one attention, in blocks of a quarter of keys and values."""

    def program(rank, world_size):
        mesh = init_device_mesh("cpu", (4,))
        parts = laid(tensors(tokens, heads), mesh, [placement])
        call = dict(mask=mask, heads=heads, dropout=0.0)
        with trace() as sent, torch.set_grad_enabled(backward):
            result = F.scaled_dot_product_attention(*parts, **arguments(call, tokens))
            if backward:
                result.sum().backward()
        return sum(one.bytes for one in sent.records if one.op == "permute")

    block = sum(one.nbytes for one in tensors(tokens, heads)[1:]) / 4
    return sum(in_ring(program)) / block


SENT_BLOCKS = [
    ("none", Shard(2), 12),  # each of four to three others
    ("causal", Shard(2), 6),  # to those behind
    ("causal", InterleavedShard(2, 4), 12),  # all see something of all
    ("window", Shard(2), 6),  # to the neighbours on both sides
    ("packed", Shard(2), None),  # documents of 5, blocks of 4
]


@pytest.mark.parametrize(("mask", "placement", "blocks"), SENT_BLOCKS)
def test_blocks_that_are_of_no_use_are_not_sent(mask, placement, blocks):
    if blocks is None:
        rows = torch.arange(16)
        seen = MASKS["packed"](rows[:, None], rows).view(4, 4, 4, 4).any(3).any(1)
        blocks = int(seen.sum()) - 4
        assert blocks < 6
    assert sent_by_all(mask, placement, backward=False) == blocks
    # Backward has them come again, and sends as much back: key heads are not repeated.
    assert sent_by_all(mask, placement) == 3 * blocks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_less_exact_than_one_device(dtype):
    call = dict(mask="causal", heads=(6, 2), dropout=0.0)

    def step(mesh, of):
        parts = [one.to(of) for one in tensors(64, (6, 2))]
        return attend(laid(parts, mesh, [Shard(2)]), call, 64)[:-1]

    exact, alone = step(None, torch.float64), step(None, dtype)
    program = lambda rank, size: step(init_device_mesh("cpu", (4,)), dtype)  # noqa: E731
    for found in in_ring(program):
        for one, other, true in zip(found, alone, exact, strict=True):
            assert one.dtype == dtype
            error, usual = ((x.double() - true).abs().max() for x in (one, other))
            assert error <= 2 * usual


def test_autocast_rounds_what_goes_in():
    call = dict(mask="causal", heads=(4, 2), dropout=0.0)

    def step(mesh):
        parts = laid(tensors(12, (4, 2), dtype=torch.float32), mesh, [Shard(2)])
        with torch.autocast("cpu", torch.bfloat16):
            return attend(parts, call, 12)[:-1]

    require_same(step, (4,), way="ring", rtol=4e-2, atol=4e-2)


def test_a_second_derivative_is_refused_on_every_rank():
    def program(rank, world_size):
        mesh = init_device_mesh("cpu", (4,))
        parts = laid(tensors(8, (3, 3)), mesh, [Shard(2)])
        loss = F.scaled_dot_product_attention(*parts).square().sum()
        (first,) = torch.autograd.grad(loss, parts[0], create_graph=True)
        with pytest.raises(vd.UnsupportedError, match=r'no second derivative.*"gather"'):
            first.square().sum().backward()
        return True

    assert in_ring(program) == [True] * 4


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_captured_and_recomputed(mask):
    call = dict(mask=mask, heads=(3, 3), dropout=0.4)

    def program(rank, world_size):
        mesh = init_device_mesh("cpu", (4,))
        parts = laid(tensors(10, (3, 3)), mesh, [Shard(2)])

        def inner(*parts):
            return F.scaled_dot_product_attention(*parts, **arguments(call, 10)).square().sum()

        def again(*parts):
            return checkpoint(inner, *parts, use_reentrant=False)

        captured, found = vd.capture(inner), []
        for form in (inner, again, captured, captured):
            torch.manual_seed(0)
            loss = form(*parts)
            found.append([loss, *torch.autograd.grad(loss, parts)])
        with sequence_attention("gather"):
            torch.manual_seed(0)
            captured(*parts)
        return captured.programs, [[one.full_tensor() for one in each] for each in found]

    for programs, (eager, *others) in in_ring(program):
        assert len(programs) == 2, "another way is another program"
        for found in others:
            assert all(map(torch.equal, found, eager))


def test_stripes_balance_a_causal_mask():
    """Scores that the busiest of four ranks computes, in those of the mean."""
    tokens, mine = 4096, torch.zeros(1, 1, 1024, 1)

    def busiest(placement):
        groups = [owned((placement,), (4,), (1, 1, tokens, 1), (rank,)) for rank in range(4)]
        rows = [next(g for g in one if g.dims == (2,)).intervals[0] for one in groups]
        found = []
        for own in rows:
            terms = Terms(own, causal=True, scale=1.0)
            parts = [tiles(mine, Block(mine, mine, one, None, None), terms) for one in rows]
            found.append(sum((one.end - one.first) * one.keys for each in parts for one in each))
        assert tokens**2 / 2 <= sum(found) <= 1.1 * tokens**2 / 2
        return 4 * max(found) / sum(found)

    assert busiest(Shard(2)) > 1.6
    assert 1 <= busiest(InterleavedShard(2, 16)) < 1.08


def test_ways_follow_the_block_and_not_the_call_before():
    def program(mesh):
        parts = [vd.distribute_tensor(one, mesh, [Shard(2)]) for one in tensors(8, (4, 4))]
        ops = []
        for way in ("ring", "gather", "ulysses", "ring", "auto"):
            with sequence_attention(way), trace() as sent:
                F.scaled_dot_product_attention(*parts)
            ops.append({one.op for one in sent.records})
        return ops

    swapped = {"all_to_all"}
    assert (
        on_mesh((4,), program) == [[{"permute"}, {"all_gather"}, swapped, {"permute"}, swapped]] * 4
    )


def test_auto_takes_a_ring_where_gathered_keys_would_keep_a_large_mask():
    def program(mesh):
        found = []
        for tokens, heads in ((16, 3), (256, 3), (256, 4)):
            parts = [
                vd.distribute_tensor(one, mesh, [Shard(2)])
                for one in tensors(tokens, (heads, heads), batch=1)
            ]
            with trace() as sent:
                F.scaled_dot_product_attention(*parts, is_causal=True)
            found.append({one.op for one in sent.records})
        return found

    assert on_mesh((4,), program) == [[{"all_gather"}, {"permute"}, {"all_to_all"}]] * 4


@pytest.mark.parametrize(("widths", "dropout"), [((0, 4), 0.0), ((0, 4), 0.5), ((4, 0), 0.0)])
def test_without_features(widths, dropout):
    """Each row is the mean of the values then, and not nothing."""

    def step(mesh):
        torch.manual_seed(0)
        parts = [torch.randn(2, 4, 8, width) for width in (widths[0], *widths)]
        call = dict(mask="causal", heads=(4, 4), dropout=dropout)
        return attend(laid(parts, mesh, [Shard(2)]), call, 8)

    require_same(step, (4,), way="ring", rtol=1e-5, atol=1e-6)


def test_what_cannot_be_is_said_on_every_rank():
    def program(mesh):
        parts = [vd.distribute_tensor(one, mesh, [Shard(2)]) for one in tensors(8, (3, 3))]
        refused = pytest.raises(vd.LayoutError, match=r'3 heads.*over 4 ranks.*Take "ring"')
        with trace() as sent, sequence_attention("ulysses"), refused:
            F.scaled_dot_product_attention(*parts)
        unknown = pytest.raises(vd.DTensorError, match=r"'zigzag'.*'auto', 'ring'")
        with unknown, sequence_attention("zigzag"):
            pass
        return len(sent.records)

    assert on_mesh((4,), program) == [0] * 4


def on_a_process(rank, world_size):
    mesh, found = init_device_mesh("cpu", (4,)), []
    for call in CALLS[::4]:
        parts = laid(tensors(10, call["heads"]), mesh, [Shard(2)])
        with sequence_attention("ring"):
            found.append(attend(parts, call, 10))
    return found


def test_real_processes():
    wanted = [attend(laid(tensors(10, c["heads"]), None), c, 10) for c in CALLS[::4]]
    for found in run(on_a_process, 4):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
