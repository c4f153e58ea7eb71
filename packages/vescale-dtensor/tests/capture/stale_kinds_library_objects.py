"""Kinds of state in locks, in memory, and in objects of the standard library and of torch."""

import configparser
import ctypes
import logging
import pickle  # noqa: TID251 - users have it
import threading
import weakref

import numpy
import torch
from stale_kinds import kind, mutated
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
    "lock that is tried",
    threading.Lock,
    mutated(turned),
    lambda x, v: tried(x, v, blocking=False),
)
kind(
    "finalizer",
    lambda: weakref.finalize(SHARED, int),
    mutated(lambda v: v.detach()),
    lambda x, v: x * (1 + v.alive),
)

# --- memory


next_byte = mutated(lambda v: v.__setitem__(0, v[0] + 1))
kind(
    "storage of a tensor",
    lambda: torch.ones(4, dtype=torch.uint8).untyped_storage(),
    next_byte,
    lambda x, v: x * v[0],
)
kind(
    "names of a numpy dtype",
    lambda: numpy.dtype([("a", "f4")]),
    mutated(lambda v: setattr(v, "names", (v.names[0] + "b",))),
    lambda x, v: x * len(v.names[0]),
)
MEMORY = numpy.ones(1)


def address():
    MEMORY.fill(2)
    return MEMORY.ctypes.data


kind(
    "memory by its address",
    address,
    mutated(lambda v: MEMORY.fill(MEMORY[0] + 1)),
    lambda x, v: x * ctypes.cast(v, ctypes.POINTER(ctypes.c_double))[0],
)

# --- objects of libraries

LETTER = torch.ones(1)


def by_tensors():
    found = WeakTensorKeyDictionary()
    found[LETTER] = 2.0
    return found


kind(
    "dictionary by tensors",
    by_tensors,
    mutated(lambda v: v.__setitem__(LETTER, v[LETTER] + 1)),
    lambda x, v: x * v[LETTER],
)


def parsed():
    found = configparser.ConfigParser()
    found.read_dict({"model": {"rate": "2.0"}})
    return found


kind(
    "entry of a configuration file",
    parsed,
    mutated(lambda v: v["model"].__setitem__("rate", "3.0")),
    lambda x, v: x * v.getfloat("model", "rate"),
)
kind(
    "adapter of a logger",
    lambda: logging.LoggerAdapter(logging.getLogger("stale"), {"scale": 2.0}),
    mutated(lambda v: v.extra.update(scale=3.0)),
    lambda x, v: x * v.extra["scale"],
)
kind(
    "level of a handler",
    logging.NullHandler,
    mutated(lambda v: v.setLevel(30)),
    lambda x, v: x * (1 + v.level),
)


class Pickled:
    factor = 2.0


kind(
    "class of what was pickled",
    lambda: (setattr(Pickled, "factor", 2.0), pickle.dumps(Pickled()))[1],
    mutated(lambda v: setattr(Pickled, "factor", 3.0)),
    lambda x, v: x * pickle.loads(v).factor,
)
