"""A hierarchical all-reduce is the all-reduce, with the stated bytes on each of the two axes."""

import itertools

import pytest
import torch
import vescale_comm as vc
from vescale_comm.testing import device_mesh, on_ranks
from vescale_comm_worlds import outcomes, run


def inputs(shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(6)]


def reduced_by(mesh, rank, shape, op):
    inside, across = vc.group_of(mesh, "in"), vc.group_of(mesh, "out")
    x = inputs(shape)[rank].requires_grad_(op != "max")
    y = inputs(shape)[rank].requires_grad_(op != "max")
    found = vc.all_reduce_hierarchical(x, inside, across, op=op)
    expected = vc.all_reduce(y, vc.group_of(mesh, ("out", "in")), op=op)
    torch.testing.assert_close(found, expected)
    if op in ("sum", "avg"):
        (found * found).sum().backward()
        (expected * expected).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    later = vc.all_reduce_hierarchical(x.detach(), inside, across, op=op, async_op=True).wait()
    torch.testing.assert_close(later, expected)


@pytest.mark.parametrize("mesh_shape", [(2, 3), (3, 2), (1, 6), (6, 1)])
@on_ranks(6)
def test_it_is_the_all_reduce(rank, world_size, mesh_shape):
    mesh = device_mesh(mesh_shape, ("out", "in"))
    for shape in [(), (0,), (5,), (4, 9)]:
        for op in ("sum", "avg", "max"):
            reduced_by(mesh, rank, shape, op)


def ordered(rank, world_size, order):
    mesh = device_mesh((2, 3), ("out", "in"))
    xs = inputs((700,), torch.float32)
    found = vc.all_reduce_hierarchical(
        xs[rank], vc.group_of(mesh, "in"), vc.group_of(mesh, "out"), order=order
    )
    rows = [vc.Emulator(3).all_reduce(xs[3 * i : 3 * i + 3], order=order)[0] for i in range(2)]
    assert torch.equal(found, vc.Emulator(2).all_reduce(rows, order=order)[0])
    return found


@pytest.mark.parametrize("order", ["rank", "tree"])
def test_ordered_it_is_the_fold_inside_and_then_across(order):
    first, *others = run(ordered, 6, order)
    assert all(torch.equal(first, other) for other in others)


CASES = [
    *itertools.product((torch.float32, torch.bfloat16), ("sum", "avg", "max"), ("rank", "tree")),
    # What torch cannot divide by itself.
    *itertools.product((torch.float8_e4m3fn, torch.complex32), ("sum", "avg"), ("rank", "tree")),
]


def emulated(rank, world_size, cases):
    mesh = device_mesh((2, 3), ("out", "in"))
    for dtype, op, order in cases:
        xs = [x.to(dtype) for x in inputs((70,), torch.float32)]
        how = {"op": op, "order": order}
        found = vc.all_reduce_hierarchical(
            xs[rank], vc.group_of(mesh, "in"), vc.group_of(mesh, "out"), **how
        )
        expected = vc.Emulator(6).all_reduce_hierarchical(xs, inner=3, **how)[rank]
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), (dtype, how)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_the_emulator_has_its_bits():
    run(emulated, 6, CASES)


def test_the_emulator_refuses_groups_that_do_not_divide():
    with pytest.raises(vc.CommArgumentError, match="groups of 4 do not divide 6 members"):
        vc.Emulator(6).all_reduce_hierarchical(inputs((2,)), inner=4)


def counted(rank, world_size, numel):
    mesh = device_mesh((2, 3), ("out", "in"))
    with vc.trace() as t:
        vc.all_reduce_hierarchical(
            torch.ones(numel), vc.group_of(mesh, "in"), vc.group_of(mesh, "out")
        )
    return t.bytes_by_axis()


def test_bytes_on_each_axis_are_exact():
    # 12 floats: 48 bytes. Inside 2 * 48 * 2 / 3, across 2 * 16 * 1 / 2.
    assert run(counted, 6, 12) == [{"in": 64, "out": 16}] * 6
    # 4 floats in parts of 2, 1, 1: sent inside are those of the others, then twice the own.
    first, other = {"in": 24, "out": 8}, {"in": 20, "out": 4}
    assert run(counted, 6, 4) == [first, other, other] * 2


def overlapping(rank, world_size):
    mesh = device_mesh((2, 2), ("out", "in"))
    vc.all_reduce_hierarchical(
        torch.ones(3), vc.group_of(mesh, "in"), vc.group_of(mesh, ("out", "in"))
    )


def test_groups_that_are_not_two_axes_are_refused():
    for outcome in outcomes(overlapping, 4):
        assert outcome.type_name == "CommArgumentError"
        assert "share ranks" in outcome.message


AVERAGED = [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
            torch.complex32, torch.complex128, torch.int32]  # fmt: skip


PRECISION = {torch.float8_e4m3fn: 0.0625, torch.float8_e5m2: 0.125, torch.float64: 1e-15,
             torch.complex128: 1e-15}  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@on_ranks(4, simulated=True)
def test_averages_of_every_dtype_by_every_collective(rank, world_size):
    mesh = device_mesh((2, 2), ("out", "in"))
    inside, across = vc.group_of(mesh, "in"), vc.group_of(mesh, "out")
    for dtype in AVERAGED:
        x = inputs((8,))[rank].to(dtype)
        calls = {
            "all_reduce": lambda x: vc.all_reduce(x, op="avg"),
            "in place": lambda x: vc.all_reduce_(x.clone(), op="avg"),
            "hierarchical": lambda x: vc.all_reduce_hierarchical(x, inside, across, op="avg"),
            "scattered": lambda x: vc.all_gather(vc.reduce_scatter(x, op="avg")),
        }
        if not (dtype.is_floating_point or dtype.is_complex):
            for call in calls.values():
                with pytest.raises(vc.CommArgumentError, match="an average of integers"):
                    call(x)
            continue
        exact = torch.stack([one.to(dtype).to(torch.complex128) for one in inputs((8,))[:4]])
        for name, call in calls.items():
            found = call(x)
            assert found.dtype is dtype, name
            error = (found.to(torch.complex128) - exact.mean(0)).abs().max()
            # What travels in half precision is rounded on its way.
            assert error <= 4 * PRECISION.get(dtype, 1e-2), (name, dtype)
        leaf = x.clone().requires_grad_()
        part = vc.reduce_scatter(leaf, op="avg")
        part.backward(torch.ones_like(part))
        assert leaf.grad.dtype is dtype
        assert leaf.grad.to(torch.complex128).eq(0.25).all()
