"""All-reduce and reduce-scatter equal the fold of the members' inputs, for every op and dtype.

Values are small whole numbers, so that every order of summation gives the same result and equality
is exact; what is not a reduction of a dtype is an error on every rank.
"""

import random
from functools import partial
from itertools import product

import pytest
import torch
import vescale_comm as vc
import vescale_comm_dense as dense
from vescale_comm.testing import on_ranks
from vescale_comm_dense import COMPLEX, FLOAT8, FLOATS, INTEGERS
from vescale_comm_worlds import refusals, run

ARITHMETIC = ["sum", "max", "min", "prod"]
BITWISE = ["band", "bor", "bxor"]
DEFINED = (
    [(op, dtype) for dtype in FLOATS + FLOAT8 for op in [*ARITHMETIC, "avg"]]
    + [(op, dtype) for dtype in COMPLEX for op in ["sum", "prod", "avg"]]
    + [(op, dtype) for dtype in INTEGERS for op in ARITHMETIC + BITWISE]
)


def values(rng, shape, dtype):
    """Small whole numbers; negative ones where the dtype has them."""
    low = 0 if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64) else -2
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    whole = torch.randint(low, 3, (*shape, 2), generator=generator)
    if dtype.is_complex:
        return torch.view_as_complex(whole.double()).to(dtype)
    return whole[..., 0].to(dtype)


def exact(xs, op):
    """The fold on one process, in a dtype that is wide enough for every whole number."""
    wide = torch.complex128 if xs[0].dtype.is_complex else torch.float64
    wide = torch.int64 if op in BITWISE else wide
    if op == "avg" and wide is torch.complex128:  # real and imaginary parts, divided by a number
        return torch.view_as_complex(exact(list(map(torch.view_as_real, xs)), op))
    return dense.all_reduce([x.to(wide) for x in xs], op=op)[0].to(xs[0].dtype)


def random_sizes(rng, world_size):
    if rng.random() < 0.4:
        return [rng.choice([0, 1, 2])] * world_size
    return [rng.choice([0, 0, 1, 3]) for _ in range(world_size)]


def strided(rng, x):
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim and rng.random() < 0.5 else x


@on_ranks(2)
def test_one_element_of_any_stride(rank, world_size):
    """A column of a batch of one is contiguous for torch, and yet cannot be viewed as bytes."""
    for dtype in (*FLOATS, *FLOAT8, *COMPLEX, torch.bool, torch.int16):
        x = torch.full((1, 3), rank + 1.0).to(dtype)[:, 1]
        options = [{"order": "rank"}, {"order": "native"}]
        if dtype.is_floating_point:
            options += [{"wire": wire} for wire in vc.WIRES]
        for how in options:
            expected = vc.all_reduce(x.clone(), **how)
            assert torch.equal(vc.all_reduce(x, **how), expected), (dtype, how)
            out = torch.zeros(1, 3, dtype=dtype)[:, 1]
            assert torch.equal(vc.all_reduce_(out.copy_(x), **how), expected), (dtype, how)
        alone = [1] + [0] * (world_size - 1)
        own = x if rank == 0 else x[:0]
        out = torch.zeros(1, 3, dtype=dtype)[:, 1]
        assert torch.equal(
            vc.all_gather_into_tensor(out, own, sizes=alone), vc.all_gather(own, sizes=alone)
        )


def check_all_reduce(rank, world_size):
    rng = random.Random(world_size)
    for op, dtype in DEFINED:
        for shape in [(), (0, 2), (3,), (2, 3)]:
            xs = [strided(rng, values(rng, shape, dtype)) for _ in range(world_size)]
            before = xs[rank].clone()
            found = vc.all_reduce(xs[rank], op=op)
            assert equal(found, exact(xs, op)), (op, dtype, shape)
            assert equal(xs[rank], before)
            assert found.is_contiguous()


def check_reduce_scatter(rank, world_size):
    rng = random.Random(world_size)
    for op, dtype in DEFINED:
        for _ in range(3):
            sizes, dim = random_sizes(rng, world_size), rng.choice([0, 1, -1])
            shape = [2, 2, 2][: rng.choice([2, 3])]
            shape[dim] = sum(sizes)
            xs = [strided(rng, values(rng, shape, dtype)) for _ in range(world_size)]
            before = xs[rank].clone()
            even = len(set(sizes)) == 1 and rng.random() < 0.5
            found = vc.reduce_scatter(xs[rank], dim=dim, sizes=None if even else sizes, op=op)
            expected = torch.split(exact(xs, op), sizes, dim)[rank]
            assert equal(found, expected), (op, dtype, sizes, dim)
            assert equal(xs[rank], before)
            assert found.is_contiguous()


