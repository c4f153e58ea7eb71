"""`data_ptr()` tells which tensors share memory, the same on every rank; it is no number of a rank.

Of a replicated tensor it is the address of the whole. Used as a number, that of a shard is refused,
and so is a comparison of two tensors of which a rank holds nothing.
Memory of which that is said is not written to by DTensors, whichever way they come to it.
"""

import pytest
import torch
import vescale_dtensor as vd
from torch import nn
from vescale_comm.testing import device_mesh, on_ranks, run
from vescale_dtensor import (
    InterleavedShard,
    RaggedShard,
    Replicate,
    Shard,
    UnsupportedError,
    storage,
)

WHOLE = torch.arange(24.0).reshape(6, 4)
LAYOUTS = (
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (Replicate(), Shard(1)),
    (InterleavedShard(1, 2), Replicate()),
    (RaggedShard((0, 1), (1, 5)), Replicate()),
    (Replicate(), Replicate()),
)


def place(layout):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    return vd.distribute_tensor(WHOLE, mesh, list(layout), src_data_rank=None)


def compared(rank, world):
    for layout in LAYOUTS:
        x, other = place(layout), place(layout)
        tied = nn.Parameter(x)
        assert x.data_ptr() == x.data_ptr() == x.data.data_ptr() == x.detach().data_ptr()
        assert tied.data_ptr() == tied.data.data_ptr() != other.data_ptr()
        assert x.data_ptr() != WHOLE.data_ptr()
        seen = {(t.data_ptr(), t.numel(), t.dtype, t.device) for t in (x, x.data, other)}
        assert len(seen) == 2
        assert sum({p.data_ptr(): p.numel() for p in (x, x.detach(), other)}.values()) == 48


def used_as_a_number(rank, world):
    uses = (
        lambda p: p + 4,
        lambda p: p % 16,
        lambda p: p < 3,
        int,
        hex,
        lambda p: f"{p:x}",
        lambda p: [0][p],
    )
    for layout in LAYOUTS[:-1]:
        for use in uses:
            with pytest.raises(UnsupportedError, match="to_local"):
                use(place(layout).data_ptr())
    whole = place(LAYOUTS[-1])
    assert whole.data_ptr() % 4 == 0
    assert whole.data_ptr() == whole.to_local().data_ptr()


def empty_somewhere(rank, world):
    """What a rank holds nothing of looks there like any other slice, but is itself."""
    x = place((Shard(0), Replicate()))
    views = [x[:1], x[1:2], x[:0], place((Shard(0), Shard(0)))[:3]]
    for view in views:
        assert view.data_ptr() == view.data_ptr()
        assert view.data_ptr() != 0
        # Of another shape or layout it is another part of the memory, or other memory.
        assert view.data_ptr() != x.data_ptr() != views[3].data_ptr()
        with pytest.raises(UnsupportedError, match="by `is`"):
            _ = view.data_ptr() == view.detach().data_ptr()
    with pytest.raises(UnsupportedError, match="by `is`"):
        _ = {x[:1].data_ptr(), x[1:2].data_ptr()}
    before = views[0].data_ptr()
    views[0].data = x[1:2].clone()
    with pytest.raises(UnsupportedError, match="by `is`"):
        _ = before == views[0].data_ptr()


@pytest.mark.parametrize("case", [compared, used_as_a_number, empty_somewhere])
def test_identity(case):
    run(case, 4)


@on_ranks(4)
def test_parameters_that_share_no_memory_have_an_identity():
    mesh = device_mesh((2, 2), ("dp", "tp"))
    lies = [RaggedShard((0, 1), (0, 1)), Replicate()]
    first, second = (nn.Parameter(vd.distribute_tensor(WHOLE, mesh, lies)) for _ in range(2))
    with pytest.raises(UnsupportedError, match="hold nothing"):
        _ = first.data_ptr() == second.data_ptr()
    storage.separate_memory([first, second, torch.ones(2)])
    assert first.data_ptr() == first.data_ptr() != second.data_ptr()
    assert len({p.data_ptr() for p in (first, second, first)}) == 2
    for view in (first.data, first.detach(), nn.Parameter(first.data)):
        with pytest.raises(UnsupportedError, match="hold nothing"):
            _ = view.data_ptr() == first.data_ptr()
    for takes in (lambda p: setattr(p, "data", first.data), lambda p: p.set_(first.data)):
        storage.separate_memory([second])
        before = storage.memories_of([second])
        assert before == storage.memories_of([second]) != storage.memories_of([first])
        with torch.no_grad():
            takes(second)
        assert storage.memories_of([second]) != before
        with pytest.raises(UnsupportedError, match="hold nothing"):
            _ = second.data_ptr() == first.data_ptr()
    even = [vd.distribute_tensor(WHOLE, mesh, [Shard(0), Replicate()]) for _ in range(2)]
    storage.separate_memory(even)
    assert even[0].data_ptr() == even[0].data.data_ptr() != even[1].data_ptr()


class OwnError(Exception):
    pass


def item(x):
    x[0] = 1.0


WRITES = [
    lambda x: x.mul_(2),
    lambda x: x[0].mul_(2),
    lambda x: x.data.mul_(2),
    lambda x: x.view(-1)[2:].zero_(),
    lambda x: torch.mul(x, 2, out=x),
    lambda x: torch._foreach_mul_([x], 2),
    item,
]


@on_ranks(2, simulated=True)
def test_writes_are_refused(rank, world_size):
    mesh = vd.init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    whole = torch.arange(12.0)
    x = vd.DTensor.from_local(whole[4:10].view(3, 2), mesh, [Replicate()])
    other = vd.distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])
    for permitted in (True, False, True):
        for write in WRITES:
            before = whole.clone()
            if permitted:
                write(x)
                whole.copy_(before)
            else:
                storage.refuse_writes(whole, lambda local: OwnError(local.storage_offset()))
                # Twice: the second call of a kind is a compiled one.
                for _ in range(2):
                    with pytest.raises(OwnError):
                        write(x)
                other.mul_(2)
                assert torch.equal(whole, before)
                storage.permit_writes(whole)


@on_ranks(2, simulated=True)
def test_what_was_refused_is_permitted_when_nobody_holds_the_memory(rank, world_size):
    mesh = vd.init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    whole = torch.arange(12.0)
    storage.refuse_writes(whole, lambda local: OwnError())
    # Its storage lives on, as one that is given the same address would.
    x = vd.DTensor.from_local(whole[4:10].data, mesh, [Replicate()])
    with pytest.raises(OwnError):
        x.mul_(2)
    again = whole.data
    del whole
    x.mul_(2)
    storage.refuse_writes(again, lambda local: OwnError())
    with pytest.raises(OwnError):
        x.mul_(2)
    storage.permit_writes(again)
