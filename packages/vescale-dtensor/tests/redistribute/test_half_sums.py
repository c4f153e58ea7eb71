"""Half-precision terms are added over ranks in float32: what is finite on one device is so here.

Terms near 65504, the largest float16, whose signs cancel: in halves they overflow on the way. They
are multiples of 64 (bfloat16: of 256), so that sums in float32 are exact, and results are bitwise.
Sums of what ragged shards hold have the same bits on any number of ranks, if somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
import vescale_dtensor as vd
from on_mesh import on_mesh
from torch import Tensor
from vescale_comm import simulate, trace
from vescale_comm.testing import device_mesh, on_ranks
from vescale_comm.testing import run as run_processes
from vescale_dtensor import (
    DeviceMesh,
    InterleavedShard,
    MeshError,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
)
from vescale_dtensor._redistribute import half_sums as module
from vescale_dtensor.storage import sum_whole

HALVES = [torch.float16, torch.bfloat16]
R, S0, S1, P, A = Replicate(), Shard(0), Shard(1), Partial(), Partial("avg")
# More than what travels as float32: a term for each of eight ranks has 1,024 elements and more.
MANY, FEW = (37, 280), (5, 6)


def terms_of(shape, count, dtype, seed):
    """A term for each of `count` ranks: each near the largest, their sum a small number."""
    generator = torch.Generator().manual_seed(seed)
    step = 64 if dtype is torch.float16 else 256
    large = 60032 // step - torch.randint(0, 40, (count, *shape), generator=generator)
    large[::2] *= -1
    if count % 2:  # what is left over of an odd number is small
        large[-1] //= 64
    order = torch.rand(count, *shape, generator=generator).argsort(0)
    terms = (large.gather(0, order) * step).to(dtype)
    assert torch.equal(terms.double(), (large.gather(0, order) * step).double())
    return terms


def distributed(terms, mesh, placements, shape):
    """The tensor of which this rank holds its term."""
    local = terms[mesh.get_rank()].clone()
    return vd.DTensor.from_local(local, mesh, placements, shape=shape, stride=local.stride())


def reduced(terms, ops, sizes):
    """What the terms of all ranks are together, in float32 and rounded once."""
    value = terms.float().view(*sizes, *terms.shape[1:])
    for op in reversed(ops):
        axis = len(ops) - 1
        value = value.sum(axis) if op == "sum" else value.mean(axis)
        ops = ops[:-1]
    return value.to(terms.dtype)


def same(found, expected):
    assert expected.isfinite().all()
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return True


TARGETS = [
    ((4,), ("sum",), (R,)),
    ((4,), ("avg",), (R,)),
    ((4,), ("sum",), (S0,)),
    ((4,), ("avg",), (S1,)),
    ((3,), ("sum",), (S0,)),
    ((3,), ("sum",), (InterleavedShard(1, 2),)),
    ((4,), ("sum",), (RaggedShard((0, 1), (0, 2, 1, 1)),)),
    ((2, 2), ("sum", "sum"), (R, R)),
    ((2, 2), ("sum", "sum"), (S0, R)),
    ((2, 2), ("sum", "sum"), (R, S1)),
    ((2, 2), ("sum", "sum"), (S0, S1)),
    ((2, 2), ("sum", "avg"), (R, R)),
    ((2, 2), ("avg", "sum"), (S1, R)),
    ((2, 2), ("avg", "sum"), (R, S0)),
]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [MANY, FEW, (1, 3), (0, 4)])
@pytest.mark.parametrize(("sizes", "ops", "target"), TARGETS)
def test_a_partial_sum_that_cancels_is_finite_in_every_layout(sizes, ops, target, shape, dtype):
    if isinstance(target[0], RaggedShard | InterleavedShard):  # their parts divide what is cut
        shape = (4 * shape[0], 2 * shape[1])
    terms = terms_of(shape, prod(sizes), dtype, sum(sizes))
    expected = reduced(terms, ops, sizes)

    def program(mesh):
        x = distributed(terms, mesh, [Partial(op) for op in ops], shape)
        return x.redistribute(placements=target).full_tensor()

    assert all(
        same(found, expected) for found in on_mesh(sizes, program, ("dp", "tp")[: len(sizes)])
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [MANY, ()])
def test_real_processes_give_the_same(dtype, shape):
    found = run_processes(_in_processes, 4, dtype, shape)
    expected = reduced(terms_of(shape, 4, dtype, 1), ("sum",), (4,))
    assert all(same(each, expected) for each in found)


def _in_processes(rank, world, dtype, shape):
    mesh = device_mesh((4,), ("dp",))
    return distributed(terms_of(shape, 4, dtype, 1), mesh, [P], shape).full_tensor()


@pytest.mark.parametrize("seed", range(6))
def test_products_keep_what_one_float32_holds(seed):
    generator = torch.Generator().manual_seed(seed)
    factors = torch.tensor([256.0, 512.0, 2.0**-9, 2.0**-8])
    terms = torch.stack([factors[torch.randperm(4, generator=generator)] for _ in range(3)], 1)
    terms = terms.to(torch.float16)

    def program(mesh):
        return distributed(terms, mesh, [Partial("prod")], (3,)).full_tensor()

    expected = terms.float().prod(0).half()
    assert all(same(found, expected) for found in on_mesh((4,), program, ("dp",)))


@pytest.mark.parametrize("op", ["max", "min"])
def test_maxima_travel_in_32_bits_at_once(op):
    terms = terms_of(MANY, 4, torch.float16, 0)

    def program(mesh):
        with trace() as seen:
            found = distributed(terms, mesh, [Partial(op)], MANY).full_tensor()
        return found, [record.op for record in seen.records], seen.bytes()

    expected = getattr(terms, f"a{op}")(0)
    for found, calls, sent in on_mesh((4,), program, ("dp",)):
        assert same(found, expected)
        assert calls == ["all_reduce"]
        assert sent == 2 * prod(MANY) * 4 * 3 // 4


@pytest.mark.parametrize("shape", [(64, 256), (64, 4)])
@pytest.mark.parametrize("target", [R, S0])
def test_many_elements_cost_no_byte_more_and_few_one_collective(shape, target):
    terms = terms_of(shape, 4, torch.bfloat16, 0)

    def program(mesh):
        found = []
        for how in ("float32", "native"):
            with vd.half_sums(how), trace() as seen:
                distributed(terms, mesh, [P], shape).redistribute(placements=[target])
            found.append((seen.bytes(), len(seen.records)))
        return found

    for (ours, calls), (native, once) in on_mesh((4,), program, ("dp",)):
        assert once == 1
        many = prod(shape) >= 4 * module._FEW
        assert ours == (native if many or target == S0 else 2 * native)
        # Many are exchanged and folded; then what a shard would stop at is gathered.
        assert calls == (2 if many and target == R else 1)


def test_the_gradient_of_a_gather_is_finite():
    # The gradient of what was gathered: a term g_i w_i' of 60,032 in size on every rank.
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0])
    weight = (signs * 60032).half().expand(6, 4).contiguous()

    def program(mesh):
        x = vd.distribute_tensor(torch.ones(8, 6).half(), mesh, [S0]).requires_grad_()
        w = vd.distribute_tensor(weight, mesh, [S1])
        y = x.redistribute(placements=[R]) @ w
        y.backward(torch.ones(8, 4).half())
        return x.grad.full_tensor()

    expected = torch.ones(8, 4).half() @ weight.T
    assert all(same(found, expected) for found in on_mesh((4,), program, ("tp",)))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("features", [3, 2000])
def test_gradients_of_replicated_parameters_are_finite(dtype, features):
    rows = terms_of((features,), 4, dtype, 3)

    def program(mesh):
        w = torch.nn.Parameter(vd.ones(features, dtype=dtype, device_mesh=mesh))
        x = vd.distribute_tensor(rows, mesh, [S0])
        (x * w).backward(torch.ones(4, features, dtype=dtype))
        return w.grad.full_tensor(), torch.nn.utils.get_total_norm([w.grad]).full_tensor()

    w = torch.ones(features, dtype=dtype, requires_grad=True)
    (rows * w).backward(torch.ones_like(rows))
    norm = torch.nn.utils.get_total_norm([w.grad])
    for found, found_norm in on_mesh((4,), program, ("dp",)):
        same(found, reduced(rows, ("sum",), (4,)))
        torch.testing.assert_close(found, w.grad)
        torch.testing.assert_close(found_norm, norm, equal_nan=True)


SCALARS = {
    "mean": lambda x: x.mean(),
    "mean of columns": lambda x: x.mean(0),
    "norm": lambda x: torch.linalg.vector_norm(x / 64),
    "cumsum": lambda x: x.cumsum(0),
    "std": lambda x: (x / 64).std(),
    "mse": lambda x: torch.nn.functional.mse_loss(x / 256, torch.zeros_like(x)),
}


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.parametrize("rows", [8, 7])
def test_what_torch_accumulates_in_float32_does_not_overflow_on_a_rank(name, rows):
    # Four rows of one sign, then four of the other: the pieces' own sums are far above 65504.
    x = torch.full((rows, 3), 50048.0)
    x[4:] *= -1
    x = x.half()
    expected = SCALARS[name](x)

    def program(mesh):
        return SCALARS[name](vd.distribute_tensor(x, mesh, [S0])).full_tensor()

    for found in on_mesh((2,), program, ("dp",)):
        assert torch.equal(found.isfinite(), expected.isfinite())
        # Each rank's term is rounded before; of a mean of such numbers, by 16 at most.
        near = 32 if "mean" in name else 0
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=near)


def test_products_of_pieces_do_not_overflow_on_a_rank():
    x = torch.tensor([2.0**-9, 2.0**-8, 512.0, 256.0]).half()

    def program(mesh):
        whole = vd.distribute_tensor(x, mesh, [S0])
        return whole.prod().full_tensor(), whole.cumprod(0).full_tensor()

    for product, products in on_mesh((2,), program, ("dp",)):
        same(product, x.prod())
        same(products, x.cumprod(0))


def test_the_gradient_of_totals_of_pieces_is_finite():
    # Of a cumulated sum, it is a sum over ranks of what each hands back for the pieces before.
    x, out = torch.zeros(8, 2).half(), torch.full((8, 2), 30016.0)
    out[4:] *= -1
    out[6] = 0
    out = out.half()

    def program(mesh):
        whole = vd.distribute_tensor(x, mesh, [S0]).requires_grad_()
        whole.cumsum(0).backward(vd.distribute_tensor(out, mesh, [S0]))
        return whole.grad.full_tensor()

    one = x.clone().requires_grad_()
    one.cumsum(0).backward(out)
    for found in on_mesh((4,), program, ("dp",)):
        assert torch.equal(found.isfinite(), one.grad.isfinite())
        torch.testing.assert_close(found, one.grad)


@pytest.mark.parametrize("seed", range(12))
def test_random_terms_are_rounded_once(seed):
    generator = torch.Generator().manual_seed(seed)
    dtype, count = HALVES[seed % 2], 2 + seed % 7
    shape = (3 + seed, 400)
    terms = (torch.randn(count, *shape, generator=generator) * 3e4).clamp(-65504, 65504).to(dtype)
    op = ("sum", "avg")[seed // 2 % 2]
    exact = terms.double().sum(0) if op == "sum" else terms.double().mean(0)

    def program(mesh):
        return distributed(terms, mesh, [Partial(op)], shape).full_tensor()

    for found in on_mesh((count,), program, ("dp",)):
        # Float32 is off by less than what decides a rounding, but for ties: one unit there.
        expected = exact.to(dtype)
        assert torch.equal(found.isinf(), expected.isinf())
        assert (found == expected).float().mean() > 0.999
        torch.testing.assert_close(found, expected)


def test_native_sums_are_the_backends():
    terms = terms_of(FEW, 4, torch.float16, 5)
    expected = terms[0] + terms[1] + terms[2] + terms[3]
    assert not expected.isfinite().all()

    def program(mesh):
        x = distributed(terms, mesh, [P], FEW)
        with vd.half_sums("native"):
            native = x.redistribute(placements=[R]).to_local()
            with vd.half_sums("float32"):
                inner = distributed(terms, mesh, [P], FEW).full_tensor()
        return native, inner, distributed(terms, mesh, [P], FEW).full_tensor()

    for native, inner, after in on_mesh((4,), program, ("dp",)):
        torch.testing.assert_close(native, expected, rtol=0, atol=0, equal_nan=True)
        same(inner, reduced(terms, ("sum",), (4,)))
        same(after, inner)


def test_an_unknown_way_is_refused():
    with pytest.raises(vd.DTensorError, match="'float32' and 'native'"), vd.half_sums("float64"):
        pass


def test_a_program_is_recorded_for_each_way_and_replays_as_it_was_recorded():
    expected = reduced(terms_of(MANY, 4, torch.float16, 7), ("sum",), (4,))
    for (wide, native, again, also), programs in run_processes(_captured, 4):
        assert programs == 2
        same(wide, expected)
        same(again, expected)
        assert not native.isfinite().all()
        assert torch.equal(native.isfinite(), also.isfinite())


def _captured(rank, world):
    mesh = device_mesh((4,), ("dp",))
    captured = vd.capture(lambda x: x.redistribute(placements=[R]) * 1)
    found = []
    for how in ("float32", "native", "float32", "native"):
        with vd.half_sums(how):
            x = distributed(terms_of(MANY, 4, torch.float16, 7), mesh, [P], MANY)
            found.append(captured(x).to_local())
    return found, len(captured.programs)


def test_a_term_that_overflows_by_itself_stays_so_on_every_rank():
    # The limit that docs/limits.md states: a rank's own sum of rows, or product, is a half.
    x = torch.tensor([60000.0, 60000.0, -60000.0, -60000.0]).half()
    ones = torch.ones(4, 1).half()
    assert float(x.sum()) == float(x @ ones) == 0

    def program(mesh):
        whole, weight = (vd.distribute_tensor(t, mesh, [S0]) for t in (x, ones))
        return whole.view(4, 1).sum(0).full_tensor(), (whole @ weight).full_tensor()

    for total, product in on_mesh((2,), program, ("tp",)):
        assert total.isnan().all()  # inf and -inf
        assert product.isnan().all()


@pytest.mark.parametrize("sizes", [(3,), (2, 2)])
def test_the_total_of_all_halves_is_rounded_once(sizes):
    x = torch.cat([torch.ones(1003), -torch.ones(1001)]).bfloat16()
    sharded = {"shard": S0, "ragged": RaggedShard((0,), (1,) * (sizes[0] - 1) + (2,))}
    kept = x[: 2004 - 2004 % (sizes[0] + 1)]
    for function in (torch.sum, torch.mean):

        def program(mesh, function=function):
            found = []
            for placement in sharded.values():
                layout = [placement, *[S0 if placement is S0 else R] * (len(sizes) - 1)]
                whole = vd.distribute_tensor(kept, mesh, layout).requires_grad_()
                total = function(whole)
                total.backward()
                found.append((total.full_tensor(), whole.grad.full_tensor()))
            spread = vd.distribute_tensor(kept, mesh, [S0] * len(sizes))
            spread = spread.redistribute(placements=[P] * len(sizes))
            return found, function(spread).full_tensor()

        one = kept.clone().requires_grad_()
        expected = function(one)
        expected.backward()
        for found, of_partial in on_mesh(sizes, program, ("dp", "tp")[: len(sizes)]):
            assert torch.equal(of_partial, expected)
            for total, gradient in found:
                assert torch.equal(total, expected)
                assert torch.equal(gradient, one.grad)


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": torch.linalg.vector_norm,
    "foreach": lambda x: torch._foreach_norm([x])[0],
    "one norm": lambda x: x.norm(1),
    "sum": torch.sum,
    "rows": lambda x: x.mean(1),
    "std": torch.std,
    "product": lambda x: x.flatten() @ x.flatten(),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
}


@pytest.mark.parametrize("kind", SUMS)
def test_the_bits_of_one_device(kind: str):
    torch.manual_seed(0)
    whole = torch.randn(24, 35)

    def on_a_rank(rank: int, count: int) -> None:
        mesh = device_mesh((count,), ("dp",))
        units = [1, 4, 2, 5][:count] if count > 1 else [1]
        units[-1] += 12 - sum(units)
        stored = vd.distribute_tensor(whole, mesh, [RaggedShard((0, 1), units)], src_data_rank=None)
        SUMS[kind](stored)  # a plan that is known already
        sum_whole(mesh, ["dp"])
        assert torch.equal(SUMS[kind](stored).full_tensor(), SUMS[kind](whole))

    for count in (1, 2, 3, 4):
        simulate(count)(on_a_rank)


@on_ranks(2, simulated=True)
def test_what_else_is_as_it_was():
    mesh, other = (DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)) for _ in range(2))
    sum_whole(mesh, ["dp"])
    stored, elsewhere = (
        vd.distribute_tensor(torch.ones(4, 2), one, [RaggedShard((0, 1), (1, 1))])
        for one in (mesh, other)
    )
    activation = vd.distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    for run, ops in (
        (lambda: stored.norm().full_tensor(), {"all_gather"}),
        (lambda: stored.mean(0).full_tensor(), {"all_gather"}),
        (lambda: elsewhere.norm().full_tensor(), {"all_reduce"}),
        (lambda: activation.norm().full_tensor(), {"all_reduce"}),
        (lambda: stored.mul_(2).add(1), set()),
    ):
        with trace() as seen:
            run()
        assert {one.op for one in seen.records} == ops
    with pytest.raises(MeshError, match="no axis 'tp'"):
        sum_whole(mesh, ["tp"])


NARROWING = {
    "bfloat16": lambda total: total.bfloat16(),
    "to": lambda total: total.to(torch.bfloat16),
    "type_as": lambda total: total.type_as(torch.ones((), dtype=torch.bfloat16)),
    "copy_": lambda total: torch.empty_like(total, dtype=torch.bfloat16).copy_(total),
}


@pytest.mark.parametrize("name", NARROWING)
def test_a_cast_to_halves_rounds_the_sum(name):
    x = torch.cat([torch.ones(1003), -torch.ones(1001)]).view(2004, 1)

    def program(mesh):
        total = vd.distribute_tensor(x, mesh, [S0]).requires_grad_().sum(0)
        found = NARROWING[name](total)
        wide = total.bfloat16().double()  # a wider dtype holds every part, which may wait
        return found.full_tensor(), total.double().placements, wide.full_tensor()

    for found, placements, wide in on_mesh((2,), program, ("dp",)):
        assert found.dtype is torch.bfloat16
        assert found.item() == wide.item() == 2.0
        assert placements == (P,)
