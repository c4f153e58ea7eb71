"""Describes plain attributes that modules compute with, beside parameters and buffers.

A dropout of 0.1 here and 0.2 there, or another `eps`, gives every rank a loss, and none of them one
device's. What cannot be compared between processes (objects that print an address), and what may
differ (where this rank is, its files, times), is left out.
"""

import argparse
import dataclasses
import enum
import functools
import hashlib
import re
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy
import torch
from torch import Tensor, nn
from vescale_dtensor import DTensor

from vescale_parallel._common.agreement import checksum
from vescale_parallel._deferred.recording import DeferredTensor

# Words of names whose values belong to one process.
_OWN: Final = frozenset(
    re.findall(
        r"\w+",
        "rank ranks local device devices gpu cuda worker workers host hostname port pid main "
        "master time times timestamp seconds date path paths dir folder file filename name uuid id",
    )
)
# Deeper, and beyond so many items, values are not looked at.
_MOST_DEPTH, _MOST_ITEMS = 4, 256
_VALUES: Final = (bool, int, float, complex, torch.dtype, torch.Size, range, slice, numpy.generic)
_FUNCTIONS: Final = (types.FunctionType, types.BuiltinFunctionType, type)


def attributes(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the plain attributes of all modules: "attribute of module", and the value in words.

    Attributes whose name begins with an underscore, or says that the value belongs to one process
    (`rank`, `device`, `path`, …), are left out; so are objects of classes that are not plain data.
    """
    # A configuration is an attribute of every module of many a model.
    seen: set[int] = set()
    # A module under several names is looked at once.
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            # The mode is compared with the modules themselves (`facts`).
            if attribute == "training" or not _is_shared(attribute) or id(value) in seen:
                continue
            if not isinstance(value, (*_VALUES, str)):
                seen.add(id(value))
            text = _described(value, _MOST_DEPTH)
            if text is not None:
                yield f"{attribute} of {name or 'the model'}", text


def _is_shared(name: object) -> bool:
    if not isinstance(name, str):
        return True
    return not name.startswith("_") and _OWN.isdisjoint(name.lower().split("_"))


def _described(value: Any, depth: int) -> str | None:
    """Return a value in words that are equal where the values are; None for what is left out."""
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, str):
        # A path: files of equal content lie elsewhere on another host.
        return None if "/" in value or "\\" in value else repr(value)
    if isinstance(value, _VALUES):
        # `repr` of a float gives all of its digits, the same in every process.
        return repr(value)
    if isinstance(value, _FUNCTIONS):
        return _function(value, depth)
    if isinstance(value, Tensor | numpy.ndarray | torch.Generator):
        return _data(value)
    if depth == 0:
        return None
    if isinstance(value, functools.partial):
        return _joined("partial", [value.func, value.args, value.keywords], depth)
    if isinstance(value, list | tuple | set | frozenset):
        return _sequence(value, depth)
    fields = _fields(value)
    return None if fields is None else _mapping(fields, depth)


def _function(value: Any, depth: int) -> str:
    """Return the name of a function; of one within another, or without one, what it does, too."""
    name = f"{value.__module__}.{value.__qualname__}"
    if not isinstance(value, types.FunctionType) or "<" not in value.__qualname__ or depth == 0:
        return name
    # A closure or a lambda has the name of its place only. Two of one name may do different things,
    # so their code is compared, and the values that they hold.
    code = value.__code__
    cells = dict(zip(code.co_freevars, value.__closure__ or (), strict=True))
    held = {n: cell.cell_contents for n, cell in cells.items() if cell != types.CellType()}
    told = [_mapping(held, depth), _mapping(value.__kwdefaults__ or {}, depth)]
    told.append(_sequence(value.__defaults__ or (), depth))
    return f"{name} code {_code_checksum(code):08x} {' '.join(told)}"


def _code_checksum(code: types.CodeType) -> int:
    """A checksum of what a function does: not of its file, nor of the lines."""
    # Not by file and lines: those differ where the same source is installed in two places.
    found = zlib.crc32(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found = zlib.crc32(f"{_code_checksum(constant)}".encode(), found)
        elif isinstance(constant, (*_VALUES, str)):
            found = zlib.crc32(repr(constant).encode(), found)
    return found


def _data(value: Tensor | numpy.ndarray | torch.Generator) -> str | None:
    if isinstance(value, torch.Generator):
        state = value.get_state().numpy().tobytes()
        return f"generator in state {hashlib.sha256(state).hexdigest()[:16]}"
    if isinstance(value, numpy.ndarray):
        # Its bytes are addresses.
        if value.dtype.hasobject:
            return None
        return f"{value.shape} {value.dtype} checksum {zlib.crc32(value.tobytes()):08x}"
    # Parameters, as which modules keep tensors of others now and then, are compared as such.
    compared = isinstance(value, nn.Parameter | DTensor | DeferredTensor)
    if compared or value.device.type == "meta":
        return None
    return f"{tuple(value.shape)} {value.dtype} checksum {checksum(value):08x}"


def _sequence(value: Any, depth: int) -> str:
    items = list(value)
    unordered = isinstance(value, set | frozenset)
    # Text from a set is in another order in every process.
    if unordered or all(isinstance(item, str) for item in items):
        items = sorted(items, key=repr) if not unordered or _are_plain(items) else []
    return _joined(f"{type(value).__name__} of {len(value)}", items, depth)


def _are_plain(items: list[Any]) -> bool:
    return all(isinstance(item, (*_VALUES, str)) for item in items)


def _joined(head: str, items: list[Any], depth: int) -> str:
    told = (_described(item, depth - 1) for item in items[:_MOST_ITEMS])
    return f"{head} ({', '.join(text for text in told if text is not None)})"


def _mapping(fields: Mapping[Any, Any], depth: int) -> str:
    shared = {key: value for key, value in fields.items() if _is_shared(key)}
    told = {
        str(key): text
        for key, value in list(shared.items())[:_MOST_ITEMS]
        if isinstance(key, (*_VALUES, str)) and (text := _described(value, depth - 1)) is not None
    }
    return f"({', '.join(f'{key}={told[key]}' for key in sorted(told))})"


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """Return what plain data consists of: a mapping, a dataclass, a configuration."""
    if isinstance(value, dict):
        return value
    namespaces = types.SimpleNamespace, argparse.Namespace
    is_data = dataclasses.is_dataclass(value) or isinstance(value, namespaces)
    # Configurations, as those of Hugging Face.
    known = is_data or callable(getattr(type(value), "to_dict", None))
    return vars(value) if known and hasattr(value, "__dict__") else None
