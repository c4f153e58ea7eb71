"""What Python code can ask of the process and of the world: state to guard, and what to refuse.

A recording hears of every call of a function written in C. Those that give state of the process,
and take no arguments, are asked again by the guard. Those that give something else each time, or
read files, are refused, whoever of the standard library asked them on behalf of the user.
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
import faulthandler
import functools
import gc
import inspect
import io
import locale
import os
import random
import string
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from datetime import date
from importlib import import_module, reload
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType
from typing import Any, Protocol

import torch

from vescale_dtensor._capture.code_files import LIBRARY, TORCH, USER, kind_of_code
from vescale_dtensor._capture.library_settings import copying_state, csv_state
from vescale_dtensor._torch.settings import setting_of, settings_getters, state_getters

# Those of modules that not every Python has, by name.
_OPTIONAL = ((sys, "get_int_max_str_digits"), (sys, "getswitchinterval"), (gc, "get_threshold"))
_GETTERS = frozenset(
    [*state_getters(), os.getcwd, gc.isenabled, sys.getrecursionlimit]
    + [getattr(module, name) for module, name in _OPTIONAL if hasattr(module, name)]
)
# The same, where the user asks: libraries ask them all the time, for themselves.
_GETTERS_OF_USERS = frozenset(
    {threading.get_ident, threading.get_native_id, sys.gettrace, faulthandler.is_enabled}
    | {getattr(os, name) for name in ("getpid", "getppid") if hasattr(os, name)}
)
# Settings of torch, where the user asks for them, be it through these files of torch.
_SETTINGS = frozenset(settings_getters()) - _GETTERS
_THROUGH_TORCH = tuple(
    f"{TORCH}{name}" for name in ("__init__.py", "backends/", "autograd/", "amp/", "utils/determ")
)
# What turns moments into local time, by the zone of the process.
_ZONED = frozenset({"astimezone", "fromtimestamp", "timestamp", "mktime"})
_LOOPS = frozenset({"get_running_loop", "_get_running_loop", "get_event_loop", "current_task"})
# Methods of objects in C that tell a state: of locks, of torch's generators.
_METHODS = frozenset({"locked", "initial_seed"})
_CLOCK_NAMES = """
time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns
thread_time thread_time_ns clock_gettime clock_gettime_ns localtime gmtime ctime asctime strftime
"""
_CLOCKS = frozenset(
    [getattr(time, name) for name in _CLOCK_NAMES.split() if hasattr(time, name)]
    + [os.times, getattr(uuid, "_generate_time_safe", None) or os.times]
    + [threading.stack_size]  # which sets what it gives
)
CLOCK_METHODS = frozenset({"now", "utcnow", "today"})
"""Methods of dates that ask a clock."""
# What all functions of `random` come down to.
_DRAWS = frozenset({"random", "getrandbits"})
_INPUTS = frozenset(
    {builtins.input, io.open, os.urandom, os.open, os.read, os.stat, os.lstat, os.access}
    | {os.listdir, os.scandir, os.readlink}
)
# Modules in C that tell of the process and the world. What of them is not listed below is refused.
_WORLD = frozenset(
    {"posix", "nt", "sys", "gc", "resource", "select", "fcntl", "termios", "pwd", "grp", "_sqlite3"}
    | {"_signal", "_socket", "_ssl", "_posixsubprocess", "_winapi", "_weakref", "_tracemalloc"}
)
_HARMLESS_NAMES = """
sys: intern getsizeof exc_info exception getdefaultencoding getfilesystemencoding is_finalizing
sys: getfilesystemencodeerrors _getframe _getframemodulename gettrace settrace getprofile setprofile
sys: audit _is_gil_enabled displayhook _clear_type_cache _clear_internal_caches
gc: collect enable disable freeze unfreeze is_tracked is_finalized
posix: fspath getpid getppid cpu_count sched_getaffinity strerror _path_normpath isatty
_weakref: proxy _remove_dead_weakref
"""
_HARMLESS = frozenset(
    (module, name)
    for module, _, names in (line.partition(": ") for line in _HARMLESS_NAMES.split("\n"))
    for name in names.split()
)
_READS = frozenset({"read", "read1", "readline", "readlines", "readinto", "peek", "tell"})
_LOADING = frozenset({"load", "loads"})
_ADDRESSED = frozenset({"in_dll", "from_address"})  # memory that ctypes finds by itself
_SEEDS = frozenset({"manual_seed", "seed"})
_PICKLING = frozenset({"dump", "dumps"})
_WARNS = frozenset({"warn", "warn_explicit"})
_THREADS = frozenset({"start_new_thread", "start_joinable_thread"})
# These ask clocks how long they have waited.
_WAITING = tuple(
    f"/{name}" for name in ("threading", "queue", "concurrent", "selectors", "asyncio")
)
_IN_MEMORY = (io.StringIO, io.BytesIO)
_LRU: type = type(functools.lru_cache(lambda: None))
_FROZEN = ("<frozen os>", "<frozen posixpath>", "<frozen genericpath>", "<frozen ntpath>")
_READERS_OF_FILES = (
    *("/numpy/", f"{TORCH}serialization.py", "/importlib/resources/", "/importlib/readers.py"),
    *_FROZEN,
)
# What Python's imports do, and what `pkgutil` asks of them for the user.
_IMPORTS = "<frozen importlib"


_NOTED_MODULES = _WORLD | {"_locale", "_csv"}
# Most functions in C that are called are none of these.
_NAMES = frozenset(
    {f.__name__ for f in (*_GETTERS, *_SETTINGS, *_GETTERS_OF_USERS, *_CLOCKS, *_INPUTS)}
    | {
        *_ZONED,
        *_LOOPS,
        "acquire",
        *_LOADING,
        *_ADDRESSED,
        *_METHODS,
        *CLOCK_METHODS,
        *_DRAWS,
        *_SEEDS,
        *_THREADS,
        "dir",
        "vars",
        *_PICKLING,
        "__subclasses__",
        "cache_info",
        "fromfile",
        "_getframe",
        "print",
        "apply",
        *_READS,
        *_WARNS,
    }
)


def _codes(*functions: Any) -> frozenset[CodeType]:
    return frozenset(f.__code__ for f in functions if isinstance(f, FunctionType))


_BY_ANY_NAME = _codes(
    *(getattr(dataclasses, n, None) for n in ("_asdict_inner", "_astuple_inner", "replace")),
    *(getattr(dataclasses, "_replace", None), getattr(copy, "_reconstruct", None)),
    *(inspect.getmembers, inspect.getattr_static, string.Formatter.get_field),
    # `isinstance` asks whether an object has what a protocol names.
    *vars(type(Protocol)).values(),
)
_BY_ANY_NAME_IN_C = frozenset({builtins.dir, builtins.vars})


def is_noted(function: Any) -> bool:
    """Whether a call of a function in C matters at all, by its name."""
    if function.__name__ in _NAMES or getattr(function, "__module__", None) in _NOTED_MODULES:
        return True
    owner = type(getattr(function, "__self__", None))
    return _is_numpys(owner) or _is_open_file(owner)


def reads_any_attribute(asked: Any) -> bool:
    """Whether a function, or a code object, reads attributes of objects whatever their names."""
    if isinstance(asked, CodeType):
        return asked in _BY_ANY_NAME
    # Pickling reads all that an object has.
    pickles = getattr(asked, "__name__", "") in _PICKLING
    return asked in _BY_ANY_NAME_IN_C or (pickles and "pickle" in str(asked.__module__))


def guarded_by(function: Any, frame: FrameType) -> Callable[[], Any] | None:
    """What gives the state that a function in C has been asked for; None if it gives none."""
    if function in _GETTERS:
        return function  # type: ignore[no-any-return]
    if function in _SETTINGS and _is_for_user(frame, _THROUGH_TORCH):
        return functools.partial(setting_of, function)
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    module = getattr(function, "__module__", None)
    if module == "_locale" and _is_for_user(frame, ()):
        return _locale
    if module == "_csv":
        return csv_state
    if module == "gc" and name in ("enable", "disable"):  # which a replay would not do again
        return gc.isenabled
    if name in _PICKLING and "pickle" in str(module):
        return copying_state
    if module == "_warnings" and name in _WARNS and _is_for_user(frame, ()):
        return warning_filters
    if name in _METHODS and (name != "locked" or kind_of_code(frame.f_code) == USER):
        return function  # type: ignore[no-any-return]
    look = _for_users(function, owner, name)
    if look is not None and _is_for_user(frame, ()):
        return look
    if name == "__subclasses__" and isinstance(owner, type):
        # A tuple, as lists are compared by identity.
        return lambda: tuple(type.__subclasses__(owner))
    return None


def _for_users(function: Any, owner: Any, name: str) -> Callable[[], Any] | None:
    """What gives the state that matters where code of the user's asks for it."""
    if function in _GETTERS_OF_USERS:
        return function  # type: ignore[no-any-return]
    if name == "acquire" and type(owner).__module__ == "_thread":
        # Whether a lock could be had; of a lock that may be taken twice, nothing else tells.
        return functools.partial(repr, owner)
    if name == "sched_getaffinity":
        return lambda: tuple(sorted(os.sched_getaffinity(0)))
    if name in _LOOPS and getattr(function, "__module__", "") == "_asyncio":
        return running_loop
    return _zone if name in _ZONED else None


