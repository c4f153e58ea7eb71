"""`run` and `outcomes` in both worlds: simulated, and real gloo processes with equal bits."""

import copy

import torch
from torch import Tensor
from vescale_comm import simulate, testing


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
            # The one thing that differs in words: what the group communicates with.
            assert ours.message.replace("simulated", "gloo").replace(
                ", cuda (gloo)", ""
            ) == theirs.message.replace(", cuda (gloo)", "")
        else:
            assert_same(ours.value, theirs.value)
    return real


def _seeded(fn):
    def program(rank, world_size, *args):
        torch.manual_seed(0)
        return fn(rank, world_size, *copy.deepcopy(args))

    return program


def assert_same(ours, theirs):
    assert type(ours) is type(theirs) or isinstance(theirs, Tensor)
    if isinstance(theirs, Tensor):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert torch.equal(_bits(ours), _bits(theirs))
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        assert_same(list(ours.values()), list(theirs.values()))
    elif type(theirs).__eq__ is not object.__eq__:
        assert ours == theirs


def _bits(x):
    return x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
