"""Kinds of state that no attribute, container or variable shows: what code asks for by a call.

Settings of torch and of the process, what a metaclass or a library's class says, what is registered
or remembered, and what other code reads by names that it is given.
"""

import abc
import builtins
import copy
import ctypes
import dataclasses
import functools
import importlib
import inspect
import logging
import os
import sys
import threading
import types
from typing import Any

import torch
from stale_kinds import Settings, another, factor, factor_is, grow, in_place, kind, mutated
from stale_kinds_typed import KINDS as KINDS
from torch import nn

HERE, DEEP = os.getcwd(), sys.getrecursionlimit()

# --- one state for all: a change to the same value twice changes it once


def setting(name, apply, use):
    """A kind of state that no holder holds: of each copy, a text that says how often it changed.

    The text stays what it is, so that a guard sees the setting or nothing.
    """
    numbers = {}

    def change(value):
        numbers[value] += 1
        apply(numbers[value])
        return value

    def make():
        apply(0)
        value = f"copy {len(numbers)}"
        numbers[value] = 0
        return value

    kind(name, make, change, lambda x, value: use(x))


def asked(name, apply, ask):
    """A setting that code multiplies by, as it asks for it."""
    setting(name, apply, lambda x: x * ask())


asked(
    "deterministic algorithms",
    lambda n: torch.use_deterministic_algorithms(bool(n % 2)),
    torch.are_deterministic_algorithms_enabled,
)
asked("number of threads", lambda n: torch.set_num_threads(1 + n % 2), lambda: threads())
asked(
    "fast path of attention",
    lambda n: torch.backends.mha.set_fastpath_enabled(n % 2 == 0),
    torch.backends.mha.get_fastpath_enabled,
)
asked(
    "anomaly detection",
    lambda n: torch.autograd.set_detect_anomaly(n % 2 == 1),
    torch.is_anomaly_enabled,
)
asked("seed", torch.manual_seed, torch.initial_seed)
setting(
    "arguments of the program",
    lambda n: sys.argv.__setitem__(slice(1, None), ["a"] * n),
    lambda x: argv(x),
)
asked("working directory", lambda n: os.chdir((HERE, "/usr")[n % 2]), lambda: len(cwd()))
asked("recursion limit", lambda n: sys.setrecursionlimit(DEEP + n % 2), sys.getrecursionlimit)
LOGGER = logging.getLogger("capture.stale")
asked(
    "level of a logger",
    lambda n: LOGGER.setLevel((logging.INFO, logging.DEBUG)[n % 2]),
    lambda: LOGGER.isEnabledFor(logging.DEBUG),
)
setting(
    "name among the builtins",
    lambda n: setattr(builtins, "CAPTURE_FACTOR", 2.0 + n),
    lambda x: x * CAPTURE_FACTOR,  # noqa: F821
)
asked(
    "variable in a path",
    lambda n: os.environ.__setitem__("CAPTURE_PATH", "a" * n),
    lambda: len(os.path.expandvars("$CAPTURE_PATH!")),
)


def threads():
    return torch.get_num_threads()


def argv(x):
    return x * len(sys.argv)


def cwd():
    return os.getcwd()


# --- modules that are asked for by name

LATER = "capture_settings_later"


def other_module(number):
    sys.modules[LATER] = types.ModuleType(LATER)
    sys.modules[LATER].factor = 2.0 + number


def maybe_imported(x):
    try:
        import capture_settings_optional
    except ImportError:
        return x
    return x * capture_settings_optional.factor


def optional_module(number):
    sys.modules.pop("capture_settings_optional", None)
    if number:
        sys.modules["capture_settings_optional"] = types.ModuleType("capture_settings_optional")
        sys.modules["capture_settings_optional"].factor = 2.0 + number


def imported_again(x):
    import capture_settings_later

    return x * capture_settings_later.factor


setting("another module of the name", other_module, imported_again)
asked("module by its name", other_module, lambda: importlib.import_module(LATER).factor)
setting("module that is there later", optional_module, maybe_imported)


class Lazy(types.ModuleType):
    def __getattr__(self, name):
        if name != "factor":
            raise AttributeError(name)
        return 2.0


another("name of a lazy module", lambda: Lazy("lazy"), factor_is(3.0), factor)

# --- classes


