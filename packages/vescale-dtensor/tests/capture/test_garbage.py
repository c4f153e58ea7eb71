"""A refusal keeps nothing of its call alive, and no hooks active."""

import gc
import weakref
from contextlib import suppress

import pytest
import torch
import vescale_dtensor as vd
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import Replicate, distribute_tensor


def reads_a_value(x):
    return x * x.sum().item()


def swallows(x):
    try:
        return reads_a_value(x)
    except vd.CaptureError:
        return x


def checkpoints(x):
    return torch.utils.checkpoint.checkpoint(lambda y: y.sin() + 1, x, use_reentrant=False)


def refused_in(function, refused):
    """Tensors of the call are freed at once, and no hooks of a checkpoint stay active."""

    def program(rank, world_size):
        alive = []

        def inner(x):
            made = x * 3
            alive.append(weakref.ref(made))
            return function(made)

        captured = vd.capture(inner, refused=refused, unguarded=("alive",))
        x = distribute_tensor(torch.ones(4), device_mesh((2,)), [Replicate()]).requires_grad_()
        with suppress(vd.CaptureError):
            captured(x)
        assert alive
        assert all(one() is None for one in alive)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None

    return program


@pytest.mark.parametrize("function", [reads_a_value, swallows, checkpoints])
@pytest.mark.parametrize("refused", ["raise", "run"])
def test_a_refusal_keeps_nothing_alive(function, refused):
    checkpoints(torch.ones(1))  # the first of a process imports much, in cycles of its own
    gc.disable()
    try:
        simulate(2)(refused_in(function, refused))
    finally:
        gc.enable()