def equal(found, expected):
    """Same shape, dtype and values; not all dtypes can be compared as they are."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    if found.dtype.is_complex:
        return torch.equal(found, expected)
    return torch.equal(found.to(torch.float64), expected.to(torch.float64))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "check", [check_all_reduce, check_reduce_scatter], ids=lambda f: f.__name__
)
def test_reductions_equal_the_fold(check, world_size):
    run(check, world_size)


BOOLS = {
    ("sum", "bor", "max"): [False, True, True, True],
    ("prod", "band", "min"): [False, False, False, True],
    ("bxor",): [False, True, True, False],
}


@on_ranks(2)
def test_booleans_stay_booleans(rank, world_size):
    row = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=torch.bool)[:, rank]
    for ops, expected in BOOLS.items():
        for op in ops:
            whole, piece = vc.all_reduce(row, op=op), vc.reduce_scatter(row, op=op)
            assert whole.tolist() == expected, op
            assert piece.tolist() == expected[2 * rank : 2 * rank + 2], op
            # The byte of a bool is 0 or 1; a backend that adds bytes leaves a 2.
            assert whole.view(torch.uint8).max() <= 1


@on_ranks(2)
def test_the_whole_range_of_an_integer_compares_and_wraps(rank, world_size):
    for dtype in INTEGERS:
        bounds = torch.iinfo(dtype)
        x = torch.tensor([bounds.min, bounds.max][rank], dtype=dtype)
        wrapped = bounds.max if bounds.min == 0 else -1
        found = [vc.all_reduce(x, op=op).item() for op in ("max", "min", "sum")]
        assert found == [bounds.max, bounds.min, wrapped], dtype


def average_once_rounded(rank, world_size):
    return vc.all_reduce(torch.tensor([1.0, 1.0, 2.0][rank]), op="avg")


def extremes_of_specials(rank, world_size):
    inf, nan = float("inf"), float("nan")
    specials = torch.tensor([nan, -nan, inf, -inf, 0.0, -0.0, 1e-40, -1e-40, 1.5, -2.0, 440.0])
    pairs = torch.cartesian_prod(specials, specials)
    for dtype, op, order in product(FLOATS + FLOAT8, ("max", "min"), ("native", "rank")):
        columns = pairs.to(dtype).double().unbind(1)
        expected = dense.all_reduce(list(columns), op=op)[0]
        found = vc.all_reduce(pairs.to(dtype)[:, rank].contiguous(), op=op, order=order)
        assert found.dtype == dtype
        assert torch.equal(found.double().nan_to_num(1e9), expected.nan_to_num(1e9)), (dtype, op)


def test_extremes_keep_a_nan():
    """As torch's do: gloo's and NCCL's own drop it."""
    run(extremes_of_specials, 2)


def test_the_average_is_the_sum_divided_at_the_end():
    assert run(average_once_rounded, 3) == [torch.tensor(4.0) / 3] * 3


UNDEFINED = {
    ("median", torch.float32): "unknown op 'median'",
    ("avg", torch.int64): "an average of integers is not an integer",
    ("avg", torch.bool): "'avg' is not defined for torch.bool",
    ("bxor", torch.float32): "'bxor' is not defined for torch.float32",
    ("max", torch.complex64): "'max' is not defined for torch.complex64",
    ("band", torch.float8_e4m3fn): "'band' is not defined for torch.float8_e4m3fn",
}


def reduce_undefined(rank, world_size):
    calls = (vc.all_reduce, vc.reduce_scatter)
    return refusals(
        {
            (call.__name__, *case): partial(call, torch.zeros(2, dtype=case[1]), op=case[0])
            for call in calls
            for case in UNDEFINED
        }
    )


def test_undefined_reductions_are_errors_on_every_rank():
    for found in run(reduce_undefined, 2):
        assert len(found) == 2 * len(UNDEFINED)
        for (_, *case), (kind, words) in found.items():
            assert kind == "CommArgumentError"
            assert UNDEFINED[tuple(case)] in words


def complex_halves(rank, world):
    xs = [torch.complex(torch.full((5,), float(r)), torch.arange(5.0)) for r in range(world)]
    mine = xs[rank].to(torch.complex32)
    found = [
        vc.all_reduce(mine, op=op, order=order) for op in ("sum", "avg") for order in ORDERS_32
    ]
    whole = sum(xs)
    for each, wanted in zip(found, [whole] * 3 + [whole / world] * 3, strict=True):
        assert each.dtype is torch.complex32
        assert torch.equal(each.to(torch.complex64), wanted.to(torch.complex32).to(torch.complex64))
    with pytest.raises(vc.CommArgumentError, match="prod"):
        vc.all_reduce(mine, op="prod")


ORDERS_32 = ("native", "rank", "tree")


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_halves_add_up():
    """Small integers: exact in every order."""
    run(complex_halves, 2)
