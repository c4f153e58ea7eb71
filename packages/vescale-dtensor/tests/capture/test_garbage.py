"""What Python does when it collects garbage is no part of a captured function."""

import gc
import time
import weakref
from contextlib import suppress

import pytest
import torch
import vescale_dtensor as vd
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import Replicate, distribute_tensor
from vescale_dtensor._capture.garbage import is_collecting

seen = []


def clock(phase, info):
    seen.append((phase, time.perf_counter()))


class Finalized:
    """In a cycle, so that only a collection frees it."""

    def __init__(self):
        self.own = self

    def __del__(self):
        seen.append(("finalized", time.perf_counter()))


def collected(x):
    [[number] for number in range(300)]  # beyond the threshold of below
    return x * 2


def test_a_clock_that_is_read_while_garbage_is_collected_is_not_refused():
    thresholds = gc.get_threshold()
    captured = vd.capture(collected)
    Finalized()
    gc.set_threshold(20)
    gc.callbacks.append(clock)
    try:
        for number in range(3):
            x = torch.full((3,), float(number))
            assert torch.equal(captured(x), collected(x))
    finally:
        gc.callbacks.remove(clock)
        gc.set_threshold(*thresholds)
    assert {"start", "stop", "finalized"} <= {what for what, _ in seen}
    assert len(captured.programs) == 1
    assert clock not in gc.callbacks


def test_what_the_function_reads_after_a_collection_is_watched():
    def function(x):
        gc.collect()
        return x * time.perf_counter()

    with pytest.raises(vd.CaptureError, match="perf_counter"):
        vd.capture(function)(torch.ones(2))


def test_no_collection_seems_to_go_on():
    """A recording that heard of a beginning and of no end would watch nothing, and go stale."""
    factor = [2.0]
    thresholds = gc.get_threshold()
    gc.set_threshold(1)  # between any two lines
    try:
        for number in range(20):
            first, last = (lambda phase, info: None), (lambda phase, info: None)
            gc.callbacks.insert(0, first)
            gc.callbacks.append(last)
            captured = vd.capture(lambda x: x * factor[0])
            factor[0] = 2.0
            for _ in range(2):
                captured(torch.ones(2))
            factor[0] = 3.0 + number
            assert captured(torch.ones(2))[0] == factor[0]
            gc.callbacks.remove(first)
            gc.callbacks.remove(last)
        assert not is_collecting()
    finally:
        gc.set_threshold(*thresholds)


def reads_a_value(x):
    return x * x.sum().item()


def swallows(x):
    try:
        return reads_a_value(x)
    except vd.CaptureError:
        return x


def asks_a_clock(x):
    return x * time.perf_counter()


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


@pytest.mark.parametrize("function", [reads_a_value, swallows, asks_a_clock, checkpoints])
@pytest.mark.parametrize("refused", ["raise", "run"])
def test_a_refusal_keeps_nothing_alive(function, refused):
    checkpoints(torch.ones(1))  # the first of a process imports much, in cycles of its own
    gc.disable()
    try:
        simulate(2)(refused_in(function, refused))
    finally:
        gc.enable()