def with_metaclass():
    meta = type("Meta", (type,), {"factor": 2.0, "__len__": lambda cls: 2})
    return meta("Made", (), {})


def of_metaclass(name, new):
    return mutated(lambda value: setattr(type(value), name, new))


class Asking:
    def __init__(self):
        self.interface = abc.ABCMeta("Interface", (), {})


another("attribute of a metaclass", with_metaclass, of_metaclass("factor", 3.0), factor)
in_place(
    "registered with an abstract class",
    Asking,
    lambda v: v.interface.register(type(v)),
    lambda v: isinstance(v, v.interface),
)
CHILDREN: list[Any] = []
in_place(
    "subclasses",
    lambda: type("Parent", (), {}),
    lambda v: CHILDREN.append(type("Child", (v,), {})),
    lambda v: 1 + len(v.__subclasses__()),
)

# --- what a function remembers


class Source:
    factor = 2.0


def remembering():
    source = Source()

    @functools.lru_cache(4)
    def found(name):
        return [getattr(source, name)]

    found("factor")
    return found


in_place(
    "result in a cache",
    remembering,
    lambda v: v("factor").__setitem__(0, 5.0),
    lambda v: v("factor")[0],
)

# --- attributes that other code reads, or patterns and formats


def by_keyword(x, value):
    match value:
        case Settings(factor=number):
            return x * number


def alias(x, value):
    return x * READ(value, "factor")


READ = getattr
READERS = {
    "keyword pattern": by_keyword,
    "another name of getattr": alias,
    "asdict": lambda x, v: x * dataclasses.asdict(v)["factor"],
    "copy": lambda x, v: x * vars(copy.copy(v))["factor"],
    "getmembers": lambda x, v: x * dict(inspect.getmembers(v))["factor"],
}
for name, read in READERS.items():
    kind(f"read by {name}", Settings, factor_is(3.0), read)
kind(
    "attribute in a format",
    lambda: Settings("a"),
    mutated(lambda v: setattr(v, "factor", v.factor + "a")),
    lambda x, v: x * len("{0.factor}".format(v)),  # noqa: UP030, UP032
)
another(
    "equal namespaces",
    lambda: types.SimpleNamespace(factor=2.0),
    factor_is(3.0),
    lambda v: v == types.SimpleNamespace(factor=2.0),
)


def closing():
    number = 2.0

    def function(more=1.0):
        nonlocal number
        number += more
        return number

    return function


in_place(
    "variable of a closure, read", closing, lambda v: v(), lambda v: v.__closure__[0].cell_contents
)

# --- state in C

in_place("number of ctypes", lambda: ctypes.c_int(2), grow("value"), lambda v: v.value)
in_place(
    "lock",
    threading.Lock,
    lambda v: v.release() if v.locked() else v.acquire(),
    lambda v: v.locked(),
)
in_place(
    "seed of a generator",
    lambda: torch.Generator().manual_seed(3),
    lambda v: v.manual_seed(v.initial_seed() + 1),
    lambda v: v.initial_seed(),
)

# --- what code asks of tensors that it does not use


def resized(value):
    return mutated(lambda v: v.resize_(v.numel() + 1))(value)


def other_data(value):
    value.data = torch.ones(value.numel() + 1)
    return value


in_place(
    "requires_grad of a tensor that is not used",
    lambda: nn.Parameter(torch.ones(4)),
    lambda v: v.requires_grad_(not v.requires_grad),
    lambda v: v.requires_grad,
)
another("size of a tensor that is not used", lambda: torch.ones(4), resized, lambda v: v.shape[0])
another(
    "data of a parameter that is not used", lambda: nn.Parameter(torch.ones(4)), other_data, len
)
in_place(
    "gradient of a tensor that is not used",
    lambda: nn.Parameter(torch.ones(4)),
    lambda v: setattr(v, "grad", None if v.grad is not None else torch.ones(4)),
    lambda v: v.grad is None,
)
another(
    "place of a slice in memory",
    lambda: torch.arange(20.0)[4:8],
    lambda v: v.as_strided((4,), (1,), v.storage_offset() + 1),
    lambda v: v.storage_offset(),
)
in_place("version of a tensor", lambda: torch.ones(4), lambda v: v.add_(1), lambda v: v._version)
