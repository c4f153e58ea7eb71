"""What a rank holds under every placement: the right elements, told right to other packages.

Numbers drawn and checkpoints written through the layout protocol equal those of one device, and ops
run on these layouts as on any other.
"""

from __future__ import annotations

import random
import re
import tempfile
from itertools import product

import numpy as np
import pytest
import torch
import vescale_ckpt
import vescale_dtensor as vd
from redistribution_oracle import coordinates, dense, legal, piece
from torch.distributed.tensor import placement_types
from torch.testing import assert_close
from vescale_comm import trace
from vescale_comm.testing import device_mesh, on_ranks, outcomes, run
from vescale_dtensor import InterleavedShard, RaggedShard, Replicate, Shard
from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.derived_placements import as_placement, nested
from vescale_dtensor._layout.shard_geometry import rectangles
from vescale_dtensor.placement_types import StridedShard

R, S0, S1 = Replicate(), Shard(0), Shard(1)
FUSED, STRIDED = InterleavedShard(0, 2), StridedShard(1, 3)
FLAT, SKEW = RaggedShard((0, 1), (3, 1)), RaggedShard((1, 2), (1, 2))
CUTS = [R, S0, Shard(2), FUSED, InterleavedShard(1, 3), STRIDED, FLAT, SKEW]
SHAPES = [(4, 6, 6), (8, 3, 2), (2, 12, 1)]
LAYOUTS = [
    (pair, shape) for shape in SHAPES for pair in product(CUTS, CUTS) if legal(pair, (2, 2), shape)
]
# A third of them, for tests that run many ops on each.
SOME = LAYOUTS[::3]


def meshes():
    return device_mesh((2, 2), ("dp", "tp"))


def spread_out(tensor, mesh, placements):
    """Every rank has the tensor already, so nothing is sent."""
    return vd.distribute_tensor(tensor, mesh, placements, src_data_rank=None)


# --- what is held --------------------------------------------------------------------------------


def described(rank, world_size):
    mesh = meshes()
    at = tuple(mesh.get_coordinate())
    for placements, shape in LAYOUTS:
        x = dense(shape)
        tensor = spread_out(x, mesh, placements)
        local = tensor.to_local()
        assert torch.equal(local, piece(x, placements, (2, 2), at)), placements
        layout = tensor.__vescale_layout__()
        rebuilt = torch.full_like(local, torch.nan)
        for box in layout.boxes:
            taken = x
            for dim, (start, extent) in enumerate(zip(box.global_offset, box.shape, strict=True)):
                taken = taken.narrow(dim, start, extent)
            rebuilt.as_strided(box.shape, box.local_strides, box.local_offset).copy_(taken)
        assert torch.equal(rebuilt, local), f"{placements} of {shape}: {layout.boxes}"
        assert all(0 not in box.shape for box in layout.boxes)
    return len(LAYOUTS)


def test_boxes_rebuild_what_chunk_and_cat_give():
    assert all(count > 100 for count in run(described, 4))


@pytest.mark.parametrize("extents", [(7,), (3, 5), (2, 3, 4), (2, 1, 3, 2)])
def test_a_stretch_of_flattened_dims_is_few_boxes(extents):
    numel = torch.Size(extents).numel()
    numbers = torch.arange(numel).reshape(extents)
    for low, high in product(range(numel + 1), repeat=2):
        boxes = rectangles(extents, (low, high))
        parts = [numbers[tuple(slice(*interval) for interval in box)].flatten() for box in boxes]
        assert torch.cat([torch.arange(0), *parts]).tolist() == list(range(low, high))
        assert len(boxes) <= 2 * len(extents) - 1


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_strided_shard_is_torchs(count):
    for extent, factor in product(range(10), range(1, 5)):
        theirs = placement_types._StridedShard(0, split_factor=factor)
        ours = as_placement(theirs)
        assert ours == StridedShard(0, factor)
        x = torch.arange(extent)
        wanted, _ = theirs._split_tensor(x, count, with_padding=False)
        for index in range(count):
            assert torch.equal(piece(x, (ours,), (count,), (index,)), wanted[index])


