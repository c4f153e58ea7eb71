"""Arguments of steps that hold tensors in themselves: containers of other classes, and functions.

A step is run again with arguments of its own. A named tuple is made anew of the tensors of each
replay; a function stays the one of the recording, so it must not hold what belongs to one call.
"""

from __future__ import annotations

import dis
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from vescale_comm.nested import tensors_within

from vescale_dtensor._capture.guard.code_files import is_users
from vescale_dtensor._capture.guard.kinds import kind_of_class
from vescale_dtensor._capture.guard.records import attributes_of
from vescale_dtensor._capture.record.unsupported import name_of
from vescale_dtensor._torch.overridable import implementation_of

_GETTER, _SETTERS = "__get__", ("__set__", "__delete__")
_BASES: tuple[Any, ...] = (OrderedDict, defaultdict, dict, list, tuple)
_MUTABLE = frozenset({"contents", "bytes", "array"})


@lru_cache(maxsize=1024)  # asked of every function that a recording sees
def is_in_place(name: str) -> bool:
    """Whether a function changes its operand by its name: not all changes count as versions."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def written_by_name(
    func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[Tensor]:
    """The operands that a function says it writes to: not all writes count as versions.

    By its name, its schema and `out=`; statistics of norms are written without saying so.
    """
    yield from tensors_within(kwargs.get("out"))
    if is_in_place(name):
        yield from tensors_within(args[:1])
    if "batch_norm" in name or "instance_norm" in name:
        yield from tensors_within(
            (args[1:3], kwargs.get("running_mean"), kwargs.get("running_var"))
        )
    if name.startswith("embedding") and (len(args) > 3 or kwargs.get("max_norm") is not None):
        yield from tensors_within((args[1:2], kwargs.get("weight")))  # rows that are too long
    for index, argument in _written_arguments(func, name):
        yield from tensors_within(args[index] if index < len(args) else kwargs.get(argument))


def _written_arguments(func: Any, name: str) -> list[tuple[int, str]]:
    """Positions and names of the arguments that the schema of an operator says are written."""
    operator = getattr(func, "_opoverload", func)  # of a custom operator
    if not hasattr(operator, "_schema") and is_in_place(name):
        # torch's functions know no schema; the operator of the same name does.
        packet = getattr(torch.ops.aten, name, None)
        operator = getattr(packet, packet.overloads()[0]) if packet is not None else None
    schema = getattr(operator, "_schema", None)
    return [
        (index, argument.name)
        for index, argument in enumerate(schema.arguments if schema is not None else ())
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def items_of(container: Any) -> list[Any]:
    """What torch finds in a list, tuple or dict: of a dict, keys and values in pairs."""
    # By the base class, as torch's C++ does: a user's `__iter__` is not asked.
    if isinstance(container, dict):
        return list(dict.items(container))
    return list((list if isinstance(container, list) else tuple).__iter__(container))


def extras_of(container: Any) -> dict[str, Any]:
    """What a container has besides its items."""
    found = attributes_of(container)
    if isinstance(container, defaultdict):
        found["default_factory"] = container.default_factory
    return found


def remade(cls: Any, items: Iterable[Any], extras: Mapping[str, Any]) -> Any:
    """A container of a class, with these items and attributes; a step of programs.

    As copying does: no code of the user's class runs.
    """
    base = next(base for base in _BASES if issubclass(cls, base))
    if hasattr(cls, "n_sequence_fields"):
        made = cls(items)  # torch.return_types, which no base can make
    elif base is tuple:
        made = tuple.__new__(cls, items)
    else:
        made = base.__new__(cls)
        if base is list:
            list.extend(made, items)
        for key, value in items if base is not list else ():
            base.__setitem__(made, key, value)
    for name, value in extras.items():
        object.__setattr__(made, name, value)
    return made


def made_inside(
    value: Any, outside: Callable[[Tensor], bool], met: Callable[[Any], bool]
) -> str | None:
    """What an object that a step is given leads to and belongs to one call, in words.

    Args:
        value: the object, which all replays will share.
        outside: whether a tensor was there before the function ran.
        met: whether an object was, and is guarded with all that it leads to.
    """
    queue: list[Any] = [value]
    seen: dict[int, Any] = {}
    while queue:
        one = queue.pop()
        if id(one) in seen or met(one):
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            if not outside(one):
                return f"a tensor {list(one.shape)}"
            continue
        kind = kind_of_class(type(one))
        # What is given itself may be a container of settings; in a closure it is shared.
        if kind in _MUTABLE and one is not value:
            return f"a {type(one).__name__}"
        if isinstance(one, FunctionType) and _rebinds(one):
            return "a variable that it assigns"
        queue += _parts(one, kind)
    return None


def _rebinds(function: FunctionType) -> bool:
    """Whether a function of the user's assigns variables of the function around it."""
    code = function.__code__
    if not code.co_freevars or not is_users(code):
        return False
    stored = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_DEREF"}
    return bool(stored & set(code.co_freevars))


def _parts(value: Any, kind: str) -> Iterator[Any]:
    """What an object leads to."""
    if isinstance(value, FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
        if not is_users(value.__code__):
            # Decorators and wrappers of libraries: what they call is the user's.
            yield from filter(callable, held)
            return
        yield from held
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif kind in ("contents", "items"):
        yield from [*value, *value.values()] if isinstance(value, Mapping) else value
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    elif kind in ("object", "named"):
        yield from attributes_of(value).values()


def _is_full(cell: Any) -> bool:
    """Whether a variable of a closure has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


# --- functions


def as_node(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[str, Any, Any, dict[str, Any]]:
    """A call of a torch function as graphs write it: methods as methods, properties as such."""
    # Without the test for modes, which a replay has no need of.
    func = implementation_of(func)
    method = getattr(func, "__name__", "")
    if method == _GETTER:
        return "call_function", getattr, (args[0], name_of(func)), {}
    if method in _SETTERS:
        value = args[1] if len(args) > 1 else None
        return "call_function", setattr, (args[0], name_of(func), value), {}
    if func is torch.Tensor.__getitem__:
        return "call_function", operator.getitem, args, {}
    if func is torch.Tensor.__setitem__:
        return "call_function", operator.setitem, args, {}
    if getattr(torch.Tensor, method, None) is func:
        return "call_method", method, args, kwargs
    return "call_function", func, args, kwargs