def _zone() -> Any:
    """The zone of local time."""
    return time.tzname, time.timezone, time.altzone


def running_loop() -> Any:
    """The event loop that runs in this thread, and its task."""
    module: Any = sys.modules["asyncio"]
    try:
        return module.get_running_loop(), module.current_task()
    except RuntimeError:
        return None


def _locale() -> Any:
    """The locale of the process, of all categories."""
    return locale.setlocale(locale.LC_ALL)


def warning_filters() -> Any:
    """What decides whether a warning is printed, or raised."""
    return tuple(warnings.filters)


def is_unsteady_method(name: str) -> bool:
    """Whether methods of this name give another value each time."""
    return name in CLOCK_METHODS or name in _DRAWS or name in _READS


def getter_of(function: Any) -> Any:
    """A function in C, if it gives state that a guard can ask for; else None."""
    return function if function in _GETTERS else None


def is_asked(function: Any) -> bool:
    """Whether it is a function in C that gives state, or another value each time."""
    if not isinstance(function, BuiltinFunctionType):
        return False
    return function in _GETTERS or (is_noted(function) and is_unsteady(function))


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
    if function in _INPUTS or _reads_files(function, owner, name):
        return frame is None or _is_for_user(frame, _READERS_OF_FILES)
    if name == "_getframe" and function is sys._getframe:
        return frame is not None and _looks_at_callers(frame)
    if name == "cache_info" and type(owner) is _LRU:
        return frame is None or _is_for_user(frame, ())
    clock = name in CLOCK_METHODS and isinstance(owner, type) and issubclass(owner, date)
    world = _tells_of_world(function, name)
    if not clock and not world and function not in _CLOCKS:
        return False
    if frame is None:
        return True
    waiting = any(part in frame.f_code.co_filename for part in _WAITING)
    return not waiting and _is_for_user(frame, ())


