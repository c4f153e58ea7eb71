"""Rows of which a rank's part is infinite, zero or very small: the results of one device.

Where one device has a number, values and gradients have it too; a NaN of a part stays in its row.
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import Replicate, Shard

INF, NAN = float("inf"), float("nan")
ROWS = torch.tensor(list(product((-INF, 0.0, 1.5, -2.0, INF, NAN, 1e-40, 40.0), repeat=4)))
LARGE = torch.tensor(list(product((1e25, 0.0, -1e30, 3e38, 1e-30, -2.0), repeat=4)))
FINITE = ROWS[(ROWS.abs() != INF).all(1)]
SMALL = ROWS[ROWS.isfinite().all(1)]
FUNCTIONS = {
    "logsumexp": (lambda x: x.logsumexp(1), ROWS),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), ROWS),
    "softmax": (lambda x: x.softmax(1), ROWS),
    "softmin": (lambda x: F.softmin(x, 1), ROWS),
    "log_softmax": (lambda x: x.log_softmax(1), ROWS),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=1), ROWS),
    "norm of order 1": (lambda x: torch.linalg.vector_norm(x, 1, dim=1), ROWS),
    "norm of order 3": (lambda x: torch.linalg.vector_norm(x, 3, dim=1), ROWS),
    "largest": (lambda x: torch.linalg.vector_norm(x, INF, dim=1), ROWS),
    "smallest": (lambda x: torch.linalg.vector_norm(x, -INF, dim=1), ROWS),
    "prod": (lambda x: x.prod(1), ROWS),
    "cumprod": (lambda x: x.cumprod(1), FINITE),
    "sum": (lambda x: x.sum(1), ROWS),
    "cumsum": (lambda x: x.cumsum(1), ROWS),
    "nansum": (lambda x: x.nansum(1), ROWS),
    "mean": (lambda x: x.mean(1), ROWS),
    "nanmean": (lambda x: x.nanmean(1), ROWS),
    "var": (lambda x: x.var(1), ROWS),
    "std": (lambda x: x.std(1), ROWS),
    "std of large numbers": (lambda x: x.std(1), LARGE),
    "std and mean": (lambda x: torch.std_mean(x, 1, correction=0)[0], LARGE),
    "amax": (lambda x: x.amax(1), ROWS[~ROWS.isnan().any(1)]),
    "amin": (lambda x: x.amin(1), ROWS[~ROWS.isnan().any(1)]),
    "max": (lambda x: x.max(1)[0], ROWS),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), ROWS),
    "normalize": (lambda x: F.normalize(x, dim=1), ROWS),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, x.new_ones(len(x)).long(), reduction="none"),
        ROWS,
    ),
}
KEEPS_NAN = ("norm of order 1", "largest", "smallest")
# Second derivatives of products, and of running sums of exponentials, beside infinities are others;
# those of 1e-40 may be rounding errors, of 1e35.
LARGER = ROWS[ROWS.ne(ROWS[6, 3]).all(1)]
TWICE = {
    **{name: each for name, each in FUNCTIONS.items() if each[1] is ROWS},
    **{name: (FUNCTIONS[name][0], SMALL) for name in ("prod", "cumprod")},
    **{name: (FUNCTIONS[name][0], LARGER) for name in ("std", "norm of order 3")},
    "logcumsumexp": (FUNCTIONS["logcumsumexp"][0], ROWS[(ROWS != INF).all(1)]),
}


def placed(rows, world_size, dtype=torch.float32):
    mesh = device_mesh((world_size,), ("tp",))
    x = rows.to(dtype).requires_grad_()
    return x, vd.distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_()


def weights_of(y):
    return torch.linspace(1, 2, y.numel(), dtype=y.dtype).view(y.shape)


def beside_one_device(rank, world_size):
    faults = []
    for name, (function, rows) in FUNCTIONS.items():
        x, d = placed(rows, world_size)
        y, found = function(x), function(d).full_tensor()
        weights = weights_of(y)
        faults += faulty(name, rows, y.detach(), found.detach(), y.isfinite())
        (expected,) = torch.autograd.grad((y * weights).sum(), x)
        (gradient,) = torch.autograd.grad((found * weights).sum(), d)
        gradient = gradient.full_tensor()
        where = expected.isfinite()
        if name not in KEEPS_NAN:
            where &= ~rows.isnan().any(1, keepdim=True)
        faults += faulty(f"gradient of {name}", rows, expected, gradient, where)
    return faults


def twice(rank, world_size):
    """Gradients of gradients, in double precision: torch's own differ by rounding elsewhere."""
    faults = []
    for name, (function, rows) in TWICE.items():
        rows = rows[~rows.isnan().any(1)]
        x, d = placed(rows, world_size, torch.float64)
        y, found = function(x), function(d)
        found = found.full_tensor()
        (first,) = torch.autograd.grad((y * weights_of(y)).sum(), x, create_graph=True)
        (mine,) = torch.autograd.grad((found * weights_of(y)).sum(), d, create_graph=True)
        mine = mine.full_tensor()
        if not first.requires_grad:
            continue
        (expected,) = torch.autograd.grad((first * weights_of(first)).sum(), x)
        (gradient,) = torch.autograd.grad((mine * weights_of(first)).sum(), d)
        where = expected.isfinite()
        faults += faulty(name, rows, expected, gradient.full_tensor(), where)
    return faults


