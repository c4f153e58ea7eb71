"""Kinds of state of the process, of the interpreter and of libraries, which code asks by calls."""

import gc
import inspect
import linecache
import locale
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import warnings
from contextvars import ContextVar, copy_context

import numpy
import torch
from stale_kinds_asked import asked, setting
from stale_kinds_objects import KINDS as KINDS
from torch import nn

KEPT = []
TABLE = {"scale": 2.0}
FILE = os.path.join(tempfile.gettempdir(), f"capture_stale_{os.getpid()}")

# --- the interpreter

VARIABLE = ContextVar("capture_scale", default=2.0)
asked("copy of the context", lambda n: VARIABLE.set(2.0 + n), lambda: copy_context()[VARIABLE])
asked(
    "garbage collector", lambda n: gc.set_threshold(700 + n, 10, 10), lambda: gc.get_threshold()[0]
)
asked(
    "locale",
    lambda n: locale.setlocale(locale.LC_ALL, ("C", "C.UTF-8")[n % 2]),
    lambda: len(locale.setlocale(locale.LC_ALL)),
)
asked("attribute of sys", lambda n: setattr(sys, "stale_factor", 2.0 + n), lambda: sys.stale_factor)
asked(
    "name among the modules",
    lambda n: (
        sys.modules.setdefault("capture_named") if n % 2 else sys.modules.pop("capture_named", None)
    ),
    lambda: "capture_named" in sys.modules,
)
asked("getrefcount", lambda n: KEPT.append(TABLE), lambda: sys.getrefcount(TABLE))
asked("frame of the caller", lambda n: None, lambda: len(sys._getframe(1).f_locals))
asked("stack", lambda n: None, lambda: len(inspect.stack()))
asked("code that is evaluated", lambda n: TABLE.update(scale=2 + n), lambda: eval("TABLE['scale']"))

# --- warnings and logs


def warned(x):
    try:
        warnings.warn("capture_stale", stacklevel=1)
    except UserWarning:
        return x * 2
    return x


setting(
    "warnings that are raised",
    lambda n: warnings.filterwarnings("error" if n % 2 else "ignore", "capture_stale"),
    warned,
)
asked(
    "level of a logger by its name",
    lambda n: logging.getLogger("capture.named").setLevel(10 + n),
    lambda: logging.getLogger("capture.named").level,
)
LOGGER = logging.getLogger("capture.above")
asked(
    "level of a parent's logger",
    lambda n: LOGGER.setLevel((10, 30)[n % 2]),
    lambda: LOGGER.getChild("below").isEnabledFor(20),
)
asked("all messages off", lambda n: logging.disable(10 * (n % 2)), lambda: LOGGER.manager.disable)
asked(
    "handlers of the root",
    lambda n: logging.root.addHandler(logging.NullHandler()),
    lambda: 1 + len(logging.root.handlers),
)

# --- threads and processes


def another_thread(number):
    if number:
        KEPT.append(threading.Thread(target=threading.Event().wait, daemon=True))
        KEPT[-1].start()


asked(
    "attribute of the process",
    lambda n: setattr(multiprocessing.current_process(), "stale_factor", 2.0 + n),
    lambda: multiprocessing.current_process().stale_factor,
)
asked("number of threads that run", another_thread, threading.active_count)

# --- files and the world


def written(number):
    with open(FILE, "w") as file:
        file.write("a" * (1 + number) + "\n")
    linecache.checkcache()


asked("line of a file", written, lambda: len(linecache.getline(FILE, 1)))
asked(
    "file of numpy",
    lambda n: numpy.array([n + 1.0]).tofile(FILE),
    lambda: float(numpy.fromfile(FILE)[0]),
)
asked("process", lambda n: None, lambda: subprocess.run(["true"]).returncode)

# --- numpy and random numbers

asked(
    "what numpy does about errors",
    lambda n: numpy.seterr(over=("warn", "ignore", "raise")[n % 3]),
    lambda: len(numpy.geterr()["over"]),
)
asked(
    "state of numpy's generator",
    numpy.random.seed,
    lambda: float(numpy.random.get_state()[1][0] % 97),
)
asked("state of random", random.seed, lambda: random.getstate()[1][0] % 97)
asked("state of torch's generator", torch.manual_seed, lambda: torch.get_rng_state().sum())

# --- torch

TANH = nn.Tanh()
asked(
    "setting of the compiler",
    lambda n: setattr(torch._dynamo.config, "recompile_limit", 8 + n),
    lambda: torch._dynamo.config.recompile_limit,
)


def hooked_straight(number):
    hooks = nn.modules.module._global_forward_hooks
    hooks.clear()
    if number:
        hooks[1] = lambda module, inputs, result: result * (number + 1)


setting("hook of all modules, written straight", hooked_straight, TANH)
