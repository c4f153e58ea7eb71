"""`run` and `outcomes` in both worlds: simulated, and real gloo processes with equal bits."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from vescale_comm import CommError, bound_waits, simulate, testing, trace

POOLS = 1800  # timeout of the pool of processes


def run(fn, world_size, *args):
    """The values of all ranks; the same in both worlds, down to the bits."""
    real = testing.run(fn, world_size, *args, timeout=90)
    assert_same(simulate(world_size).run(_seeded(fn), *args), real)
    return real


def outcomes(fn, world_size, *args):
    """Values or errors of all ranks; the same in both worlds."""
    real = testing.outcomes(fn, world_size, *args)
    simulated = simulate(world_size).outcomes(_seeded(fn), *args)
    for ours, theirs in zip(simulated, real, strict=True):
        assert type(ours) is type(theirs), ours
        if isinstance(ours, testing.Failed):
            assert (ours.type_name, ours.kinds) == (theirs.type_name, theirs.kinds)
            assert _words(ours.message) == _words(theirs.message)
        else:
            assert_same(ours.value, theirs.value)
    return real


def refusals(calls):
    """The kind and the words of what each call raises before anything is sent, by its name."""
    found = {}
    for name, call in calls.items():
        with trace() as sent:
            try:
                call()
            except CommError as error:
                found[name] = type(error).__name__, str(error)
        assert sent.records == [], name
    return found


@contextmanager
def trace_of_ours():
    """A trace without what torch itself sends in the block, of which it would warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "trace: collectives that are not this package's")
        with trace() as sent:
            yield sent


@contextmanager
def waiting_in_vain():
    """Who is missing is waited for in the backend alone, and the answers until all have come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vescale_comm._watchdog.comparison._MOST_MEET_SECONDS", 0.0)
        patch.setattr("vescale_comm._watchdog.watcher._ANSWER_SECONDS", 60.0)
        bound_waits(timeout=120, report_after=0.4)
        yield
    bound_waits(timeout=POOLS)


def _seeded(fn):
    def program(rank, world_size, *args):
        torch.manual_seed(0)
        return fn(rank, world_size, *copy.deepcopy(args))

    return program


def assert_same(ours, theirs):
    assert type(ours) is type(theirs) or isinstance(theirs, Tensor)
    if isinstance(theirs, Tensor):
        assert same_bits(ours, theirs)
    elif isinstance(theirs, str):
        assert _words(ours) == _words(theirs)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        assert_same(list(ours.values()), list(theirs.values()))
    elif type(theirs).__eq__ is not object.__eq__:
        assert ours == theirs


def _words(text):
    """The one thing that differs in words: what the group communicates with."""
    return text.replace("simulated", "gloo").replace(", cuda (gloo)", "")


def same_bits(one, other):
    """Whether two tensors have one shape, dtype and bytes."""
    kinds = [(x.shape, x.dtype) for x in (one, other)]
    return kinds[0] == kinds[1] and torch.equal(bits(one), bits(other))


def bits(x):
    """A tensor as its bytes, row-major."""
    return x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
