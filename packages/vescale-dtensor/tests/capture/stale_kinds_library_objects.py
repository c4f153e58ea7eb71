"""Kinds of state in locks, in memory, and in objects of the standard library and of torch."""

import argparse
import ast
import asyncio
import concurrent.futures
import configparser
import ctypes
import inspect
import io
import logging
import mmap
import pickle  # noqa: TID251 - users have it
import tempfile
import threading
import warnings
import weakref

import numpy
import torch
from stale_kinds import factor_is, kind, mutated, of_attribute
from stale_kinds_in_c import KINDS as KINDS
from stale_kinds_in_c import SHARED, itself
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
    "lock that is tried for a while",
    threading.Lock,
    mutated(turned),
    lambda x, v: tried(x, v, timeout=0.001),
)
kind(
    "semaphore that is tried",
    threading.Semaphore,
    mutated(lambda v: v.acquire(blocking=False) or v.release()),
    lambda x, v: tried(x, v, blocking=False),
)
kind(
    "broken barrier",
    lambda: threading.Barrier(2),
    mutated(lambda v: v.abort()),
    lambda x, v: x * (1 + v.broken),
)
kind(
    "result of a future",
    concurrent.futures.Future,
    mutated(lambda v: v.done() or v.set_result(3.0)),
    lambda x, v: x * (v.result() if v.done() else 1.0),
)
kind(
    "asynchronous event",
    asyncio.Event,
    mutated(lambda v: v.set()),
    lambda x, v: x * (1 + v.is_set()),
)
kind(
    "finalizer",
    lambda: weakref.finalize(SHARED, print),
    mutated(lambda v: v.detach()),
    lambda x, v: x * (1 + v.alive),
)

# --- memory


def mapped():
    with tempfile.TemporaryFile() as file:
        file.write(b"\x02" * 8)
        file.flush()
        return mmap.mmap(file.fileno(), 8)


next_byte = mutated(lambda v: v.__setitem__(0, v[0] + 1))
kind("mapped memory", mapped, next_byte, lambda x, v: x * v[0])
kind(
    "storage of a tensor",
    lambda: torch.ones(4, dtype=torch.uint8).untyped_storage(),
    next_byte,
    lambda x, v: x * v[0],
)
kind(
    "size of a storage",
    lambda: torch.ones(4, dtype=torch.uint8).untyped_storage(),
    mutated(lambda v: v.resize_(v.nbytes() + 2)),
    lambda x, v: x * v.nbytes(),
)
kind(
    "names of a numpy dtype",
    lambda: numpy.dtype([("a", "f4")]),
    mutated(lambda v: setattr(v, "names", (v.names[0] + "b",))),
    lambda x, v: x * len(v.names[0]),
)
kind(
    "hard mask of an array",
    lambda: numpy.ma.array([1.0, 2.0], mask=[0, 1]),
    mutated(lambda v: v.harden_mask()),
    lambda x, v: x * (1 + v.hardmask),
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
kind(
    "engine of Sobol numbers",
    lambda: torch.quasirandom.SobolEngine(1),
    itself,
    lambda x, v: x * v.draw(1).sum(),
)
kind(
    "engine of Sobol numbers, moved",
    lambda: torch.quasirandom.SobolEngine(1),
    mutated(lambda v: v.fast_forward(1)),
    lambda x, v: x * (1 + v.num_generated),
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
kind("parsed arguments", lambda: argparse.Namespace(factor=2.0), factor_is(3.0), of_attribute)
kind(
    "syntax tree",
    lambda: ast.parse("2.0"),
    mutated(lambda v: setattr(v.body[0].value, "value", 3.0)),
    lambda x, v: x * ast.literal_eval(v.body[0].value),
)
kind(
    "bound arguments",
    lambda: inspect.signature(lambda a: a).bind(2.0),
    mutated(lambda v: v.arguments.update(a=3.0)),
    lambda x, v: x * v.arguments["a"],
)
kind(
    "adapter of a logger",
    lambda: logging.LoggerAdapter(logging.getLogger("stale"), {"scale": 2.0}),
    mutated(lambda v: v.extra.update(scale=3.0)),
    lambda x, v: x * v.extra["scale"],
)
kind(
    "record of a log",
    lambda: logging.LogRecord("stale", 1, "", 2, "", (), None),
    mutated(lambda v: setattr(v, "lineno", 3)),
    lambda x, v: x * v.lineno,
)
kind(
    "level of a handler",
    logging.NullHandler,
    mutated(lambda v: v.setLevel(30)),
    lambda x, v: x * (1 + v.level),
)
kind(
    "caught warning",
    lambda: warnings.WarningMessage("none", UserWarning, "", 2),
    mutated(lambda v: setattr(v, "lineno", 3)),
    lambda x, v: x * v.lineno,
)
kind(
    "text in memory",
    lambda: io.StringIO("aa"),
    mutated(lambda v: v.write("aaa")),
    lambda x, v: x * len(v.getvalue()),
)


class Pickled:
    factor = 2.0


kind(
    "class of what was pickled",
    lambda: (setattr(Pickled, "factor", 2.0), pickle.dumps(Pickled()))[1],
    mutated(lambda v: setattr(Pickled, "factor", 3.0)),
    lambda x, v: x * pickle.loads(v).factor,
)
