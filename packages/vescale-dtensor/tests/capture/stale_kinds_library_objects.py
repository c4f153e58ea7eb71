"""Kinds of state in locks, in memory, and in objects of the standard library and of torch."""

import configparser
import ctypes
import logging
import pickle  # noqa: TID251 - users have it
import threading
import weakref

import numpy
import torch
from stale_kinds import another, in_place, kind, mutated
from stale_kinds_in_c import KINDS as KINDS
from stale_kinds_in_c import SHARED
from torch.utils.weak import WeakTensorKeyDictionary

# --- locks, futures, references


def turned(lock):
    lock.release() if lock.locked() else lock.acquire()


def tried(x, lock, **how):
    had = lock.acquire(**how)
    if had:
        lock.release()
    return x * 2 if had else x * 3


kind(
    "lock that is tried", threading.Lock, mutated(turned), lambda x, v: tried(x, v, blocking=False)
)
in_place(
    "finalizer", lambda: weakref.finalize(SHARED, int), lambda v: v.detach(), lambda v: 1 + v.alive
)

# --- memory


next_byte = mutated(lambda v: v.__setitem__(0, v[0] + 1))
another(
    "storage of a tensor",
    lambda: torch.ones(4, dtype=torch.uint8).untyped_storage(),
    next_byte,
    lambda v: v[0],
)
in_place(
    "names of a numpy dtype",
    lambda: numpy.dtype([("a", "f4")]),
    lambda v: setattr(v, "names", (v.names[0] + "b",)),
    lambda v: len(v.names[0]),
)
MEMORY = numpy.ones(1)


def address():
    MEMORY.fill(2)
    return MEMORY.ctypes.data


in_place(
    "memory by its address",
    address,
    lambda v: MEMORY.fill(MEMORY[0] + 1),
    lambda v: ctypes.cast(v, ctypes.POINTER(ctypes.c_double))[0],
)

# --- objects of libraries

LETTER = torch.ones(1)


def by_tensors():
    found = WeakTensorKeyDictionary()
    found[LETTER] = 2.0
    return found


in_place(
    "dictionary by tensors",
    by_tensors,
    lambda v: v.__setitem__(LETTER, v[LETTER] + 1),
    lambda v: v[LETTER],
)


def parsed():
    found = configparser.ConfigParser()
    found.read_dict({"model": {"rate": "2.0"}})
    return found


in_place(
    "entry of a configuration file",
    parsed,
    lambda v: v["model"].__setitem__("rate", "3.0"),
    lambda v: v.getfloat("model", "rate"),
)
in_place(
    "adapter of a logger",
    lambda: logging.LoggerAdapter(logging.getLogger("stale"), {"scale": 2.0}),
    lambda v: v.extra.update(scale=3.0),
    lambda v: v.extra["scale"],
)
in_place("level of a handler", logging.NullHandler, lambda v: v.setLevel(30), lambda v: 1 + v.level)


class Pickled:
    factor = 2.0


in_place(
    "class of what was pickled",
    lambda: (setattr(Pickled, "factor", 2.0), pickle.dumps(Pickled()))[1],
    lambda v: setattr(Pickled, "factor", 3.0),
    lambda v: pickle.loads(v).factor,
)
