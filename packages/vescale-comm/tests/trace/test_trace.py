"""A trace sees every collective, with the bytes of the stated formulas, in backward as well."""

import threading

import pytest
import torch
import vescale_comm as vc
from torch import ones
from vescale_comm.testing import device_mesh, on_ranks, run

# Of three ranks: a call, and the bytes that each of them sends by the formulas of `trace`.
CALLS = {
    "all_reduce": (lambda r: vc.all_reduce(ones(6)), [2 * 24 * 2 // 3] * 3),
    "all_reduce int16": (  # as int32
        lambda r: vc.all_reduce(ones(6, dtype=torch.int16)),
        [2 * 24 * 2 // 3] * 3,
    ),
    "all_reduce float8": (  # as fp32
        lambda r: vc.all_reduce(ones(6).to(torch.float8_e5m2)),
        [2 * 24 * 2 // 3] * 3,
    ),
    "all_reduce complex": (lambda r: vc.all_reduce(ones(6).cfloat()), [2 * 48 * 2 // 3] * 3),
    "all_reduce complex prod": (  # gathered and folded
        lambda r: vc.all_reduce(ones(6).cfloat(), op="prod"),
        [2 * 48] * 3,
    ),
    "all_gather": (lambda r: vc.all_gather(ones(2, 3), dim=1), [2 * 24] * 3),
    "all_gather uneven": (lambda r: vc.all_gather(ones(r, 2), sizes=[0, 1, 2]), [0, 2 * 8, 2 * 16]),
    "all_gather int16": (lambda r: vc.all_gather(ones(2, dtype=torch.int16)), [2 * 4] * 3),
    "reduce_scatter": (lambda r: vc.reduce_scatter(ones(6)), [16] * 3),
    "reduce_scatter uneven": (lambda r: vc.reduce_scatter(ones(6), sizes=[1, 2, 3]), [20, 16, 12]),
    "reduce_scatter fold": (lambda r: vc.reduce_scatter(ones(6).cfloat(), op="prod"), [32] * 3),
    "all_to_all": (
        lambda r: vc.all_to_all(
            [ones(r + to) for to in range(3)], shapes=[(r + to,) for to in range(3)]
        ),
        [4 * 3, 4 * 4, 4 * 5],
    ),
    "all_to_all float8": (
        lambda r: vc.all_to_all([ones(2).to(torch.float8_e5m2)] * 3, shapes=[(2,)] * 3),
        [4] * 3,
    ),
    "gather_pieces": (
        lambda r: vc.gather_pieces(ones(r), shapes=[(0,), (1,), (2,)]),
        [0, 2 * 4, 2 * 8],
    ),
    "broadcast": (lambda r: vc.broadcast(ones(5), source=1), [0, 2 * 20, 0]),
    "barrier": (lambda r: vc.barrier(), [0] * 3),
}


@on_ranks(3)
def test_bytes_follow_the_stated_formula(rank, world_size):
    for name, (call, expected) in CALLS.items():
        with vc.trace() as t:
            call(rank)
        (record,) = t.records
        assert record.op == {"gather_pieces": "all_gather"}.get(name, name.split()[0])
        assert (record.ranks, record.axes) == ((0, 1, 2), ())
        assert t.bytes() == expected[rank], name


def nested(rank, world_size):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    x = ones(4, 2, requires_grad=True)
    vc.all_reduce(x, vc.group_of(mesh, "dp"))
    with vc.trace() as outer:
        y = vc.all_gather(x, vc.group_of(mesh, "tp"), dim=1)
        with vc.trace() as inner:
            vc.all_reduce(y, vc.group_of(mesh, ("dp", "tp"))).sum().backward()
        vc.barrier()
    vc.all_reduce(x, vc.group_of(mesh, "dp"))
    return outer, inner


def test_traces_nest_and_record_groups_shapes_and_dtypes():
    for rank, (outer, inner) in enumerate(run(nested, 4)):
        assert outer.counts() == {
            "all_gather": 1,
            "all_reduce": 2,
            "reduce_scatter": 1,
            "barrier": 1,
        }
        assert inner.counts() == {"all_reduce": 2, "reduce_scatter": 1}
        assert outer.records[1:4] == inner.records
        gathered = outer.records[0]
        assert (gathered.group, gathered.axes) == ("tp", ("tp",))
        assert gathered.ranks == ((0, 1), (2, 3))[rank // 2]
        assert (gathered.shape, gathered.dtype) == ((4, 2), torch.float32)
        assert (inner.records[0].group, inner.records[0].axes) == ("dp*tp", ("dp", "tp"))
        assert outer.bytes() == sum(record.bytes for record in outer.records)


def from_another_thread(rank, world_size):
    x = ones(2, requires_grad=True)
    y = vc.all_reduce(x).sum()
    with vc.trace() as t:
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    return t.counts()


def test_backward_in_another_thread_is_seen():
    assert run(from_another_thread, 2) == [{"all_reduce": 1}] * 2


def interrupted(rank, world_size):
    traces = []
    try:
        with vc.trace() as t:
            traces.append(t)
            raise KeyError
    except KeyError:
        vc.all_reduce(ones(1))
    return traces[0].records


def test_a_trace_ends_with_its_body():
    assert run(interrupted, 2) == [[], []]


ALONE = {
    "all_reduce": lambda x, g: vc.all_reduce(x, g),
    "all_reduce rank": lambda x, g: vc.all_reduce(x, g, order="rank"),
    "all_reduce wire": lambda x, g: vc.all_reduce(x, g, wire="bf16"),
    "reduce_scatter": lambda x, g: vc.reduce_scatter(x, g),
    "reduce_scatter sizes": lambda x, g: vc.reduce_scatter(x, g, sizes=[3]),
    "reduce_scatter wire": lambda x, g: vc.reduce_scatter(x, g, wire="int8"),
    "all_gather": lambda x, g: vc.all_gather(x, g),
    "all_gather sizes": lambda x, g: vc.all_gather(x, g, sizes=[3], dim=0),
    "gather_pieces": lambda x, g: vc.gather_pieces(x, g, shapes=[(3, 2)])[0],
    "all_to_all": lambda x, g: vc.all_to_all([x], g, shapes=[(3, 2)])[0],
    "all_to_all_single": lambda x, g: vc.all_to_all_single(
        x.view(-1), g, sizes=vc.SplitSizes([6], [6])
    ).view(3, 2),
    "broadcast": lambda x, g: vc.broadcast(x, g),
    "scatter": lambda x, g: vc.scatter(x, g, source=0),
    "permute": lambda x, g: vc.permute(x, g, pairs=[(0, 0)]),
    "permute later": lambda x, g: vc.permute(x, g, pairs=[(0, 0)], async_op=True).wait(),
    "permute to nobody": lambda x, g: vc.permute(x, g, pairs=[]),
    "permute shape": lambda x, g: vc.permute(x, g, pairs=[(0, 0)], shape=(2, 3)).view(3, 2),
    "hierarchical": lambda x, g: vc.all_reduce_hierarchical(x, g, g),
    "bucketed": lambda x, g: vc.all_reduce_bucketed([x], g)[0],
    "all_reduce_": lambda x, g: vc.all_reduce_(x.detach().clone(), g),
    "broadcast_": lambda x, g: vc.broadcast_(x.detach().clone(), g),
    "all_gather_into_tensor": lambda x, g: vc.all_gather_into_tensor(
        torch.empty(3, 2), x.detach(), g
    ),
    "reduce_scatter_tensor": lambda x, g: vc.reduce_scatter_tensor(
        torch.empty(3, 2), x.detach(), g
    ),
    "barrier": lambda x, g: [vc.barrier(g), 1 * x][1],
}


def alone(rank, world_size, name):
    group = vc.group_of(device_mesh((world_size, 1), ("dp", "tp")), "tp")
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    expected = torch.zeros(3, 2) if name == "permute to nobody" else x.detach()
    with vc.trace() as t:
        found = ALONE[name](x, group)
        assert found is not x
        if found.requires_grad:
            (2 * found).sum().backward()
            times = 0.0 if name == "permute to nobody" else 2.0
            assert torch.equal(x.grad, torch.full((3, 2), times))
    if name not in ("all_reduce wire", "reduce_scatter wire"):
        assert torch.equal(found, expected)
    return t.records


@pytest.mark.parametrize("name", ALONE)
def test_nothing_is_recorded_of_a_group_of_one(name):
    assert vc.simulate(2)(alone, name) == [[], []]
