"""A bucket holds each tensor once, aligned, in order, within the cap; a buffer is one collective.

Counted with a mode that sees every operator: nothing is copied but by `pack`.
"""

from itertools import pairwise
from math import prod

import pytest
import torch
import vescale_comm as vc
from hypothesis import given
from hypothesis import strategies as st
from vescale_comm.testing import run as run_processes
from vescale_comm_seen import Seen
from vescale_comm_worlds import run

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.complex128]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
LISTS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12)


@given(LISTS, st.integers(1, 200), st.sampled_from([1, 2, 8, 16, 24, 64]))
def test_plan_pack_and_unpack(specs, cap, align):
    shapes, dtypes = [shape for shape, _ in specs], [dtype for _, dtype in specs]
    bucket = vc.Bucket.plan(shapes, dtypes, cap_bytes=cap, align_bytes=align)
    members = [member for buffer in bucket.buffers for member in buffer.members]
    assert sorted(members) == list(range(len(specs)))
    for buffer in bucket.buffers:
        assert all(dtypes[member] == buffer.dtype for member in buffer.members)
        assert list(buffer.members) == sorted(buffer.members)
        each = -(-align // buffer.dtype.itemsize)
        spans = [
            (start, start + prod(shapes[member]))
            for member, start in zip(buffer.members, buffer.offsets, strict=True)
        ]
        assert all(start % each == 0 for start, _ in spans)
        # Each begins at the first multiple after the one before: no gap is larger than it must be.
        assert spans[0][0] == 0
        assert all(0 <= b[0] - a[1] < each for a, b in pairwise(spans))
        assert buffer.numel == spans[-1][1]
        assert buffer.nbytes <= cap or len(buffer.members) == 1
    assert all(a.members[0] < b.members[0] for a, b in pairwise(bucket.buffers))

    tensors = [torch.randint(0, 100, shape).to(dtype) for shape, dtype in specs]
    flats = bucket.pack(tensors)
    assert [(f.shape, f.dtype) for f in flats] == [((b.numel,), b.dtype) for b in bucket.buffers]
    for flat, buffer in zip(flats, bucket.buffers, strict=True):  # gaps are zero
        assert flat.count_nonzero() == sum(tensors[m].count_nonzero() for m in buffer.members)
    unpacked = bucket.unpack(flats)
    assert all(map(torch.equal, unpacked, tensors))
    buffers = {flat.untyped_storage().data_ptr() for flat in flats}
    assert all(x.untyped_storage().data_ptr() in buffers for x in unpacked)


def test_a_plan_is_a_value_that_prints():
    shapes, dtypes = [(2, 3), (4,), (5,)], [torch.float32, torch.int64, torch.float32]
    bucket = vc.Bucket.plan(shapes, dtypes)
    assert bucket == vc.Bucket.plan(shapes, dtypes)
    assert bucket.buffers[0].offsets == (0, 8)
    assert repr(bucket) == (
        "Bucket(3 tensors in [Buffer(torch.float32[13] of 2 tensors), "
        "Buffer(torch.int64[4] of 1 tensors)])"
    )
    with pytest.raises(AttributeError):
        bucket.shapes = ()


def test_what_was_not_planned_is_refused():
    bucket = vc.Bucket.plan([(2,), (3,)], [torch.float32] * 2)
    with pytest.raises(vc.CommArgumentError, match=r"was given 1 tensors"):
        bucket.pack([torch.ones(2)])
    with pytest.raises(
        vc.CommArgumentError, match=r"float32 \(3,\) as tensor 1, and given torch.fl"
    ):
        bucket.pack([torch.ones(2), torch.ones(4)])
    with pytest.raises(vc.CommArgumentError, match="was given tensors on cpu, meta"):
        bucket.pack([torch.ones(2), torch.ones(3, device="meta")])
    with pytest.raises(vc.CommArgumentError, match=r"has buffers of \[7\] elements, not of \[4\]"):
        bucket.unpack([torch.ones(4)])
    with pytest.raises(vc.CommArgumentError, match=r"given is torch\.float64 of 7 elements"):
        bucket.unpack([torch.ones(7, dtype=torch.float64)])
    with pytest.raises(vc.CommArgumentError, match="1 shapes, but 0 dtypes"):
        vc.Bucket.plan([(2,)], [])
    with pytest.raises(vc.CommArgumentError, match="cap_bytes is 0"):
        vc.Bucket.plan([(2,)], [torch.float32], cap_bytes=0)
    with pytest.raises(vc.CommArgumentError, match="align_bytes is -1"):
        vc.Bucket.plan([(2,)], [torch.float32], align_bytes=-1)


def reduce_many(rank, world_size, cap_bytes):
    tensors = [torch.full((n,), float(rank + n)) for n in range(6)]
    tensors.insert(3, torch.full((2, 2), rank, dtype=torch.int64))
    with vc.trace() as t:
        results = vc.all_reduce_bucketed(tensors, cap_bytes=cap_bytes)
    assert tensors[1].tolist() == [rank + 1.0]
    later = vc.all_reduce_bucketed(tensors, cap_bytes=cap_bytes, async_op=True)
    assert "under way" in repr(later)
    assert all(map(torch.equal, later.wait(), results))
    return results, t


@pytest.mark.parametrize(("cap_bytes", "collectives"), [(1 << 20, 2), (28, 5), (1, 7)])
def test_one_collective_for_each_buffer(cap_bytes, collectives):
    for results, t in run(reduce_many, 2, cap_bytes):
        assert t.counts() == {"all_reduce": collectives}
        if cap_bytes > 28:  # tensors of 0, 1, 2, 3, 4 and 5 elements, at multiples of four
            assert t.bytes() == (4 + 4 + 4 + 4 + 5) * 4 + 4 * 8
        floats = results[:3] + results[4:]
        assert [x.tolist() for x in floats] == [[2.0 * n + 1] * n for n in range(6)]
        assert results[3].tolist() == [[1, 1], [1, 1]]


def random_tensors(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(n, n + 1, generator=generator) for n in (3, 0, 1, 40)]


def ordered(rank, world_size, how):
    tensors = random_tensors(rank)
    found = vc.all_reduce_bucketed(tensors, **how)
    everyone = [random_tensors(member) for member in range(world_size)]
    emulated = vc.Emulator(world_size).all_reduce_bucketed(everyone, **how)[rank]
    return found, emulated, [vc.all_reduce(x, **how) for x in tensors]


HOW = [
    {"order": "rank"},
    {"order": "tree", "op": "avg"},
    {"wire": "bf16", "order": "rank"},
    {"wire": "int8"},
]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_ordered_and_compressed_it_has_the_bits_of_one_by_one(how):
    for found, emulated, one_by_one in run(ordered, 3, how):
        assert all(map(torch.equal, found, emulated))
        if how.get("wire") != "int8":  # of which the blocks are of the buffer, not of the tensor
            assert all(map(torch.equal, found, one_by_one))


def counted(rank, world_size):
    tensors = [torch.full((n, 3), float(rank), requires_grad=n == 2) for n in range(4)]
    bucket = vc.Bucket.plan([x.shape for x in tensors], [x.dtype for x in tensors], align_bytes=1)
    with torch.no_grad(), Seen() as packed:
        flats = bucket.pack(tensors)
    with Seen() as viewed:
        bucket.unpack(flats)
    with Seen() as reduced:
        for flat in flats:
            vc.all_reduce_(flat)
    with torch.no_grad(), Seen() as together:
        vc.all_reduce_bucketed(tensors)
    with Seen() as with_gradient:
        vc.all_reduce_bucketed(tensors)
    seen = packed, viewed, reduced, together, with_gradient
    return [each.names for each in seen]


def test_nothing_is_copied_that_the_plan_does_not_name():
    for packed, viewed, reduced, together, with_gradient in run_processes(counted, 2):
        assert packed == ["cat"]
        assert viewed == []
        # Of two members: what arrives has its own memory, and the sum is written where it belongs.
        exchanged = ["empty_like", "alltoall_base", "add"]
        assert reduced == exchanged
        # Aligned, with zeros in two gaps.
        assert together == ["new_zeros", "new_zeros", "cat", *exchanged]
        assert with_gradient == together
