"""What sort of thing a Python object is to a recording: how its state is found and guarded."""

from __future__ import annotations

import enum
import functools
import logging
import os
import re
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context, ContextVar
from datetime import date, datetime, time, timedelta, tzinfo
from decimal import Decimal
from fractions import Fraction
from operator import attrgetter, methodcaller
from pathlib import PurePath
from random import Random
from sys import stdlib_module_names
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CellType,
    ClassMethodDescriptorType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    TracebackType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any
from uuid import UUID

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement

from vescale_dtensor._capture.code_files import (
    is_library_class,
    keeps_state_for_users,
    keeps_state_unseen,
)

# Where the classes written in C have no state, or locks.
_FIXED = frozenset(
    {"builtins", "types", "typing", "operator", "functools", "_thread", "_struct", "_weakref"}
    | {"weakref", "_functools", "_operator", "zoneinfo", "ipaddress", "_abc", "_contextvars"}
    | {"collections", "_collections"}
)
# Modules of the standard library that begin with _ and are not written in C.
_IN_PYTHON = frozenset({"_collections_abc", "_weakrefset", "_pydecimal", "_pyio", "__main__"})
_HAS_REFERENCES = 1 << 14  # Py_TPFLAGS_HAVE_GC: classes whose instances may lead to others
# Of classes, whose attributes are guarded.
_DESCRIPTORS = (
    *(ClassMethodDescriptorType, GetSetDescriptorType, MemberDescriptorType),
    *(MethodDescriptorType, WrapperDescriptorType),
)
_FIELDS_IN_C = (GetSetDescriptorType, MemberDescriptorType)
# What these hold is in C, and changes as they run.
_RUNNING = (AsyncGeneratorType, CoroutineType, FrameType, TracebackType)
_LRU: type = type(functools.lru_cache(lambda: None))
# In this order: the first class that fits decides.
_BY_CLASS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((Tensor,), "tensor"),
    ((enum.Enum,), "constant"),
    ((BaseException,), "named"),
    ((torch.jit.ScriptModule,), "opaque"),  # which keeps what it has in C++
    ((nn.Module,), "module"),
    ((os._Environ,), "environment"),
    ((threading.local,), "object"),
    ((dict, list, set, deque), "contents"),
    ((tuple, frozenset), "items"),
    ((FunctionType,), "function"),
    ((MethodType,), "method"),
    ((functools.partial,), "partial"),
    ((CellType,), "cell"),
    ((type,), "class"),
    ((ModuleType,), "python_module"),
    ((weakref.ref,), "weak"),
    ((ContextVar,), "variable"),
    ((Context,), "context"),
    ((weakref.finalize, *_RUNNING), "opaque"),
    ((torch.UntypedStorage, torch.TypedStorage), "opaque"),
    ((torch.fx.Graph, torch.fx.Node, torch.fx.Interpreter), "opaque"),
    ((property,), "property"),
    ((logging.Logger,), "logger"),
    ((logging.Handler,), "handler"),
    ((logging.Formatter, logging.LoggerAdapter, logging.LogRecord), "whole"),
    ((staticmethod, classmethod), "wrapped"),
    ((_LRU,), "cache"),
    ((MappingProxyType,), "contents"),
    ((bytearray, memoryview, array), "bytes"),
    ((BuiltinFunctionType, MethodWrapperType), "builtin"),
    ((attrgetter, methodcaller), "getter"),
    ((GenericAlias, UnionType, re.Match), "referring"),
    ((type({}.keys()), type({}.values()), type({}.items())), "view"),
    ((Random,), "opaque"),
    (_DESCRIPTORS, "constant"),
    ((bool, int, float, complex, str, bytes, range), "constant"),
    ((slice,), "slice"),
    ((datetime, time), "zoned"),
    ((type(None), type(...), type(NotImplemented)), "constant"),
    ((torch.dtype, torch.device, torch.layout, torch.memory_format), "constant"),
    ((CodeType, re.Pattern, date, timedelta, tzinfo), "constant"),
    ((Decimal,), "decimal"),
    ((Fraction, PurePath, UUID), "constant"),
    ((Placement,), "constant"),  # whose fields have no setters
)  # fmt: skip


