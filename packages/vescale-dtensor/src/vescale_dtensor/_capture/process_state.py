"""What Python code can ask of the process and of the world: state to guard, and what to refuse.

A recording hears of every call of a function written in C. Those that give state of the process,
and take no arguments, are asked again by the guard. Those that give something else each time, or
read files, are refused, whoever of the standard library asked them on behalf of the user.
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
import gc
import importlib
import inspect
import io
import os
import random
import string
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import date
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from vescale_dtensor._capture.code_files import LIBRARY, TORCH, USER, kind_of_code
from vescale_dtensor._torch.compat import state_getters

_GETTERS = frozenset([*state_getters(), os.getcwd, gc.isenabled, sys.getrecursionlimit])
# Methods of objects in C that tell a state: of locks, of torch's generators.
_METHODS = frozenset({"locked", "initial_seed"})
_CLOCK_NAMES = """
time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns
thread_time thread_time_ns clock_gettime clock_gettime_ns localtime gmtime ctime asctime strftime
"""
_CLOCKS = frozenset(
    [getattr(time, name) for name in _CLOCK_NAMES.split() if hasattr(time, name)]
    + [os.times, getattr(uuid, "_generate_time_safe", None) or os.times]
)
_NOW = frozenset({"now", "utcnow", "today"})
# What all functions of `random` come down to.
_DRAWS = frozenset({"random", "getrandbits"})
_INPUTS = frozenset(
    {builtins.input, io.open, os.urandom, os.open, os.read, os.stat, os.lstat, os.access}
    | {os.listdir, os.scandir, os.readlink}
)
_SEEDS = frozenset({"manual_seed", "seed"})
_THREADS = frozenset({"start_new_thread", "start_joinable_thread"})
# These ask clocks how long they have waited.
_WAITING = tuple(
    f"/{name}" for name in ("threading", "queue", "concurrent", "selectors", "asyncio")
)
_FROZEN = ("<frozen os>", "<frozen posixpath>", "<frozen genericpath>", "<frozen ntpath>")
_READERS_OF_FILES = ("/numpy/", f"{TORCH}/serialization.py", *_FROZEN)


# Most functions in C that are called are none of these.
_NAMES = frozenset(
    {f.__name__ for f in (*_GETTERS, *_CLOCKS, *_INPUTS)}
    | {
        *_METHODS,
        *_NOW,
        *_DRAWS,
        *_SEEDS,
        *_THREADS,
        "dir",
        "vars",
        "dump",
        "dumps",
        "__subclasses__",
    }
)


def _codes(*functions: Any) -> frozenset[CodeType]:
    return frozenset(f.__code__ for f in functions if isinstance(f, FunctionType))


_BY_ANY_NAME = _codes(
    *(getattr(dataclasses, n, None) for n in ("_asdict_inner", "_astuple_inner", "replace")),
    *(getattr(dataclasses, "_replace", None), getattr(copy, "_reconstruct", None)),
    *(inspect.getmembers, inspect.getattr_static, string.Formatter.get_field),
)
_BY_ANY_NAME_IN_C = frozenset({builtins.dir, builtins.vars})
_FAST_PATH = _codes(torch.backends.mha.get_fastpath_enabled)
_THREAD = _codes(threading.current_thread)
_EINSUM = "/torch/backends/opt_einsum/__init__.py"
_IMPORTS = _codes(importlib.import_module)


def is_noted(function: Any) -> bool:
    """Whether a call of a function in C matters at all, by its name."""
    if function.__name__ in _NAMES:
        return True
    return _is_numpys(type(getattr(function, "__self__", None)))


def reads_any_attribute(asked: Any) -> bool:
    """Whether a function, or a code object, reads attributes of objects whatever their names."""
    if isinstance(asked, CodeType):
        return asked in _BY_ANY_NAME
    # Pickling reads all that an object has.
    pickles = getattr(asked, "__name__", "") in ("dump", "dumps")
    return asked in _BY_ANY_NAME_IN_C or (pickles and "pickle" in str(asked.__module__))


def guarded_by_code(code: CodeType) -> Callable[[], Any] | None:
    """What gives the state that a Python function of a library is asked for; None if none."""
    if code in _FAST_PATH:
        return torch.backends.mha.get_fastpath_enabled
    if code in _THREAD:
        return _thread_state
    return _einsum_state if code.co_filename.endswith(_EINSUM) else None


def _thread_state() -> Any:
    """What code may ask of its thread; not the thread, which holds streams and locks."""
    thread = threading.current_thread()
    return thread.ident, thread.name, thread.daemon


def _einsum_state() -> Any:
    """Whether, and how, torch looks for an order in which `einsum` contracts."""
    state: Any = torch.backends.opt_einsum
    return state.enabled, state.strategy


def imported_by(frame: FrameType) -> str | None:
    """The absolute name that a call of `importlib.import_module` is given."""
    name = frame.f_locals.get("name") if frame.f_code in _IMPORTS else None
    return name if isinstance(name, str) else None


def guarded_by(function: Any, frame: FrameType) -> Callable[[], Any] | None:
    """What gives the state that a function in C has been asked for; None if it gives none."""
    if function in _GETTERS:
        return function  # type: ignore[no-any-return]
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if name in _METHODS and (name != "locked" or kind_of_code(frame.f_code) == USER):
        return function  # type: ignore[no-any-return]
    if name == "__subclasses__" and isinstance(owner, type):
        # A tuple, as lists are compared by identity.
        return lambda: tuple(type.__subclasses__(owner))
    return None


def moves_generator(function: Any) -> bool:
    """Whether a function in C seeds one of torch's generators: to where it stands already, too."""
    owner = getattr(function, "__self__", None)
    return function.__name__ in _SEEDS and isinstance(owner, torch.Generator)


