"""The same calls in other words: every argument by its name, and by NumPy's name for it.

torch's C++ parser takes each argument by name, in any order, and some by a second name that NumPy
has for it (`axis=` for `dim=`). The names come from torch's own schemas, the second ones from
`NUMPY`, of which only those are tried that torch itself takes on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor

# What `numpy_compatibility_arg_names` in torch/csrc/utils/python_arg_parser.cpp lists.
NUMPY = {"dim": ("axis",), "keepdim": ("keepdims",), "input": ("x", "a", "x1"), "other": ("x2",)}
MOST_NAMES = max(map(len, NUMPY.values()))


@dataclass(frozen=True)
class Spelled:
    """A function whose arguments are given by name.

    Attributes:
        func: a function of torch's C++.
        backwards: whether the names come in the opposite of the signature's order.
        numpy: which of NumPy's names is used; None for torch's.
    """

    func: Callable[..., Any]
    backwards: bool = False
    numpy: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it with the same arguments, by name; `self` of a method stays where it is."""
        own = 1 if isinstance(self.func, MethodDescriptorType) else 0
        names = _names(self.func, args)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        rest = [(self._spelled(n), named[n]) for n in list(named)[own:]]
        return self.func(*args[:own], **dict(reversed(rest) if self.backwards else rest))

    def _spelled(self, name: str) -> str:
        if self.numpy is None or name not in NUMPY:
            return name
        return NUMPY[name][min(self.numpy, len(NUMPY[name]) - 1)]


def spellings(func: Any) -> Iterator[tuple[str, Spelled]]:
    """Every way to name the arguments of a function, with words for it."""
    if not isinstance(func, BuiltinFunctionType | MethodDescriptorType) or not _schemas(func):
        return
    yield "by name", Spelled(func)
    yield "by name, backwards", Spelled(func, backwards=True)
    known = {argument.name for schema in _schemas(func) for argument in schema.arguments}
    if known & {"self", *NUMPY}:
        for which in range(MOST_NAMES):
            yield f"by NumPy's names {which}", Spelled(func, numpy=which)


def _schemas(func: Any) -> list[Any]:
    packet = getattr(torch.ops.aten, func.__name__, None)
    return [] if packet is None else [getattr(packet, o)._schema for o in packet.overloads()]


def _names(func: Any, args: tuple[Any, ...]) -> list[str]:
    """What the first overload that takes these arguments calls them."""
    for schema in _schemas(func):
        positional = [a for a in schema.arguments if not a.kwarg_only]
        if len(positional) >= len(args) and all(map(_takes, positional, args)):
            return ["input" if a.name == "self" else a.name for a in positional]
    raise TypeError(f"{func}: no overload takes {args} by name")


def _takes(argument: Any, value: Any) -> bool:
    return _is_of(str(argument.type), value)


_KINDS: dict[str, Any] = {
    "Tensor": Tensor,
    "int": int,
    "number": (int, float, complex, bool),
    "float": (int, float),
    "bool": bool,
    "str": str,
    "Device": (str, torch.device),
    "Generator": torch.Generator,
}


def _is_of(kind: str, value: Any) -> bool:
    if kind.startswith("Optional["):
        return value is None or _is_of(kind[len("Optional[") : -1], value)
    if kind.startswith("List["):
        items = value if isinstance(value, list | tuple) else [value]
        return all(_is_of(kind[len("List[") : -1], item) for item in items)
    if kind == "int":
        return isinstance(value, int | torch.dtype | torch.layout) and not isinstance(value, bool)
    return isinstance(value, _KINDS.get(kind, object))
