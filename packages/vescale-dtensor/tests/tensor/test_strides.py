"""Tensors that are laid out have the strides of one device, and views follow them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from memory_formats import lying
from torch import nn
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import DTensor, Replicate, Shard

GIVEN = {
    "transposed": lambda: torch.randn(6, 8).t(),
    "channels_last": lambda: torch.randn(5, 8, 6, 4).to(memory_format=torch.channels_last),
    "four channels": lambda: torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last),
    "one channel": lambda: torch.randn(4, 1, 3, 3).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "columns": lambda: torch.randn(8, 9)[:, 1:8:2],
    "expanded": lambda: torch.randn(8, 1).expand(8, 5),
    "empty": lambda: torch.randn(0, 3).t(),
}
PLACED = [[Shard(0)], [Shard(1)], [Replicate()], [Shard(0), Shard(1)], [Shard(1), Replicate()]]


def _mesh_for(placements):
    return device_mesh((4,) if len(placements) == 1 else (2, 2))


@pytest.mark.parametrize("given", GIVEN)
def test_distribute_tensor_keeps_strides(given):
    """Also those of gaps; and `as_strided`, `dropout` and gradients follow them."""

    def program(rank, world_size, x):
        for placements in PLACED:
            for source in (0, None):
                mesh = _mesh_for(placements)
                y = vd.distribute_tensor(x, mesh, placements, src_data_rank=source)
                assert not lying(y, x)
                assert torch.equal(y.full_tensor(), x)
                order = y._spec.layout.order
                if order is not None and x.numel():
                    assert y.to_local().permute(order).is_contiguous()
            dropped = []
            for tensor in (x, y):
                torch.manual_seed(5)
                dropped.append(F.dropout(tensor))
            assert torch.equal(dropped[1].full_tensor(), dropped[0])
            leaf = nn.Parameter(x.clone())
            mine = vd.distribute_tensor(leaf, mesh, placements)
            (leaf * x.contiguous()).sum().backward()
            (mine * x.contiguous()).sum().backward()
            assert not lying(mine.grad, leaf.grad)

    torch.manual_seed(0)
    simulate(4).run(program, GIVEN[given]())


@on_ranks(4, simulated=True)
def test_strides_are_those_of_the_source(rank, world_size):
    """Ranks whose own copies lie otherwise come to the same layout."""
    x = torch.arange(48.0).reshape(6, 8).t()
    own = x if rank == 1 else x.contiguous()
    y = vd.distribute_tensor(own, device_mesh((4,)), [Shard(0)], src_data_rank=1)
    assert y.stride() == (1, 8)
    assert torch.equal(y.full_tensor(), x)


@on_ranks(4, simulated=True)
def test_views_of_what_lies_otherwise_are_those_of_one_device():
    x = torch.arange(48.0).reshape(6, 8).t()
    for placements in PLACED:
        y = vd.distribute_tensor(x, _mesh_for(placements), placements)
        assert torch.equal(y.as_strided((6, 8), (8, 1)).full_tensor(), x.as_strided((6, 8), (8, 1)))
        with pytest.raises(RuntimeError):
            x.view(-1)
        with pytest.raises(RuntimeError):
            y.view(-1)


@on_ranks(4, simulated=True)
def test_from_local_takes_the_order_of_the_local_tensors(rank, world_size):
    line = device_mesh((4,))
    image = torch.randn(2, 8, 6, 4).to(memory_format=torch.channels_last)
    mine = DTensor.from_local(image, line, [Shard(0)])
    assert mine.is_contiguous(memory_format=torch.channels_last)
    assert mine.stride() == (192, 1, 32, 8)
    # A dim of which each rank has one index keeps its place.
    assert DTensor.from_local(image[:1], line, [Shard(0)]).stride() == (192, 1, 32, 8)
    weight = torch.randn(6, 4).t()
    assert DTensor.from_local(weight, line, [Replicate()]).stride() == (1, 4)
    assert DTensor.from_local(weight, line, [Shard(1)]).stride() == (1, 4)
    # A known shape again, lying otherwise.
    assert DTensor.from_local(weight.contiguous(), line, [Shard(1)]).stride() == (24, 1)
    # Where a rank may hold nothing, nobody's strides count, unless they are given.
    count = (2, 2, 1, 0)[rank]
    piece = torch.randn(5, 8, 6, 4).to(memory_format=torch.channels_last)[:count]
    asked = {"shape": (5, 8, 6, 4)}
    assert DTensor.from_local(piece, line, [Shard(0)], **asked).is_contiguous()
    asked["stride"] = (192, 1, 32, 8)
    assert DTensor.from_local(piece, line, [Shard(0)], **asked).stride() == asked["stride"]
    gaps = DTensor.from_local(torch.randn(2, 3), line, [Shard(0)], stride=(6, 2))
    assert gaps.stride() == (6, 2)
    assert not gaps.is_contiguous()


HARD = ["transposed", "channels_last", "four channels", "permuted", "empty"]


@pytest.mark.parametrize("given", HARD)
def test_from_local_finds_the_order_out_where_ranks_hold_little_or_nothing(given):
    def program(rank, world_size, whole):
        line = device_mesh((4,))
        for dim in range(whole.ndim):
            held = vd.distribute_tensor(whole, line, [Shard(dim)], src_data_rank=None).to_local()
            for local in (held, whole.clone().narrow(dim, 0, held.shape[dim]).copy_(held)):
                x = DTensor.from_local(local, line, [Shard(dim)])
                assert not lying(x, whole), dim
                torch.manual_seed(4)
                expected = F.dropout(whole)
                torch.manual_seed(4)
                assert (F.dropout(x).full_tensor() != 0).equal(expected != 0)

    torch.manual_seed(0)
    simulate(4).run(program, GIVEN[given]())


@pytest.mark.parametrize("shape", [None, (3, 4, 5, 5)])
@on_ranks(2, simulated=True)
def test_from_local_refuses_pieces_that_lie_otherwise(rank, world_size, shape):
    """Each rank believed its own order, and drew the masks that go with it."""
    images = torch.randn(3, 4, 5, 5)
    local = (images.to(memory_format=torch.channels_last)[:2], images[2:])[rank]
    with pytest.raises(vd.DisagreementError, match=r"memory order': \[0, 2, 3, 1\] on rank 0"):
        DTensor.from_local(local, device_mesh((2,)), [Shard(0)], shape=shape)


@on_ranks(4, simulated=True)
def test_local_map_keeps_the_order_of_even_shards_only():
    """Uneven ones are row-major on every rank: kernels may choose another order on each."""
    line = device_mesh((4,))
    last = torch.channels_last

    def format_them(x):
        return x.contiguous(memory_format=last)

    mapped = vd.local_map(format_them, out_placements=[Shard(0)])
    for count, wanted in ((8, True), (7, False)):
        x = vd.distribute_tensor(torch.randn(count, 4, 3, 3), line, [Shard(0)])
        assert mapped(x).is_contiguous(memory_format=last) is wanted


# Views of what is expanded, whose dims then stand otherwise.
EXPANDED = {
    "transposed": lambda h: h[:, None].expand(-1, 4, -1).transpose(1, 2),
    "permuted": lambda h: h[:, None, :, None].expand(-1, 2, -1, 3).permute(0, 3, 2, 1),
    "twice": lambda h: h[:, :1, None].expand(-1, 4, 3).mT,
    "moved": lambda h: h[:, :, None].expand(-1, -1, 3).movedim(2, 1),
    "of transposed": lambda h: h.view(4, 2, 3).mT[:, :, None].expand(-1, -1, 2, -1).swapdims(1, 3),
    "expanded again": lambda h: h[:, None].expand(-1, 3, -1).mT[:, :, None].expand(-1, -1, 2, -1),
    "squeezed": lambda h: h[:, None, None].expand(-1, 3, -1, -1).transpose(1, 3).squeeze(2),
    "part": lambda h: h[:, None].expand(-1, 4, -1).mT.split(3, 1)[0],
    "diagonal": lambda h: h[:, None].expand(-1, 6, -1).mT.diagonal(0, 1, 2),
}


@pytest.mark.parametrize("form", EXPANDED)
def test_what_is_made_like_transposed_expanded_tensors_lies_as_on_one_device(form):
    """Copies, and masks: they were drawn in another order, without a word."""

    def program(rank, world_size, x):
        y = vd.distribute_tensor(x, device_mesh((2,)), [Shard(0)])
        for make in (F.dropout, torch.rand_like, torch.clone, torch.zeros_like, torch.neg):
            found = []
            for tensor in (x, y):
                torch.manual_seed(5)
                found.append(make(EXPANDED[form](tensor)))
            assert not lying(found[1], found[0])
            assert torch.equal(found[1].full_tensor(), found[0])

    torch.manual_seed(0)
    simulate(2).run(program, torch.randn(4, 6))