def in_halves(rank, world_size):
    faults = []
    for (name, (function, _)), dtype in product(FUNCTIONS.items(), (torch.float16, torch.bfloat16)):
        x, d = placed(SMALL, world_size, dtype)
        y, found = function(x), function(d)
        assert found.dtype is y.dtype, (name, dtype)
        found, exact = found.full_tensor(), function(x.double())
        # The error of one device, and one rounding of each of two parts more.
        (expected,) = torch.autograd.grad((y * weights_of(y)).sum(), x)
        (gradient,) = torch.autograd.grad((found * weights_of(y)).sum(), d)
        (derivative,) = torch.autograd.grad((exact * weights_of(exact)).sum(), x)
        for one, other, true in ((y, found, exact), (expected, gradient.full_tensor(), derivative)):
            true = true.to(torch.float64)
            allowed = (one - true).abs() + (1 + true.abs()) * 4 * torch.finfo(dtype).eps
            wrong = one.isfinite() & true.isfinite() & ~((other - true).abs() <= allowed)
            if wrong.any():
                at = wrong.reshape(len(SMALL), -1).any(1).nonzero()[0].item()
                faults.append((name, dtype, SMALL[at].tolist(), other[at], one[at], true[at]))
    return faults


def faulty(name, rows, expected, found, where):
    """Rows in which a number of one device is another."""
    same = torch.isclose(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
    wrong = (where & ~same).reshape(len(rows), -1).any(1)
    if not wrong.any():
        return []
    at = int(wrong.nonzero()[0])
    row, one, other = (x[at].tolist() for x in (rows, expected, found))
    return [f"{name}: {int(wrong.sum())} rows, first {row}: {other} for {one}"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_that_are_infinite_or_zero(ranks):
    for faults in simulate(ranks).run(beside_one_device):
        assert not faults, "\n".join(faults)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", [twice, in_halves], ids=lambda f: f.__name__)
def test_second_derivatives_and_halves(program, ranks):
    for faults in simulate(ranks).run(program):
        assert not faults, "\n".join(map(str, faults))


def widened_by_autocast(rank, world_size):
    mesh = device_mesh((world_size,), ("tp",))
    x = torch.tensor([1e30, 1e30, 1e-30, 1e-30])
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            d = vd.distribute_tensor(x.to(dtype), mesh, [Shard(0)])
            found, expected = d.prod().full_tensor(), x.to(dtype).double().prod().float()
            torch.testing.assert_close(found, expected)
            for function in (torch.logsumexp, torch.prod):
                assert function(d, 0).dtype is function(x.to(dtype), 0).dtype


def test_products_under_autocast_are_as_wide_as_without():
    simulate(2).run(widened_by_autocast)


def masked(rank, world_size):
    mesh = device_mesh((world_size,), ("tp",))
    torch.manual_seed(0)
    q, k = torch.randn(3, 4), torch.randn(4, 4)
    mask = torch.zeros(3, 4)
    mask[:, 2:] = -INF

    def loss(q, k, mask):
        scores = q @ k.T + mask
        return (scores.logsumexp(1) * 2 + scores.softmax(1)[:, 0]).sum()

    leaf = q.clone().requires_grad_()
    loss(leaf, k, mask).backward()
    d = vd.distribute_tensor(q, mesh, [Replicate()]).requires_grad_()
    keys = vd.distribute_tensor(k, mesh, [Shard(0)])
    loss(d, keys, vd.distribute_tensor(mask, mesh, [Shard(1)])).backward()
    torch.testing.assert_close(d.grad.full_tensor(), leaf.grad)


def test_a_mask_over_sharded_keys():
    simulate(2).run(masked)


REDUCED = ["sum", "mean", "var", "std", "prod", "cumsum", "cumprod", "cummax", "logcumsumexp",
           "logsumexp", "softmax", "log_softmax", "amax", "min", "argmax", "norm", "any", "median",
           "var_mean", "aminmax", "mode", "unique"]  # fmt: skip


def told(name, x):
    try:
        found = getattr(torch, name)(x, dim=x.ndim - 1)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return type(error).__name__
    first = found if isinstance(found, torch.Tensor) else found[0]
    whole = first.full_tensor() if isinstance(first, vd.DTensor) else first
    return whole.dtype, whole.to(torch.complex128)


def of_other_kinds(rank, world_size):
    mesh = device_mesh((world_size,), ("tp",))
    for dtype in (torch.int64, torch.bool, torch.uint8, torch.complex64):
        x = torch.tensor([5, 2, 0, 7, 1, 3]).remainder(2 if dtype is torch.bool else 9).to(dtype)
        # One row: the last rank has none, and torch itself would refuse nothing there.
        for name, whole in product(REDUCED, (x, x[None])):
            expected, found = (
                told(name, whole),
                told(name, vd.distribute_tensor(whole, mesh, [Shard(0)])),
            )
            if isinstance(expected, str):
                assert found == expected, (name, dtype)
            else:
                assert found[0] is expected[0], (name, dtype)
                torch.testing.assert_close(found[1], expected[1], equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*has no rule")
def test_numbers_of_other_kinds_have_the_errors_of_one_device():
    simulate(2).run(of_other_kinds)
