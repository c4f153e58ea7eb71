"""The table of refusals in the README is what capture refuses: each row has functions that show it.

The second time at the latest, calling the captured function raises a `CaptureError` with the words
of its row.
"""

import random
import time
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
import vescale_dtensor as vd
from capture_guards import rows, spread
from custom_functions import Doubled
from torch import nn
from torch.utils.checkpoint import checkpoint
from vescale_comm.testing import run

README = (Path(__file__).parents[2] / "README.md").read_text()


class Row:
    """A row of the table: what is refused, the words of the error, and what to write instead."""

    def __init__(self, what, words, instead, *functions):
        self.what, self.words, self.instead, self.functions = what, words, instead, functions

    def __str__(self):
        return f"| {self.what} | {self.words} | {self.instead} |"


class Built:
    """A function that is made where it runs: it needs a mesh."""

    def __init__(self, make):
        self.make = make


class Keeper:
    def __init__(self):
        self.last, self.log, self.calls, self.average = None, [], 0, torch.zeros(())


def keeping(body):
    keeper = Keeper()
    return lambda x: body(x, keeper)


def keep_last(x, keeper):
    keeper.last = x.sum()
    return keeper.last


def keep_log(x, keeper):
    keeper.log.append(x.sum())
    return x


def keep_count(x, keeper):
    keeper.calls += 1
    return x * 2


def keep_average(x, keeper):
    keeper.average = keeper.average * 0.9 + x.sum() * 0.1
    return x


def reading(iterator):
    return lambda x: x * next(iterator)


def given(x, more):
    return x


def stepping():
    weight = nn.Parameter(spread(torch.ones(4)))
    optimizer = torch.optim.Adam([weight], foreach=False)

    def step(x):
        (x * weight).sum().backward()
        optimizer.step()

    return step


def retained(x):
    hidden = x * torch.ones(4, requires_grad=True)
    hidden.retain_grad()


def with_history():
    hidden = spread(torch.ones(4)).requires_grad_() * 2
    return lambda x: x * hidden


def returning_a_gradient():
    weight = spread(torch.ones(4)).requires_grad_()

    def function(x):
        (x * weight).sum().backward()
        return weight.grad

    return function


def inference(x):
    with torch.inference_mode():
        return x + 1