def _looks_at_callers(frame: FrameType) -> bool:
    """Whether code of the user's asks for frames, other than in the body of a module."""
    return kind_of_code(frame.f_code) == USER and not _is_importing(frame)


def is_called_by_users(frame: FrameType | None) -> bool:
    """Whether code of the user's led to a call that was heard of: by way of C, not of a library.

    Args:
        frame: any that was called for it since.
    """
    # Up to the function that runs, and from there to who called it.
    while frame is not None and kind_of_code(frame.f_code) == LIBRARY:
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return caller is not None and kind_of_code(caller.f_code) != LIBRARY and _is_for_user(frame, ())


def _is_importing(frame: FrameType | None) -> bool:
    """Whether it runs for an import: in the body of a module, or in a hook that finds modules."""
    while frame is not None and not frame.f_code.co_filename.startswith(_IMPORTS):
        frame = frame.f_back
    return frame is not None


def is_import(frame: FrameType) -> bool:
    """Whether a frame is the body of a module that is imported for the first time."""
    if frame.f_code.co_name != "<module>":
        return False
    caller = frame.f_back
    if caller is None or not caller.f_code.co_filename.startswith(_IMPORTS):
        return False
    while caller is not None and caller.f_code.co_filename.startswith(_IMPORTS):
        caller = caller.f_back
    # `importlib.reload` runs the body at every call.
    return caller is None or caller.f_code is not reload.__code__


def _tells_of_world(function: Any, name: str) -> bool:
    """Whether a function tells of the world: is of such a module, and not known to be harmless."""
    module = getattr(function, "__module__", None)
    if module not in _WORLD or function in _GETTERS:
        return False
    return ("posix" if module == "nt" else module, name) not in _HARMLESS


def _reads_files(function: Any, owner: Any, name: str) -> bool:
    """Whether a function reads a file, or what a terminal or a pipe gives."""
    if _is_open_file(type(owner)) or name in _ADDRESSED:
        return True
    if name in _LOADING:  # which looks up what it names in Python modules
        return getattr(function, "__module__", "") == "_pickle"
    if name == "fromfile":
        return str(getattr(function, "__module__", "")).startswith("numpy")
    # What is read from memory was written by the function itself, or is refused as opaque.
    memory = type(owner) in _IN_MEMORY and owner is not sys.stdin
    return name in _READS and isinstance(owner, io.IOBase) and not memory


def _is_open_file(cls: type) -> bool:
    """Whether a class is the one by which safetensors reads files."""
    return cls.__name__ == "safe_open"


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
            return not _is_importing(frame)
        known = any(part in code.co_filename for part in through) or _gives_data(frame)
        if kind == LIBRARY and not known:
            return False
        frame = frame.f_back
    return False


def _gives_data(frame: FrameType) -> bool:
    """Whether a loader of modules is asked for a file by something else than an import."""
    code, caller = frame.f_code, frame.f_back
    if code.co_name != "get_data" or not code.co_filename.startswith(_IMPORTS):
        return False
    return caller is not None and not caller.f_code.co_filename.startswith(_IMPORTS)


def numpy_draws() -> Any:
    """Where numpy's own generator stands, whose functions no profiler hears of."""
    if "numpy" not in sys.modules:
        return None
    # Imported here: numpy does it when somebody asks for it, which inside would look like a draw.
    module: Any = import_module("numpy.random")
    state = module.get_state(legacy=False)
    return tuple(v.tobytes() if hasattr(v, "tobytes") else v for v in state["state"].values())
