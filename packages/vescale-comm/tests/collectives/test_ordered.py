"""Ordered and compressed reductions have the bits of the stated fold, and those of the Emulator.

Random floats, of which the sum depends on the order, over 1 to 5 members, uneven and empty pieces,
above and below the size at which the algorithm changes. The statement is written here once more,
without the package's own fold.
"""

import random
from functools import partial

import pytest
import torch
from vescale_comm import Emulator, Feedback, all_reduce, reduce_scatter, simulate, trace
from vescale_comm_worlds import refusals, run, same_bits

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
OTHERS = [torch.float8_e4m3fn, torch.int16, torch.uint16, torch.int64, torch.uint64, torch.bool]
WIRES = ["fp32", "bf16", "fp8", "int8"]


def stated(xs, op, order):
    """The fold as the docstring of `all_reduce` states it."""
    dtype = xs[0].dtype
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    level = [x.to(wide) for x in xs]
    product = complex_product if dtype.is_complex else torch.mul
    combine = {"prod": product, "max": torch.maximum}.get(op, torch.add)
    while len(level) > 1:
        if order == "rank":
            level = [combine(level[0], level[1]), *level[2:]]
        else:
            odd = level[-1:] if len(level) % 2 else []
            level = [combine(level[2 * i], level[2 * i + 1]) for i in range(len(level) // 2)] + odd
    total = level[0]
    if op == "avg":  # a complex number part by part
        parts = torch.view_as_real(total) if total.is_complex() else total
        total = torch.view_as_complex(parts / len(xs)) if total.is_complex() else parts / len(xs)
    return total.to(dtype)


def complex_product(x, y):
    return torch.complex(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


def inputs(seed, count, shape, dtype):
    generator = torch.Generator().manual_seed(seed)
    if dtype in FLOATS or dtype.is_floating_point:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        scale = 4 if dtype is torch.float8_e4m3fn else 100
        return [
            (torch.randn(shape, generator=generator, dtype=wide) * scale).to(dtype)
            for _ in range(count)
        ]
    return [torch.randint(0, 2, shape, generator=generator).to(dtype) for _ in range(count)]


def check_orders(rank, world_size):
    rng, emulator = random.Random(world_size), Emulator(world_size)
    for dtype in FLOATS + OTHERS:
        for order in ("rank", "tree"):
            ops = ["sum", "avg", "prod"] if dtype in FLOATS else ["sum"]
            for op in ops:
                shape = rng.choice([(), (0,), (7,), (3, 5), (33, 67)])
                xs = inputs(rng.getrandbits(30), world_size, shape, dtype)
                found = all_reduce(xs[rank], op=op, order=order)
                assert same_bits(found, emulator.all_reduce(xs, op=op, order=order)[rank])
                if dtype in FLOATS:
                    assert same_bits(found, stated(xs, op, order)), (dtype, order, op, shape)
                sizes = [rng.choice([0, 1, 5, 300]) for _ in range(world_size)]
                xs = inputs(rng.getrandbits(30), world_size, (2, sum(sizes)), dtype)
                options = {"dim": 1, "sizes": sizes, "op": op, "order": order}
                piece = reduce_scatter(xs[rank], **options)
                assert same_bits(piece, emulator.reduce_scatter(xs, **options)[rank])
                if dtype in FLOATS:
                    assert same_bits(
                        piece, stated(xs, op, order).split(sizes, 1)[rank].contiguous()
                    )


def check_wires(rank, world_size):
    rng, emulator = random.Random(world_size), Emulator(world_size)
    for wire in WIRES:
        for order in ("native", "tree"):
            for dtype in FLOATS[:4]:
                op = rng.choice(["sum", "avg"])
                xs = inputs(rng.getrandbits(30), world_size, rng.choice([(), (9, 100)]), dtype)
                how = {"op": op, "order": order, "wire": wire}
                found = all_reduce(xs[rank], **how)
                assert same_bits(found, emulator.all_reduce(xs, **how)[rank])
                sizes = [rng.choice([0, 3, 700]) for _ in range(world_size)]
                xs = inputs(rng.getrandbits(30), world_size, (sum(sizes), 2), dtype)
                found = reduce_scatter(xs[rank], sizes=sizes, **how)
                assert same_bits(found, emulator.reduce_scatter(xs, sizes=sizes, **how)[rank])


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("check", [check_orders, check_wires], ids=lambda f: f.__name__)
def test_bits_are_those_of_the_statement_and_of_the_emulator(check, world_size):
    # Five without processes: their way is that of three.
    if world_size < 5:
        run(check, world_size)
    else:
        simulate(world_size).run(check)


def test_the_orders_differ_where_a_sum_depends_on_them():
    xs = inputs(3, 5, (1000,), torch.float32)
    found = [Emulator(5).all_reduce(xs, order=order)[0] for order in ("rank", "tree")]
    assert not torch.equal(*found)


def encoding_bound(x, wire):
    """The bound of one encoding that `Wire` states, for each element of one piece."""
    x = x.double()
    blocks = torch.nn.functional.pad(x.abs(), (0, -x.numel() % 256)).view(-1, 256)
    largest = blocks.amax(1, keepdim=True).expand(-1, 256).reshape(-1)[: x.numel()]
    room = 2**-22 * largest
    return (
        room
        + {
            "fp32": 2**-24 * x.abs(),
            "bf16": 2**-8 * x.abs(),
            "fp8": 2**-4 * x.abs() + 2**-10 * largest / 448,
            "int8": largest / 254,
        }[wire]
    )


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_errors_are_within_the_stated_bounds(wire, scale):
    members, numel = 4, 4000
    generator = torch.Generator().manual_seed(5)
    xs = [torch.randn(numel, generator=generator).exp() * scale for _ in range(members)]
    xs = [x * torch.randint(-1, 2, (numel,), generator=generator) for x in xs]
    exact = sum(x.double() for x in xs)
    part = numel // members
    for member in range(members):
        own = slice(member * part, (member + 1) * part)
        once = sum(encoding_bound(x[own], wire) for x in xs)
        found = Emulator(members).reduce_scatter(xs, wire=wire)[member]
        assert ((found.double() - exact[own]).abs() <= once).all()
        found = Emulator(members).all_reduce(xs, wire=wire)[0][own]
        twice = once + 1.1 * encoding_bound(exact[own].abs() + once, wire)
        assert ((found.double() - exact[own]).abs() <= twice).all()


@pytest.mark.parametrize("wire", ["fp8", "int8"])
def test_blocks_that_are_not_finite_arrive_as_nan_and_others_as_they_are(wire):
    for bad in (float("inf"), float("-inf"), float("nan")):
        x = torch.ones(600)
        x[300] = bad
        found = Emulator(2).reduce_scatter([x, x], sizes=[600, 0], wire=wire)[0]
        assert found[256:512].isnan().all()
        torch.testing.assert_close(found[:256], torch.full((256,), 2.0))


def test_error_feedback_brings_what_was_left_out():
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(1000, generator=generator) for _ in range(2)]
    exact, steps = sum(xs), 50
    emulator, kept = Emulator(2), [Feedback(), Feedback()]
    half = {"sizes": [500, 500], "wire": "int8"}
    plain = sum(emulator.reduce_scatter(xs, **half)[0].double() for _ in range(steps))
    fed = sum(emulator.reduce_scatter(xs, feedback=kept, **half)[0].double() for _ in range(steps))
    error = [(total / steps - exact[:500]).abs().max().item() for total in (plain, fed)]
    assert error[1] < error[0] / 10
    assert kept[0].residual.shape == (1000,)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 3e38])