def starts_thread(function: Any, frame: FrameType) -> bool:
    """Whether a function in C starts a thread for code of the user's."""
    owner = getattr(function, "__self__", None)
    if function.__name__ not in _THREADS or getattr(owner, "__name__", "") != "_thread":
        return False
    return _is_for_user(frame, ())


def is_unsteady(function: Any, frame: FrameType | None = None) -> bool:
    """Whether a function in C gives another value each time.

    Args:
        function: it.
        frame: the frame that calls it; None for whoever might.
    """
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    # By object and not by function: `random.random` is a bound method of a hidden generator. Not
    # getstate and setstate, which a simulation calls where it goes on with another rank.
    if (isinstance(owner, random.Random) and name in _DRAWS) or _is_numpys(type(owner)):
        return frame is None or _is_for_user(frame, ())
    if function in _INPUTS:
        return frame is None or _is_for_user(frame, _READERS_OF_FILES)
    clock = name in _NOW and isinstance(owner, type) and issubclass(owner, date)
    if not clock and function not in _CLOCKS:
        return False
    if frame is None:
        return True
    waiting = any(part in frame.f_code.co_filename for part in _WAITING)
    return not waiting and _is_for_user(frame, ())


def _is_numpys(cls: type) -> bool:
    """Whether a class is a random generator of numpy."""
    return cls.__module__.startswith("numpy.random")


def _is_for_user(frame: FrameType | None, through: tuple[str, ...]) -> bool:
    """Whether code of the user's asked, be it through the standard library.

    Libraries read clocks to measure themselves, loggers to say when. But `random.choice`, `uuid4`
    and `Path.read_text` give what they get to whoever called them.
    """
    while frame is not None:
        code = frame.f_code
        kind = kind_of_code(code)
        if kind == USER:
            return True
        if kind == LIBRARY and not any(part in code.co_filename for part in through):
            return False
        frame = frame.f_back
    return False


def numpy_draws() -> Any:
    """Where numpy's own generator stands, whose functions no profiler hears of."""
    module: Any = sys.modules.get("numpy.random")
    if module is None:
        return None
    state = module.get_state(legacy=False)
    return [v.tobytes() if hasattr(v, "tobytes") else v for v in state["state"].values()]