def test_nested_shards_in_any_order_of_axes():
    """The axes cut in the order that is asked for, whatever their order in the mesh."""
    sizes, x = (2, 3, 2), torch.arange(24)
    for order in [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1), (0, 2, 1), (1, 2, 0)]:
        found = nested(0, order, sizes)
        placements = tuple(found[axis] for axis in range(3))
        for at in coordinates(sizes):
            wanted = x
            for axis in order:
                wanted = wanted.chunk(sizes[axis])[at[axis]]
            assert torch.equal(piece(x, placements, sizes, at), wanted), (order, at)


# --- other packages, through the protocol --------------------------------------------------------


@on_ranks(4)
def test_numbers_are_those_of_one_device():
    mesh = meshes()
    for placements, shape in SOME:
        torch.manual_seed(7)
        whole = torch.empty(shape).normal_()
        torch.manual_seed(7)
        tensor = spread_out(torch.zeros(shape), mesh, placements)
        with trace() as seen:
            tensor.normal_()
        assert not seen.records, f"{placements} of {shape}: {seen.records}"
        assert torch.equal(tensor.full_tensor(), whole), f"{placements} of {shape}"


def round_trip(rank, world_size, path):
    mesh = meshes()
    some = LAYOUTS[::5]
    saved = {
        str(i): spread_out(dense(shape, seed=i), mesh, placements)
        for i, (placements, shape) in enumerate(some)
    }
    vescale_ckpt.save(path, saved)
    for shift in (0, 1, 7):
        into = {}
        for i, (_, shape) in enumerate(some):
            others = [p for p, s in LAYOUTS if s == shape]
            target = others[(i * 3 + shift) % len(others)]
            into[str(i)] = spread_out(torch.zeros(shape).double(), mesh, target)
        vescale_ckpt.load(path, into=into)
        for i, (_, shape) in enumerate(some):
            assert torch.equal(into[str(i)].full_tensor(), dense(shape, seed=i))


def test_checkpoints_move_between_all_layouts():
    with tempfile.TemporaryDirectory() as folder:
        run(round_trip, 4, f"{folder}/checkpoint")


# --- ops -----------------------------------------------------------------------------------------


@on_ranks(4)
def test_pointwise_ops_need_no_communication():
    """Operands that lie alike are not moved, forward or backward."""
    mesh = meshes()
    for placements, shape in SOME:
        x, y = dense(shape, seed=1) / 100, dense(shape, seed=2) / 100
        a, b = (spread_out(t, mesh, placements).requires_grad_() for t in (x, y))
        with trace() as seen:
            result = (a * b).sigmoid() + 2 * a.exp().clamp(max=3)
            result.backward(result.detach())
        assert not seen.records, f"{placements} of {shape}: {seen.records}"
        assert result.placements == a.placements
        x.requires_grad_(), y.requires_grad_()
        wanted = (x * y).sigmoid() + 2 * x.exp().clamp(max=3)
        wanted.backward(wanted.detach())
        assert_close(result.full_tensor(), wanted)
        for tensor, plain in [(a, x), (b, y)]:
            assert_close(vd.gradient_total(tensor).full_tensor(), plain.grad)


@on_ranks(4)
def test_ops_are_right_on_every_layout():
    """Whatever the layouts: other ops, operands that lie differently, changes in place."""
    mesh = meshes()
    x, y = dense((4, 6, 6)) / 100, dense((6,), seed=3) / 100
    for number, (placements, shape) in enumerate(LAYOUTS):
        if shape != (4, 6, 6) or number % 2:
            continue
        a = spread_out(x, mesh, placements)
        other = spread_out(x, mesh, LAYOUTS[number - 1][0])
        b = spread_out(y, mesh, [R, R])
        pairs = [
            (a + b, x + y),
            (a * 2 - other, x * 2 - x),
            (a.sum(1), x.sum(1)),
            (a @ spread_out(x[0], mesh, [S0, R]), x @ x[0]),
            (a.softmax(-1), x.softmax(-1)),
            (a.reshape(24, 6), x.reshape(24, 6)),
            (a.reshape(4, 2, 3, 6), x.reshape(4, 2, 3, 6)),
            (a.flatten(), x.flatten()),
            (a.transpose(0, 2), x.transpose(0, 2)),
            (a[:, 1:3], x[:, 1:3]),
            (a.clone().add_(other).mul_(b), (x + x) * y),
            (torch.cat([a, other]), torch.cat([x, x])),
            (a.max(), x.max()),
        ]
        for index, (found, wanted) in enumerate(pairs):
            what = f"{placements}, op {index}"
            assert_close(found.full_tensor(), wanted, msg=what)


