"""What C calls on behalf of code is refused or guarded, though no profiler hears of the call.

Also modes of the user's around calls, which see every call as in eager mode, and functions of torch
that have been replaced, which torch calls twice where a mode is active.
"""

import collections
import contextvars
import datetime
import functools
import itertools
import operator
import os
import random
import time

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from capture_guards import rows, spread
from torch.overrides import TorchFunctionMode
from vescale_comm import simulate
from vescale_comm.testing import on_ranks

CLOCKS = {"clock": time.time}
NOW = operator.methodcaller("now")
HANDED = {
    "iterator": lambda x: x * next(iter(time.time, None)),
    "call": lambda x: x * (operator.call if hasattr(operator, "call") else NOW)(time.time),
    "factory": lambda x: x * collections.defaultdict(time.perf_counter)["key"],
    "cache": lambda x: x * functools.lru_cache(time.time_ns)(),
    "context": lambda x: x * contextvars.copy_context().run(time.monotonic),
    "star": lambda x: x * next(itertools.starmap(random.random, [()])),
    "bits": lambda x: x * next(map(random.getrandbits, [10])),
    "key": lambda x: x * max([1, 2, 3], key=random.getrandbits),
    "bytes": lambda x: x * next(map(os.urandom, [1]))[0],
    "partial": lambda x: x * functools.partial(time.time)(),
    "container": lambda x: x * next(iter(CLOCKS["clock"], None)),
    "string": lambda x: x * next(iter(getattr(time, "time"), None)),  # noqa: B009
    "now": lambda x: x * next(iter(datetime.datetime.now, None)).microsecond,
    "method": lambda x: x * NOW(datetime.datetime).microsecond,
}


@on_ranks(2, simulated=True)
def test_what_is_handed_on_is_refused():
    for function in HANDED.values():
        with pytest.raises(vd.CaptureError, match=r"another value each time|would not see"):
            vd.capture(function)(spread(rows()))


def timed(x, on):
    """Code that would ask a clock, and does not."""
    began = time.time() if on else 0.0
    return x * 2 + began * 0


@on_ranks(2, simulated=True)
def test_a_clock_that_is_not_asked_is_no_reason():
    captured = vd.capture(timed)
    for _ in range(3):
        assert torch.equal(captured(spread(rows()), False).full_tensor(), rows() * 2)
    assert captured.replays == 2


class Doubling(TorchFunctionMode):
    """Doubles what one function gives for DTensors, and for nothing else."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        wrapped = bool(args) and isinstance(args[0], vd.DTensor)
        return result * 2 if wrapped and func is torch.relu else result


@on_ranks(2, simulated=True)
def test_a_mode_of_the_users_sees_every_call():
    captured = vd.capture(lambda x: torch.relu(x) * 3)
    expected = rows().relu() * 3
    for factor in (1, 1, 2, 2, 1):
        replays = captured.replays
        if factor == 2:
            with Doubling():
                found = captured(spread(rows()))
        else:
            found = captured(spread(rows()))
        assert torch.equal(found.full_tensor(), expected * factor)
    assert captured.replays == replays + 1


@on_ranks(2, simulated=True)
def test_a_default_device_is_no_such_mode():
    captured = vd.capture(lambda x: x * torch.ones(4))
    for _ in range(3):
        with torch.device("cpu"):
            captured(spread(rows()))
    assert captured.replays == 2


def test_a_replaced_function_of_torch_is_refused(monkeypatch):
    original = F.softmax
    monkeypatch.setattr(F, "softmax", lambda *args, **kwargs: original(*args, **kwargs) * 2)

    def function(rank, world_size):
        with pytest.raises(vd.CaptureError, match="softmax has been replaced"):
            vd.capture(torch.nn.Softmax(dim=1))(spread(rows()))

    simulate(2)(function)
