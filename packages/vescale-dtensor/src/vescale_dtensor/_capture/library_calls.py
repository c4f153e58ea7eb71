"""Python functions of libraries that give state of the process: what the guard asks in their place.

Their code counts as constant, and what they read (registries, caches, threads) is not followed.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import linecache
import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.process import current_process
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from vescale_dtensor._capture.code_files import TORCH, USER, is_of_python, kind_of_code
from vescale_dtensor._capture.library_settings import settings_read_by
from vescale_dtensor._capture.looks import level_of
from vescale_dtensor._capture.process_state import running_loop, warning_filters
from vescale_dtensor._torch.compat import config_accessors, print_options

_EINSUM = "/torch/backends/opt_einsum/__init__.py"
_OF_NUMPY = ("/numpy/_core/arrayprint.py", "/numpy/_core/_ufunc_config.py")

# Not what these call, which sets some for a while.
_PRINTING = frozenset(
    {"geterr", "get_printoptions", "_array_str_implementation", "_array_repr_implementation"}
    | {"geterrcall", "array2string", "getbufsize", "seterr", "set_printoptions", "setbufsize"}
)


def _codes(*functions: Any) -> dict[int, str]:
    """The names of functions, by the ids of their code, which lives as long as they."""
    return {id(f.__code__): f.__qualname__ for f in functions if isinstance(f, FunctionType)}


_FAST_PATH = _codes(torch.backends.mha.get_fastpath_enabled)
_THREAD = _codes(threading.current_thread)
_MAIN_THREAD = _codes(threading.main_thread)
_THREADS = _codes(threading.active_count, threading.enumerate)
_PROCESS = _codes(current_process)
_IMPORTS = _codes(importlib.import_module)
_LOGGERS = _codes(logging.getLogger)
_LEVELS = _codes(logging.getLevelName, logging.getLevelNamesMapping)
# A replay would not set again what these set: that it is set so is guarded.
_DISABLING = _codes(logging.disable)
_FILTERING = _codes(warnings.simplefilter, warnings.filterwarnings, warnings.resetwarnings)
_TORCH_PRINTING = _codes(torch.set_printoptions)
_CONFIGS = _codes(*config_accessors())
# What frames and files hold, no guard compares.
_UNSTEADY = _codes(
    *(linecache.getline, linecache.getlines, inspect.stack, inspect.currentframe, inspect.trace),
    *(traceback.extract_stack, traceback.format_stack),
    *(ctypes.cast, ctypes.string_at, ctypes.CDLL.__init__),
)
_BY_ARGUMENTS = _IMPORTS | _LOGGERS | _CONFIGS | _UNSTEADY


def is_by_arguments(code: CodeType) -> bool:
    """Whether code is of a function whose every call matters, not only the first."""
    return id(code) in _BY_ARGUMENTS


def guarded_by_code(code: CodeType) -> Callable[[], Any] | None:
    """What gives the state that a Python function of a library is asked for; None if none."""
    key = id(code)
    if key in _FAST_PATH:
        return torch.backends.mha.get_fastpath_enabled
    if key in _THREAD:
        return partial(_state_of, threading.current_thread)
    if key in _MAIN_THREAD:
        return partial(_state_of, threading.main_thread)
    if key in _THREADS:
        return _threads
    if key in _PROCESS:
        return _process_state
    if key in _LEVELS:
        return _level_names
    if key in _DISABLING:
        return partial(getattr, logging.root.manager, "disable")
    if key in _FILTERING:
        return warning_filters
    if key in _TORCH_PRINTING:
        return print_options
    if code.co_name == "current_task" and code.co_filename.endswith("/asyncio/tasks.py"):
        return running_loop
    if code.co_name in _PRINTING and code.co_filename.endswith(_OF_NUMPY):
        return _numpy_state
    if code.co_filename.endswith(_EINSUM):
        return _einsum_state
    known = is_of_python(code) or code.co_filename.startswith(TORCH)
    return settings_read_by(code) if known else None


def guarded_by_call(frame: FrameType) -> Callable[[], Any] | None:
    """The same of a function that is given which state, in the frame that begins."""
    key, given = id(frame.f_code), frame.f_locals
    if key in _LOGGERS:
        # Made now where there is none, as the function is about to.
        return partial(level_of, logging.getLogger(given.get("name")))
    if key in _CONFIGS and not str(given["name"]).startswith("_"):
        return partial(getattr, given["self"], given["name"], None)
    return None


def imported_by(frame: FrameType) -> str | None:
    """The absolute name that a call of `importlib.import_module` is given."""
    name = frame.f_locals.get("name") if id(frame.f_code) in _IMPORTS else None
    return name if isinstance(name, str) else None


def unsteady_call(frame: FrameType) -> str | None:
    """The name of a function, about to run for the user, that gives what no guard compares."""
    name = _UNSTEADY.get(id(frame.f_code))
    caller = frame.f_back
    return name if caller is not None and kind_of_code(caller.f_code) == USER else None


def _state_of(which: Callable[[], threading.Thread]) -> Any:
    """What code may ask of a thread; not streams and locks."""
    thread = which()
    own = {name: value for name, value in vars(thread).items() if not name.startswith("_")}
    return thread.ident, thread.name, thread.daemon, *own, *own.values()


def _process_state() -> Any:
    """What code may ask of its process."""
    process = current_process()
    own = vars(process)
    return process.pid, *own, *own.values()


def _level_names() -> Any:
    """The names of levels of messages."""
    # Several levels may have had one name, and the last of them has it.
    found = logging.getLevelNamesMapping()
    return tuple(found), tuple(map(logging.getLevelName, found.values()))


def _threads() -> Any:
    """All threads that run."""
    return tuple(threading.enumerate())


def _einsum_state() -> Any:
    """Whether, and how, torch looks for an order in which `einsum` contracts."""
    state: Any = torch.backends.opt_einsum
    return state.enabled, state.strategy


def _numpy_state() -> Any:
    """How numpy prints arrays, and what it does about errors of floating point."""
    numpy: Any = sys.modules["numpy"]
    errors = repr(numpy.geterr()), numpy.geterrcall()
    return repr(numpy.get_printoptions()), *errors, numpy.getbufsize()
