"""What a bucket holds is on its way while other tensors are made or used, in one order everywhere.

Seen by what has been started at each moment; with the results of collectives of whole tensors, and
no copy of what is written where it travels.
"""

import random

import pytest
import torch
import vescale_comm as vc
from torch import nn
from vescale_comm.testing import run as run_processes
from vescale_comm_seen import Seen
from vescale_comm_worlds import run

SHAPES = [(3, 2), (5,), (), (0, 4), (7,), (2, 2)]
CAP = 40  # bytes: several buffers


def tensors_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def plan(align=16):
    return vc.Bucket.plan(SHAPES, [torch.float32] * len(SHAPES), cap_bytes=CAP, align_bytes=align)


def reduced(rank, world_size, how):
    bucket, tensors, rng = plan(), tensors_of(rank), random.Random(rank)
    reducer = vc.Reducer(bucket, **how)
    started = []
    for _ in range(2):  # buffers are used again
        with vc.trace() as t:
            # Each rank makes its tensors in an order of its own.
            for member in rng.sample(range(len(SHAPES)), len(SHAPES)):
                reducer.put(member, tensors[member])
            started.append([r.shape for r in t.records])
            found = [x.clone() for x in reducer.wait()]
    assert vc.unwaited() == []
    expected = [vc.all_reduce(x, **how) for x in tensors]
    assert all(map(torch.equal, found, expected))
    return started


HOW = [{}, {"op": "avg"}, {"order": "tree"}, {"order": "rank", "op": "avg"}]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_buffers_are_reduced_in_the_order_of_the_plan(how):
    planned = [(buffer.numel,) for buffer in plan().buffers]
    for rounds in run(reduced, 2, how):
        assert rounds == [planned] * 2


def during_backward(rank, world_size):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    module = nn.Sequential(*layers)
    # Made in the reverse of the order in which they are used.
    parameters = [p for layer in reversed(layers) for p in (layer.bias, layer.weight)]
    bucket = vc.Bucket.plan(
        [p.shape for p in parameters], [p.dtype for p in parameters], cap_bytes=300
    )
    reducer = vc.Reducer(bucket, op="avg")
    seen = []
    with vc.trace() as t:
        for index, parameter in enumerate(parameters):

            def ready(p, index=index):
                seen.append(len(t.records))
                reducer.put(index, p.grad)

            parameter.register_post_accumulate_grad_hook(ready)
        module(torch.full((2, 8), rank + 1.0)).square().sum().backward()
        under_way = len(vc.unwaited())
        found = reducer.wait()
    expected = [vc.all_reduce(p.grad, op="avg") for p in parameters]
    assert all(map(torch.equal, found, expected))
    return len(bucket.buffers), seen, under_way


def test_a_backward_goes_on_while_its_first_gradients_are_reduced():
    for buffers, seen, under_way in run(during_backward, 2):
        assert buffers == 4
        assert under_way == 4
        # When the last gradient came, all buffers but its own were on their way.
        assert seen[-1] == 3


def written_in_place(rank, world_size):
    reducer = vc.Reducer(plan())
    for view, x in zip(reducer.views, tensors_of(rank), strict=True):
        view.copy_(x)
    with Seen() as seen:
        for member, view in enumerate(reducer.views):
            reducer.put(member, view)
        found = reducer.wait()
    assert all(map(torch.equal, found, [vc.all_reduce(x) for x in tensors_of(rank)]))
    return set(seen.names)


def test_what_is_written_into_the_views_is_not_copied():
    # Of two members: what arrives is added to what lies there.
    assert run_processes(written_in_place, 2) == [{"empty_like", "alltoall_base", "add"}] * 2


def scattered_and_gathered(rank, world_size):
    bucket, tensors = plan(), tensors_of(rank)
    reducer = vc.Reducer(bucket, scatter=True, order="rank")
    for member, x in enumerate(tensors):
        reducer.put(member, x)
    parts = reducer.wait()
    whole = [vc.all_reduce(x, order="rank") for x in tensors]
    assert all(map(torch.equal, parts, bucket.own_parts(bucket.pack(whole))))
    sizes = [part_of(bucket, 0, member, world_size) for member in range(world_size)]
    first = vc.reduce_scatter(bucket.pack(tensors)[0], order="rank", sizes=sizes)
    assert torch.equal(parts[0], first)
    counts = {}
    for ahead in (0, 1, 2, 9):
        found, counts[ahead] = {}, []
        with vc.trace() as t:
            for views in vc.gather_ahead(bucket, parts, ahead=ahead):
                counts[ahead].append(len(t.records))
                found.update({member: x.clone() for member, x in views.items()})
        assert all(torch.equal(found[m], x) for m, x in enumerate(whole))
    assert vc.unwaited() == []
    return counts


def part_of(bucket, index, member, members):
    each, more = divmod(bucket.buffers[index].numel, members)
    return each + (member < more)


def test_sharded_buffers_come_ahead_of_their_use():
    for counts in run(scattered_and_gathered, 2):
        buffers = len(plan().buffers)
        for ahead, found in counts.items():
            assert found == [min(buffers, index + 1 + ahead) for index in range(buffers)]


def wrong(rank, world_size):
    bucket, tensors = plan(), tensors_of(rank)
    reducer = vc.Reducer(bucket)
    reducer.put(0, tensors[0])
    messages = []
    for call in (
        lambda: reducer.put(0, tensors[0]),
        lambda: reducer.put(99, tensors[0]),
        lambda: reducer.put(1, tensors[0]),
        lambda: vc.Reducer(bucket, op="bxor"),
        lambda: vc.gather_ahead(bucket, []),
        lambda: vc.gather_ahead(bucket, bucket.own_parts(bucket.allocate()), ahead=-1),
    ):
        with pytest.raises(vc.CommArgumentError) as caught:
            call()
        messages.append(str(caught.value))
    with pytest.raises(vc.CommError, match=r"tensors \[1, 2, 3, 4, 5\] of .* were never given"):
        reducer.wait()
    for member in range(1, len(SHAPES)):  # and goes on from there
        reducer.put(member, tensors[member])
    assert torch.equal(reducer.wait()[1], vc.all_reduce(tensors[1]))
    return messages


def test_what_cannot_be_is_named():
    words = [
        "tensor 0 of Bucket(6 tensors",
        "no tensor 99 in Bucket(6 tensors",
        "planned for torch.float32 (5,) as tensor 1, and given torch.float32 (3, 2)",
        "'bxor' is not defined for torch.float32",
        "the parts of Bucket(6 tensors",
        "ahead is -1",
    ]
    for messages in run(wrong, 2):
        assert all(each in message for each, message in zip(words, messages, strict=True))
