"""Garbage: what Python frees at a time of its own choosing, on each rank at another one."""

import gc
import random
import sys
from contextlib import contextmanager


class _Box:
    pass


def bury(*values):
    """Let go of values so that only a collection of garbage frees them."""
    box = _Box()
    box.me, box.values = box, values


@contextmanager
def garbage_at_random(rank, seed=0, share=0.001):
    """Collect garbage at random calls on rank 0, never on the other odd ones, as usual elsewhere.

    Args:
        rank: this one.
        seed: of the choice.
        share: of the calls of Python functions at which garbage is collected.
    """
    chance = random.Random(seed)

    def called(frame, event, argument):
        if event == "call" and chance.random() < share:
            gc.collect()

    gc.collect()
    before = sys.getprofile()
    try:
        if rank % 2:
            gc.disable()
        elif not rank:
            sys.setprofile(called)
        yield
    finally:
        sys.setprofile(before)
        gc.enable()