def _find_kind(cls: type) -> str:
    """See `kind_of_class`."""
    for classes, kind in _BY_CLASS:
        if issubclass(cls, classes):
            # A constant of a class of the user's can have attributes.
            users = kind == "constant" and not all(map(is_library_class, cls.__mro__))
            return "named" if users else kind
    if cls.__module__.partition(".")[0] == "numpy":
        return _kind_of_numpy(cls)
    # By name: that module imports this one.
    if cls.__module__ == "vescale_dtensor._capture.capture" and cls.__name__ == "Captured":
        return "captured"
    # Those of C: what they give next is in no attribute. A user's iterator is an object like
    # others.
    if hasattr(cls, "__next__") and not _is_users(cls):
        return "opaque"  # iterators and generators
    if not keeps_state_for_users(cls):
        return "whole" if keeps_state_unseen(cls) and _is_users(cls) else "constant"
    if cls.__module__ == "types":
        return "object"
    if _is_users(cls):
        # A class may derive from one of C that keeps what no attribute shows: numbers of ctypes.
        return "opaque" if _has_state_in_c(cls) else "object"
    if issubclass(cls, Mapping):
        return "contents"
    # Unknown classes of extensions may hold anything, so they are refused rather than trusted.
    if cls.__module__ not in _FIXED:
        return "opaque"
    if cls.__module__ == "_abc":  # what Python knows of subclasses, see `abc.get_cache_token`
        return "constant"
    return "referring" if cls.__flags__ & _HAS_REFERENCES else "constant"


# To the type checker a class cannot be hashed.
_cached: Any = functools.lru_cache(maxsize=4096)
kind_of_class: Callable[[type], str] = _cached(_find_kind)
"""`kind_of_class(cls)`: the kind of the instances of a class; `opaque`: their state is unseen.

Asked in C: a recording asks it of every object that it meets.
"""


def _kind_of_numpy(cls: type) -> str:
    """Arrays have values that change; scalars, dtypes and ufuncs have none that do."""
    names = {base.__name__ for base in cls.__mro__}
    # By name, so that numpy need not be installed.
    if "ndarray" in names:
        return "array"
    # The fields of a record can be written.
    if "void" in names:
        return "array"
    if names & {"dtype", "ufunc"}:
        return "numpy"
    return "constant" if "generic" in names else "opaque"


def _is_users(cls: type) -> bool:
    """Whether instances have attributes that Python code gave them."""
    root = cls.__module__.partition(".")[0]
    if root.startswith("_") and root in stdlib_module_names and root not in _IN_PYTHON:
        return False
    return any("__slots__" in vars(k) or "__dict__" in vars(k) for k in cls.__mro__[:-1])


def _has_state_in_c(cls: type) -> bool:
    """Whether instances have more room than for their slots, `__dict__` and weak references."""
    word = object.__basicsize__ // 2
    for base in cls.__mro__[:-1]:
        assert base.__base__ is not None
        slots = sum(type(value) is MemberDescriptorType for value in vars(base).values())
        slots += sum(name in vars(base) for name in ("__dict__", "__weakref__"))
        if base.__basicsize__ - base.__base__.__basicsize__ > word * slots:
            return True
    return False


def slots_of(cls: type) -> dict[str, Any]:
    """The descriptors of all slots that classes written in Python give their instances."""
    found: dict[str, Any] = {}
    # From the root on: a derived class's slot of the same name hides the inherited one.
    for base in reversed(cls.__mro__):
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            # Python stores `__x` of a class C as `_C__x`.
            mangled = f"_{base.__name__.lstrip('_')}{name}" if _is_private(name) else name
            if mangled in vars(base) and name not in ("__dict__", "__weakref__"):
                found[mangled] = vars(base)[mangled]
    return found


def fields_in_c(value: Any) -> tuple[str, ...]:
    """What an object has beside its namespace: `errno` of an exception, `encoding` of a stream.

    Not how an exception came by.
    """
    cls: Any = type(value)
    return _fields_in_c(cls)


@functools.lru_cache(maxsize=1024)
def _fields_in_c(cls: type) -> tuple[str, ...]:
    found = (n for base in cls.__mro__ for n, v in vars(base).items() if type(v) in _FIELDS_IN_C)
    return tuple(sorted(set(found) - {"__dict__", "__class__", "__traceback__", "__weakref__"}))


def _is_private(name: str) -> bool:
    """Whether Python mangles a name."""
    return name.startswith("__") and not name.endswith("__")


def namespace_of(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object, without the code that its class may run for attributes."""
    # Only its own way of access gives what a thread-local object is in this thread. One of a class
    # derived from that has a `__dict__` besides, which is always empty.
    local = issubclass(type(value), threading.local)
    ask: Any = threading.local.__getattribute__ if local else object.__getattribute__
    try:
        found = ask(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None