GENERATOR = random.Random(0)
ROWS = [
    Row(
        "values of tensors in Python: `item()`, `float()`, `tolist()`, `numpy()`, `if loss > 3`",
        "reads the value of a tensor",
        "keep a tensor (`torch.where`, `masked_fill`), or read it outside",
        lambda x: x.sum().item(),
        lambda x: x if x.sum() > 3 else -x,
    ),
    Row(
        "optimizers that count steps in Python (for-loop and foreach Adam, say)",
        "reads the value of a tensor",
        "`fused=True`, or `optimizer.step()` outside",
        Built(stepping),
    ),
    Row(
        "shapes that depend on values: `x[x > 0]`, `nonzero`, `unique`",
        "depends on values",
        "a mask (`torch.where`, `masked_fill`), or a call outside",
        lambda x: x[x > 0],
        lambda x: x.unique(),
    ),
    Row(
        "Python state that changes at every call: `self.last = loss`, `log.append(loss)`, "
        "counters, averages and recurrent state that are assigned",
        "in call after call",
        "return it, and keep it outside; or write in place: `self.average.lerp_(loss, 0.1)`",
        *map(keeping, (keep_last, keep_log, keep_count, keep_average)),
    ),
    Row(
        "iterators and generators, `random.Random`, numpy generators, "
        "numpy arrays of more than 64 KiB, objects of C extensions",
        "whose state a replay would not see",
        "pass what is needed of it as an argument: `next(batches)`",
        reading(iter(range(9))),
        reading(number for number in range(9)),
        lambda x: x * len(str(GENERATOR)),
    ),
    Row(
        "numpy arrays and iterators as arguments",
        "an argument is a",
        "`torch.as_tensor(array)`, `next(iterator)`",
        partial(given, more=numpy.ones(3)),
        partial(given, more=iter([1])),
    ),
    Row(
        "clocks, Python's random numbers, `open`, `input`",
        "gives another value each time",
        "call it outside, and pass what it gives as a tensor",
        lambda x: x * time.time(),
        lambda x: x * random.random(),
        lambda x: x * random.randint(1, 3),
    ),
    Row(
        "custom `autograd.Function`s, full backward hooks of modules",
        "custom autograd.Function",
        "`torch.library.custom_op`, or call it outside",
        lambda x: Doubled.apply(x.to_local().requires_grad_()) * 2,
    ),
    Row(
        "tensors made where torch's overrides do not see it: `torch.from_numpy`, C++ extensions",
        "that torch's overrides do not see",
        "`torch.library.custom_op`, or pass the tensor as an argument",
        lambda x: x + torch.from_numpy(numpy.ones(4, dtype="f")),
    ),
    Row(
        "collectives of `torch.distributed`",
        "raw collectives",
        "those of `vescale_comm`, or `redistribute`",
        lambda x: dist.all_reduce(x.to_local().clone()),
    ),
    Row(
        "seeds that are set inside",
        "a random generator was moved",
        "set them outside",
        lambda x: torch.nn.functional.dropout(x + torch.manual_seed(3).initial_seed()),
    ),
    Row(
        "activation checkpointing inside",
        "saved-tensor hooks",
        "`checkpoint(capture(f), x)`",
        lambda x: checkpoint(torch.sin, x * torch.ones(4, requires_grad=True), use_reentrant=False),
    ),
    Row(
        "inference mode, policy of random numbers, choice of kernels that change inside",
        "Change it outside",
        "change it around the captured function",
        inference,
    ),
    Row(
        "`retain_grad()` of a tensor inside",
        "a replay makes no such tensor",
        "return the tensor, and call `retain_grad()` on what is returned",
        retained,
    ),
    Row(
        "tensors from outside with an autograd history",
        "Pass it as an argument",
        "pass it as an argument, or `detach()` it",
        Built(with_history),
    ),
    Row(
        "`p.grad` as a result",
        "read p.grad after",
        "read it after the call",
        Built(returning_a_gradient),
    ),
    Row(
        "results of a class that neither pytree knows nor attributes make up: an iterator, a set",
        "is returned, of which each call",
        "a tuple, list, dict or dataclass",
        lambda x: {x.dim()},
        lambda x: iter([x]),
    ),
]


def table():
    head = "| refused | the error says | write instead |\n|---|---|---|\n"
    return head + "\n".join(map(str, ROWS)) + "\n"


def test_the_readme_has_the_table():
    assert table() in README, table()


def refused(rank, world_size, number, index):
    row = ROWS[number]
    function, more = row.functions[index], {}
    if isinstance(function, Built):
        function = function.make()
    if isinstance(function, partial):
        function, more = function.func, function.keywords
    captured = vd.capture(function)
    with pytest.raises(vd.CaptureError, match=row.words):
        [captured(spread(rows()), **more) for _ in range(2)]


FUNCTIONS = [(n, i) for n, row in enumerate(ROWS) for i in range(len(row.functions))]


@pytest.mark.parametrize(("number", "index"), FUNCTIONS)
def test_each_row_is_refused(number, index):
    run(refused, 2, number, index)


def allowed(rank, world_size):
    keeper = Keeper()
    captured = vd.capture(lambda x: keep_count(x, keeper), unguarded=["calls"])
    clocked = vd.capture(lambda x: x * (time.perf_counter() > 0), unguarded=["perf_counter"])
    for _ in range(3):
        assert torch.equal(captured(spread(rows())).full_tensor(), rows() * 2)
        assert torch.equal(clocked(spread(rows())).full_tensor(), rows())
    assert keeper.calls == 1
    assert len(captured.programs) == len(clocked.programs) == 1


def test_unguarded_names_are_allowed():
    run(allowed, 2)