@on_ranks(4)
def test_flat_pieces_of_sums():
    """A sum that is owed on another axis is completed where an op needs it."""
    mesh = meshes()
    x = dense((4, 6)) / 100
    flat = RaggedShard((0, 1), (1, 2))
    owed = spread_out(x, mesh, [vd.Partial(), flat])
    assert (2 * owed).placements == (vd.Partial(), flat)
    assert_close((2 * owed).full_tensor(), 2 * x)
    assert_close(owed.sigmoid().full_tensor(), x.sigmoid())
    assert_close((owed * owed).full_tensor(), x * x)
    assert_close(owed.sum().full_tensor(), x.sum())
    assert_close(torch.linalg.vector_norm(owed).full_tensor(), x.norm())


@pytest.mark.parametrize("foreach", [True, False])
@on_ranks(4)
def test_an_optimizer_step_on_pieces(foreach):
    """Clipping and an optimizer on pieces: one all-reduce of one number, whatever the layout."""
    mesh = device_mesh((4,))
    cuts = [
        RaggedShard((0, 1), (3, 0, 2, 1)),
        FUSED,
        StridedShard(1, 2),
        RaggedShard((0,), (2, 0, 1, 1)),
    ]
    for cut in cuts:
        weight, gradient = dense((8, 6)) / 100, dense((8, 6), seed=1) / 100
        plain = torch.nn.Parameter(weight.clone())
        plain.grad = gradient.clone()
        ours = torch.nn.Parameter(spread_out(weight, mesh, [cut]))
        ours.grad = spread_out(gradient, mesh, [cut])
        with trace() as seen:
            found = torch.nn.utils.clip_grad_norm_([ours], 1.0, foreach=foreach)
            torch.optim.AdamW([ours], lr=0.1, foreach=foreach).step()
        assert seen.counts() == {"all_reduce": 1}, f"{cut}: {seen.records}"
        wanted = torch.nn.utils.clip_grad_norm_([plain], 1.0, foreach=foreach)
        torch.optim.AdamW([plain], lr=0.1, foreach=foreach).step()
        assert_close(found.full_tensor(), wanted)
        assert_close(ours.detach().full_tensor(), plain.detach())


@on_ranks(4)
def test_totals_are_reduced_shard_by_shard():
    mesh = meshes()
    for placements, shape in SOME:
        x = dense(shape) / 100
        a = spread_out(x, mesh, placements).requires_grad_()
        x.requires_grad_()
        with trace() as seen:
            ours = [a.sum(), a.mean(), (a * a).sum()]
        assert not seen.records, f"{placements}: {seen.records}"
        for found, wanted in zip(ours, [x.sum(), x.mean(), (x * x).sum()], strict=True):
            assert_close(found.full_tensor(), wanted)
        ours[1].backward()
        x.mean().backward()
        assert_close(vd.gradient_total(a).full_tensor(), x.grad)


@on_ranks(2)
def test_ops_that_need_an_interval_get_one():
    """Ops that count from where a rank's indices begin do not take interleaved ones."""
    mesh = device_mesh((2,))
    table, index = dense((8, 3)), torch.tensor([0, 3, 7, 5])
    logits = dense((4, 8)) / 100
    for kind in [InterleavedShard, StridedShard]:
        found = torch.nn.functional.embedding(index, spread_out(table, mesh, [kind(0, 2)]))
        assert torch.equal(found.full_tensor(), table[index])
        loss = torch.nn.functional.cross_entropy(spread_out(logits, mesh, [kind(1, 2)]), index)
        assert_close(loss.full_tensor(), torch.nn.functional.cross_entropy(logits, index))
        rows = torch.nn.functional.cross_entropy(
            spread_out(logits, mesh, [kind(0, 2)]), spread_out(index, mesh, [kind(0, 2)])
        )
        assert_close(rows.full_tensor(), torch.nn.functional.cross_entropy(logits, index))


