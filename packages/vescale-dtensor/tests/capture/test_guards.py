"""Modes and arguments are guarded: changing one records another program, which is right.

A case makes a `Recorded` of a function, calls it, changes one thing, and calls it again. Every call
is made in eager too and compared; the first one of its kind must record, the same again must not.
"""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
import vescale_rng
from capture_guards import Recorded, line, linear, on_both, rows, same, spread
from named_cases import named_cases
from vescale_dtensor import Partial, Replicate, Shard

CASES, case = named_cases()


def double(x):
    return x * 2 + 1


def added(x, y):
    return x + y


# --- modes and defaults


@case
def grad_mode():
    seen, x = Recorded(linear()), spread(rows())
    seen(x)
    with torch.no_grad():
        seen(x)


@case
def inference_mode():
    seen, x = Recorded(linear()), spread(rows())
    with torch.no_grad():
        seen(x)
    with torch.inference_mode():
        seen(x)


@case
def autocast():
    seen, x = Recorded(linear()), spread(rows())
    seen(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen(x)
    with torch.autocast("cpu", dtype=torch.float16):
        seen(x)
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        seen(x)


@case
def default_dtype():
    seen, x = Recorded(lambda x: x + torch.ones(4)), spread(rows().double())
    seen(x)
    torch.set_default_dtype(torch.float64)
    seen(x)


@case
def default_device():
    seen, x = Recorded(double), spread(rows())
    seen(x)
    with torch.device("cpu"):
        seen(x)


@case
def entered_mesh():
    seen = Recorded(lambda: vd.ones(5, 4, placements=[Shard(0)]))
    with line():
        seen()
    with line("other"):
        seen()


@case
def policy_of_random_numbers():
    seen, x = Recorded(lambda x: F.dropout(x, 0.5)), spread(rows())
    seen(x)
    with vescale_rng.use("portable"):
        seen(x)


# --- arguments that are tensors


@case
def requires_grad_of_an_argument():
    seen, x = Recorded(double), spread(rows())
    seen(x)
    x.requires_grad_()
    seen(x)


@case
def a_leaf_or_not():
    seen, x = Recorded(double), spread(rows()).requires_grad_()
    seen(x)
    seen(x * 1)


@case
def layout():
    seen = Recorded(double)
    seen(spread(rows()))
    seen(spread(rows(), Shard(1)))
    seen(spread(rows(), Replicate()))
    seen(spread(rows(), Partial()))


@case
def shape():
    seen = Recorded(double)
    for shape in [(5, 4), (6, 4), (5,), (5, 4, 1), (0, 4)]:
        seen(spread(torch.ones(shape)))


@case
def dtype():
    seen = Recorded(double)
    for wanted in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        seen(spread(rows().to(wanted)))


@case
def strides():
    seen = Recorded(double)
    seen(vd.DTensor.from_local(rows(4), line(), [Shard(0)]))
    seen(vd.DTensor.from_local(rows(4).t().contiguous().t(), line(), [Shard(0)]))


@case
def memory_order():
    seen = Recorded(double)
    seen(spread(rows(4), Replicate()))
    seen(spread(rows(4), Replicate()).t())


@case
def mesh():
    seen = Recorded(double)
    seen(spread(rows()))
    seen(spread(rows(), Shard(0), name="other"))


@case
def use_aliases_of_an_argument():
    def project(x):
        return F.linear(x, weight).sum() + x.sum()

    weight = spread(rows(4), Shard(0))
    leaf = spread(rows(), Replicate()).requires_grad_()
    captured = vd.capture(project)
    fresh, used = leaf * 1, leaf * 1
    captured(fresh), captured(leaf * 1)
    assert len(captured.programs) == 1
    project(used)
    captured(used), captured(used)
    assert len(captured.programs) == 2


@case
def plain_or_distributed():
    seen, x = Recorded(added), spread(rows())
    seen(x, rows())
    seen(x, x + 1)


@case
def shape_dtype_and_strides_of_a_plain_tensor():
    seen, x = Recorded(added), spread(rows(4), Replicate())
    seen(x, rows(4))
    seen(x, rows(1))
    seen(x, rows(4).double())
    seen(x, rows(4).t())


@case
def requires_grad_of_a_plain_tensor():
    seen, x = Recorded(added), spread(rows())
    seen(x, rows())
    leaf = rows().requires_grad_()
    seen(x, leaf)
    seen(x, leaf * 1)


@case
def one_tensor_twice():
    seen, x, y = Recorded(lambda x, y: x - 2 * y), spread(rows()), spread(rows(seed=1))
    seen(x, y)
    seen(x, x)
    seen.again(y, x)


@case
def views_of_one_memory():
    def write(x, y):
        x.mul_(2)
        return x - y

    captured = vd.capture(write)
    for together in (False, True, False, True):
        pairs = []
        for _ in range(2):
            base = spread(rows(4))
            pairs.append((base, base.view(4, 4) if together else spread(rows(4, seed=1))))
        same(captured(*pairs[0]), write(*pairs[1]))
    assert len(captured.programs) == 2


# --- arguments that are not


@case
def numbers_by_type_and_value():
    seen, x = Recorded(lambda x, n: x * n), spread(rows(5).long())
    for number in (1, 2, 1.0, True, -0.0, 0.0):
        seen(x, number)


@case
def minus_one_and_minus_two():  # which have one hash
    seen, x = Recorded(lambda x, n: x.sum(n)), spread(rows())
    seen(x, -1)
    seen(x, -2)


@case
def strings_and_dtypes():
    seen, x = Recorded(lambda x, how, to: getattr(x, how)().to(to)), spread(rows())
    seen(x, "sin", torch.float32)
    seen(x, "cos", torch.float32)
    seen(x, "cos", torch.float64)


@case
def containers():
    def total(xs):
        return sum(xs.values() if isinstance(xs, dict) else xs)

    seen, x, y = Recorded(total), spread(rows()), spread(rows(seed=1))
    seen([x])
    seen([x, y])
    seen((x, y))
    seen({"a": x, "b": y})
    seen({"a": x, "c": y})


@case
def position_or_name():
    def either(*args, **kwargs):
        return args[0] * 2 if args else kwargs["x"] * 3

    seen, x = Recorded(either), spread(rows())
    seen(x)
    seen(x=x)


@pytest.mark.parametrize("name", CASES)
def test_a_change_records_again(name):
    on_both(CASES[name])