def test_one_overflow_is_in_one_sum(wire, bad):
    emulator, kept = Emulator(2), [Feedback(), Feedback()]
    xs = [torch.linspace(1, 2, 1000) for _ in range(2)]
    spoiled = xs[0].clone()
    spoiled[3] = bad
    emulator.all_reduce([spoiled, xs[1]], wire=wire, feedback=kept)
    (found, _) = emulator.all_reduce(xs, wire=wire, feedback=kept)
    assert found.isfinite().all()


BYTES = {"fp32": 4, "bf16": 2, "fp8": 1, "int8": 1}


def wire_bytes(rank, world_size):
    found = {}
    for wire in WIRES:
        with trace() as t:
            all_reduce(torch.ones(2048), wire=wire)
        found[wire] = t.bytes()
    return found


def test_bytes_are_those_of_the_encoding():
    scales = {"fp8": 4 * 4, "int8": 4 * 4}  # of the 1024 elements that go each way
    expected = {wire: 2 * (1024 * BYTES[wire] + scales.get(wire, 0)) for wire in WIRES}
    assert run(wire_bytes, 2) == [expected] * 2


def gradients(rank, world_size, options):
    xs = [x.requires_grad_() for x in inputs(1, world_size, (6, 4), torch.float64)]
    weights = inputs(2, world_size, (6, 4), torch.float64)
    outputs = Emulator(world_size).all_reduce(xs, **options)
    sum((y * y * w).sum() for y, w in zip(outputs, weights, strict=True)).backward()
    x = xs[rank].detach().requires_grad_()
    y = all_reduce(x, **options)
    (y * y * weights[rank]).sum().backward()
    assert same_bits(x.grad, xs[rank].grad)
    return x.grad


@pytest.mark.parametrize("options", [{"order": "rank"}, {"order": "tree", "op": "avg"},
                                     {"wire": "bf16"}], ids=str)  # fmt: skip
def test_gradients_are_reduced_in_the_same_way(options):
    run(gradients, 3, options)


BAD = {
    "order": ({"order": "ring"}, "unknown order 'ring'; there are 'native', 'rank', 'tree'"),
    "wire": ({"wire": "fp4"}, "unknown wire format 'fp4'"),
    "op": ({"wire": "int8", "op": "max"}, "sum and avg of floating-point tensors, not max"),
    "dtype": ({"wire": "int8"}, "not sum of torch.int32"),
    "feedback": ({"feedback": Feedback()}, "feedback= needs a wire format"),
}


def bad(rank, world_size):
    integers = torch.ones(3, dtype=torch.int32)
    calls = {name: partial(all_reduce, torch.ones(3), **how) for name, (how, _) in BAD.items()}
    return refusals(calls | {"dtype": partial(all_reduce, integers, wire="int8")})


def test_what_does_not_exist_is_named():
    for found in run(bad, 2):
        assert list(found) == list(BAD)
        for name, (kind, words) in found.items():
            assert (kind, BAD[name][1] in words) == ("CommArgumentError", True), (name, words)
