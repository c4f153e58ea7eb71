"""A bucket holds each tensor once, in order, within the cap; each buffer is one collective."""

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vescale_comm import Bucket, CommArgumentError, all_reduce_bucketed, trace
from vescale_comm_worlds import run

DTYPES = [torch.float32, torch.bfloat16, torch.int64]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
LISTS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12)


@settings(max_examples=150, deadline=None)
@given(LISTS, st.integers(1, 200))
def test_plan_pack_and_unpack(specs, cap):
    shapes, dtypes = [shape for shape, _ in specs], [dtype for _, dtype in specs]
    bucket = Bucket.plan(shapes, dtypes, cap_bytes=cap)
    members = [member for buffer in bucket.buffers for member in buffer.members]
    assert sorted(members) == list(range(len(specs)))
    for buffer in bucket.buffers:
        assert all(dtypes[member] == buffer.dtype for member in buffer.members)
        assert list(buffer.members) == sorted(buffer.members)
        sizes = [prod(shapes[member]) for member in buffer.members]
        assert buffer.numel == sum(sizes)
        assert buffer.numel * buffer.dtype.itemsize <= cap or len(buffer.members) == 1
    assert all(a.members[0] < b.members[0] for a, b in pairwise(bucket.buffers))

    tensors = [torch.randint(0, 100, shape).to(dtype) for shape, dtype in specs]
    flats = bucket.pack(tensors)
    assert [flat.shape for flat in flats] == [(buffer.numel,) for buffer in bucket.buffers]
    unpacked = bucket.unpack(flats)
    assert all(map(torch.equal, unpacked, tensors))
    buffers = {flat.untyped_storage().data_ptr() for flat in flats}
    assert all(x.untyped_storage().data_ptr() in buffers for x in unpacked)


def test_a_plan_is_a_value_that_prints():
    shapes, dtypes = [(2, 3), (4,), (5,)], [torch.float32, torch.int64, torch.float32]
    bucket = Bucket.plan(shapes, dtypes)
    assert bucket == Bucket.plan(shapes, dtypes)
    assert repr(bucket) == (
        "Bucket(3 tensors in [Buffer(torch.float32[11] of 2 tensors), "
        "Buffer(torch.int64[4] of 1 tensors)])"
    )
    with pytest.raises(AttributeError):
        bucket.shapes = ()


def test_what_was_not_planned_is_refused():
    bucket = Bucket.plan([(2,), (3,)], [torch.float32] * 2)
    with pytest.raises(CommArgumentError, match=r"was given 1 tensors"):
        bucket.pack([torch.ones(2)])
    with pytest.raises(CommArgumentError, match=r"float32 \(3,\) as tensor 1, and given torch.fl"):
        bucket.pack([torch.ones(2), torch.ones(4)])
    with pytest.raises(CommArgumentError, match=r"has buffers of \[5\] elements, not of \[4\]"):
        bucket.unpack([torch.ones(4)])
    with pytest.raises(CommArgumentError, match="1 shapes, but 0 dtypes"):
        Bucket.plan([(2,)], [])
    with pytest.raises(CommArgumentError, match="cap_bytes is 0"):
        Bucket.plan([(2,)], [torch.float32], cap_bytes=0)


def reduce_many(rank, world_size, cap_bytes):
    tensors = [torch.full((n,), float(rank + n)) for n in range(6)]
    tensors.insert(3, torch.full((2, 2), rank, dtype=torch.int64))
    with trace() as t:
        results = all_reduce_bucketed(tensors, cap_bytes=cap_bytes)
    assert tensors[1].tolist() == [rank + 1.0]
    return results, t


@pytest.mark.parametrize(("cap_bytes", "collectives"), [(1 << 20, 2), (28, 4), (1, 7)])
def test_one_collective_for_each_buffer(cap_bytes, collectives):
    for results, t in run(reduce_many, 2, cap_bytes):
        assert t.counts() == {"all_reduce": collectives}
        assert t.bytes() == 15 * 4 + 4 * 8
        floats = results[:3] + results[4:]
        assert [x.tolist() for x in floats] == [[2.0 * n + 1] * n for n in range(6)]
        assert results[3].tolist() == [[1, 1], [1, 1]]