@on_ranks(2)
def test_a_fused_projection_stays_interleaved():
    """A fused projection: cut in every block, applied without communication."""
    mesh = device_mesh((2,))
    x, weight = dense((3, 4)), dense((12, 4), seed=1)
    fused = spread_out(weight, mesh, [InterleavedShard(0, 3)])
    with trace() as seen:
        out = torch.nn.functional.linear(spread_out(x, mesh, [R]), fused)
    assert not seen.records
    assert out.placements == (InterleavedShard(1, 3),)
    assert torch.equal(out.full_tensor(), torch.nn.functional.linear(x, weight))


# --- from local ----------------------------------------------------------------------------------


@on_ranks(4)
def test_pieces_are_wrapped_as_they_are():
    mesh = meshes()
    at = tuple(mesh.get_coordinate())
    for placements, shape in SOME:
        x = dense(shape)
        local = piece(x, placements, (2, 2), at).requires_grad_()
        tensor = vd.DTensor.from_local(local, mesh, placements, shape=shape)
        (tensor * tensor).full_tensor().sum().backward()
        assert torch.equal(tensor.full_tensor(), x)
        assert torch.equal(local.grad, 2 * local.detach())
    assert repr(spread_out(dense((4, 6, 5)), mesh, (S0, FLAT))) == ("DTensor(f64[(4@dp, 6)@tp, 5])")


def without_shape(rank, world_size):
    vd.DTensor.from_local(torch.zeros(6), device_mesh((2,)), [FLAT])


def test_equal_placements_print_alike_whatever_was_made_first():
    """A bool and numpy's integers become plain ints; what is no integer is refused, always."""
    made = {
        "Shard(91)": lambda n: Shard(n),
        "Shard(92)": lambda n: Shard(dim=n + 1),
        "InterleavedShard(91, 92)": lambda n: InterleavedShard(n, n + 1),
        "StridedShard(91, split_factor=92)": lambda n: StridedShard(n, n + 1),
        "RaggedShard((91, 92), (91, 92))": lambda n: RaggedShard((n, n + 1), (n, n + 1)),
    }
    for words, make in made.items():
        for _ in range(2):  # before the equal one is made, and after
            with pytest.raises(LayoutError, match=r"expected an integer, found 9\d.0"):
                make(91.0)
            assert repr(make(np.int64(91))) == words
            assert repr(make(91)) == words
            assert make(np.int64(91)) == make(91)
    assert [repr(Shard(n)) for n in (True, 1, False, 0)] == ["Shard(1)"] * 2 + ["Shard(0)"] * 2
    assert repr(InterleavedShard(True, True)) == "InterleavedShard(1, 1)"
    assert repr(RaggedShard((True,), (1, True))) == "RaggedShard((1,), (1, 1))"


def test_a_flat_local_tensor_does_not_tell_the_global_shape():
    for outcome in outcomes(without_shape, 2):
        assert outcome.type_name == LayoutError.__name__
        assert "Pass it as shape=" in outcome.message


@pytest.mark.parametrize("seed", range(8))
def test_one_coordinate_owns_what_it_owns_among_all(seed):
    """`piece` and `distinct_sizes` say of any number of coordinates what `pieces` says of all."""
    chosen = random.Random(seed)
    for _ in range(300):
        extent, count = chosen.randrange(40), chosen.randrange(1, 12)
        units = [chosen.randrange(4) for _ in range(count)]
        for placement in (
            Shard(0),
            InterleavedShard(0, chosen.randrange(1, 5)),
            StridedShard(0, chosen.randrange(1, 6)),
            RaggedShard((0,), units),
            RaggedShard((0, 1), units),
        ):
            try:
                pieces = placement.pieces(extent, count)
            except LayoutError as refused:
                for ask in (placement.sizes, placement.distinct_sizes):
                    with pytest.raises(LayoutError, match=re.escape(str(refused))):
                        ask(extent, count)
                with pytest.raises(LayoutError, match=re.escape(str(refused))):
                    placement.piece(extent, count, 0)
                continue
            assert pieces == tuple(placement.piece(extent, count, i) for i in range(count))
            assert set(placement.sizes(extent, count)) == placement.distinct_sizes(extent, count)
            lengths = [sum(high - low for low, high in piece) for piece in pieces]
            assert list(placement.sizes(extent, count)) == lengths
