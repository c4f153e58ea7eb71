"""Sorts Python objects by how a recording finds and guards their state."""

from __future__ import annotations

import enum
import functools
import re
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import date, time, timedelta, tzinfo
from fractions import Fraction
from pathlib import PurePath
from random import Random
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
    TracebackType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vescale_dtensor._capture.guard.code_files import is_library_class

# What these hold is in C, and changes as they run.
_RUNNING = (AsyncGeneratorType, CoroutineType, FrameType, TracebackType, Random)
_LRU: type = type(functools.lru_cache(lambda: None))
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
# In this order: the first class that fits decides.
_BY_CLASS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((Tensor,), "tensor"),
    ((enum.Enum,), "constant"),
    ((BaseException,), "named"),
    ((nn.Module,), "module"),
    ((Optimizer,), "optimizer"),
    ((LRScheduler,), "scheduler"),
    ((torch.amp.GradScaler,), "scaler"),
    ((torch.distributions.Distribution,), "object"),
    ((dict, list, set, deque, MappingProxyType), "contents"),
    ((tuple, frozenset), "items"),
    ((FunctionType,), "function"),
    ((MethodType,), "method"),
    ((functools.partial,), "partial"),
    ((CellType,), "cell"),
    ((type,), "class"),
    ((ModuleType,), "python_module"),
    ((_RUNNING), "opaque"),
    ((weakref.ref,), "weak"),
    ((ContextVar,), "variable"),
    ((torch.UntypedStorage, torch.TypedStorage), "opaque"),
    ((property,), "property"),
    ((staticmethod, classmethod, _LRU), "wrapped"),
    ((bytearray, memoryview, array), "bytes"),
    ((BuiltinFunctionType, MethodWrapperType), "builtin"),
    (_VIEWS, "view"),
    ((bool, int, float, complex, str, bytes, range, slice), "constant"),
    ((type(None), type(...), type(NotImplemented)), "constant"),
    ((torch.dtype, torch.device, torch.layout, torch.memory_format), "constant"),
    ((CodeType, re.Pattern, date, time, timedelta, tzinfo, Fraction, PurePath), "constant"),
    ((Placement,), "constant"),  # whose fields have no setters
)  # fmt: skip
# Of the standard library, what people keep their settings and functions in.
_NAMESPACES: tuple[type, ...] = (SimpleNamespace, UserDict, UserList, ChainMap)
_NAMESPACES += (functools.partialmethod, functools.singledispatchmethod)
_BY_NAME = frozenset({("argparse", "Namespace"), ("queue", "Queue")})


def _find_kind(cls: type) -> str:
    """See `kind_of_class`."""
    for classes, kind in _BY_CLASS:
        if issubclass(cls, classes):
            # A constant of a class of the user's can have attributes.
            users = kind == "constant" and not all(map(is_library_class, cls.__mro__))
            return "named" if users else kind
    if cls.__module__.partition(".")[0] == "numpy":  # by name: it need not be installed
        names = {base.__name__ for base in cls.__mro__}
        return "array" if names & {"ndarray", "void"} else "constant"
    # By name: that module imports this one.
    if cls.__name__ == "Captured" and cls.__module__.startswith("vescale_dtensor._capture."):
        return "captured"
    users = not all(map(is_library_class, cls.__mro__))
    if hasattr(cls, "__next__") and not users:
        return "opaque"  # iterators and generators: what they give next is in no attribute
    settings = issubclass(cls, _NAMESPACES) or (cls.__module__, cls.__name__) in _BY_NAME
    return "object" if users or settings else "constant"


# To the type checker a class cannot be hashed.
_cached: Any = functools.lru_cache(maxsize=4096)
kind_of_class: Callable[[type], str] = _cached(_find_kind)
"""`kind_of_class(cls)`: the kind of the instances of a class; `opaque`: their state is unseen.

Asked in C: a recording asks it of every object that it meets.
"""


def _find_whether_all(cls: type) -> bool:
    """See `reads_all`."""
    hidden = any(
        "__getattr__" in vars(one) or "__getattribute__" in vars(one) for one in cls.__mro__[:-1]
    )
    return hidden or is_library_class(cls) or issubclass(cls, _NAMESPACES)


reads_all: Callable[[type], bool] = _cached(_find_whether_all)
"""Whether attributes of an object are read under names that no code of the user's has.

By methods of Python and torch, or where attributes are looked up by computed names.
"""


def slots_of(cls: type) -> dict[str, Any]:
    """The descriptors of all slots that classes written in Python give their instances."""
    found: dict[str, Any] = {}
    # From the root on: a derived class's slot of the same name hides the inherited one.
    for base in reversed(cls.__mro__):
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            # Python stores `__x` of a class C as `_C__x`.
            private = name.startswith("__") and not name.endswith("__")
            mangled = f"_{base.__name__.lstrip('_')}{name}" if private else name
            if isinstance(vars(base).get(mangled), MemberDescriptorType):
                found[mangled] = vars(base)[mangled]
    return found


def namespace_of(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object, without the code that its class may run for attributes."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def values_of(container: Any) -> tuple[Any, ...] | None:
    """The values of a dict; None of what has none."""
    return tuple(container.values()) if isinstance(container, Mapping) else None
