"""What Python does when it collects garbage is no part of a captured function."""

import gc
import time

import pytest
import torch
import vescale_dtensor as vd

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
