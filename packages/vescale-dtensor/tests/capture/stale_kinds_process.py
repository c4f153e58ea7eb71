"""Kinds of state of the process, of the interpreter and of libraries, which code asks by calls."""

import contextvars
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

import numpy
import torch
from stale_kinds_asked import doubled_if, setting
from stale_kinds_objects import KINDS as KINDS
from torch import nn

KEPT = []
CONFIG = {"scale": 2.0}
FILE = os.path.join(tempfile.gettempdir(), f"capture_stale_{os.getpid()}")

# --- the interpreter

VARIABLE = contextvars.ContextVar("capture_scale", default=2.0)
setting(
    "copy of the context",
    lambda n: VARIABLE.set(2.0 + n),
    lambda x: x * contextvars.copy_context()[VARIABLE],
)
setting(
    "garbage collector",
    lambda n: gc.set_threshold(700 + n, 10, 10),
    lambda x: x * gc.get_threshold()[0],
)
setting(
    "locale",
    lambda n: locale.setlocale(locale.LC_ALL, ("C", "C.UTF-8")[n % 2]),
    lambda x: x * len(locale.setlocale(locale.LC_ALL)),
)
setting(
    "attribute of sys",
    lambda n: setattr(sys, "capture_factor", 2.0 + n),
    lambda x: x * sys.capture_factor,
)
setting(
    "name among the modules",
    lambda n: (
        sys.modules.setdefault("capture_named") if n % 2 else sys.modules.pop("capture_named", None)
    ),
    lambda x: x * 2 if "capture_named" in sys.modules else x,
)
setting("getrefcount", lambda n: KEPT.append(CONFIG), lambda x: x * sys.getrefcount(CONFIG))
setting("frame of the caller", lambda n: None, lambda x: x * len(sys._getframe(1).f_locals))
setting("stack", lambda n: None, lambda x: x * len(inspect.stack()))
setting(
    "code that is evaluated",
    lambda n: CONFIG.update(scale=2.0 + n),
    lambda x: x * eval("CONFIG['scale']"),
)

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
setting(
    "level of a logger by its name",
    lambda n: logging.getLogger("capture.named").setLevel(10 + n),
    lambda x: x * logging.getLogger("capture.named").level,
)
LOGGER = logging.getLogger("capture.above")
setting(
    "level of a parent's logger",
    lambda n: LOGGER.setLevel((10, 30)[n % 2]),
    doubled_if(lambda: LOGGER.getChild("below").isEnabledFor(20)),
)
setting(
    "all messages off",
    lambda n: logging.disable(10 * (n % 2)),
    doubled_if(lambda: logging.root.manager.disable),
)
setting(
    "handlers of the root",
    lambda n: logging.root.addHandler(logging.NullHandler()),
    lambda x: x * (1 + len(logging.root.handlers)),
)

# --- threads and processes


def another_thread(number):
    if number:
        KEPT.append(threading.Thread(target=threading.Event().wait, daemon=True))
        KEPT[-1].start()


setting(
    "attribute of the process",
    lambda n: setattr(multiprocessing.current_process(), "capture_factor", 2.0 + n),
    lambda x: x * multiprocessing.current_process().capture_factor,
)
setting("number of threads that run", another_thread, lambda x: x * threading.active_count())

# --- files and the world


def written(number):
    with open(FILE, "w") as file:
        file.write("a" * (1 + number) + "\n")
    linecache.checkcache()


setting("line of a file", written, lambda x: x * len(linecache.getline(FILE, 1)))
setting(
    "file of numpy",
    lambda n: numpy.array([n + 1.0]).tofile(FILE),
    lambda x: x * float(numpy.fromfile(FILE)[0]),
)
setting("process", lambda n: None, lambda x: x * subprocess.run(["true"]).returncode)

# --- numpy and random numbers

setting(
    "what numpy does about errors",
    lambda n: numpy.seterr(over=("warn", "ignore", "raise")[n % 3]),
    lambda x: x * len(numpy.geterr()["over"]),
)
setting(
    "state of numpy's generator",
    numpy.random.seed,
    lambda x: x * float(numpy.random.get_state()[1][0] % 97),
)
setting("state of random", random.seed, lambda x: x * (random.getstate()[1][0] % 97))
setting("state of torch's generator", torch.manual_seed, lambda x: x * torch.get_rng_state().sum())

# --- torch

TANH = nn.Tanh()
setting(
    "setting of the compiler",
    lambda n: setattr(torch._dynamo.config, "recompile_limit", 8 + n),
    lambda x: x * torch._dynamo.config.recompile_limit,
)


def hooked_straight(number):
    hooks = nn.modules.module._global_forward_hooks
    hooks.clear()
    if number:
        hooks[1] = lambda module, inputs, result: result * (number + 1)


setting("hook of all modules, written straight", hooked_straight, TANH)
