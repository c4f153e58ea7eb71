"""Arguments by position or name, and results by position or key, of the modules of a plan."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from vescale_parallel._common.messages import did_you_mean, listed
from vescale_parallel._errors import PlanError
from vescale_parallel._notation.layout import Chosen, RuleLayout

Place = Callable[[RuleLayout, Any], Any]
"""Redistributes all tensors in a value."""

_REST = "*"


def unknown_arguments(module: nn.Module, chosen: Chosen) -> list[str]:
    """Return what is wrong with choices of arguments, as far as `forward`'s signature tells."""
    names, open_ended = argument_names(module)
    # `*args` and `**kwargs` may take anything.
    if open_ended:
        return []
    return [
        f"forward of {type(module).__name__} has no argument '{name}'."
        f"{did_you_mean(name, names)} It has {listed(names)}."
        for name, _ in chosen.parts
        if name != _REST and (_at(name) >= len(names) if name.isdecimal() else name not in names)
    ]


def _at(name: str) -> int:
    # Of thousands of digits Python makes no number; no call has so many arguments.
    return int(name[:18])


def argument_names(module: nn.Module) -> tuple[list[str], bool]:
    """Return the arguments of `forward` in order, and whether it takes others as well."""
    # Of the bound method, which has no `self`.
    parameters = inspect.signature(module.forward).parameters.values()
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    names = [one.name for one in parameters if one.kind not in variadic]
    return names, any(one.kind in variadic for one in parameters)


def place_arguments(
    names: Sequence[str],
    chosen: Chosen,
    place: Place,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the chosen ones placed; one that the caller left out is not missed.

    Args:
        names: of the arguments of `forward`, in order.
        chosen: what goes where.
        place: redistributes the tensors of an argument.
        args: as the module was called.
        kwargs: as the module was called.
    """
    # An argument has a position and a name, and a rule may say either of them.
    keys = [names[at] if at < len(names) else str(at) for at in range(len(args))]
    wanted = {
        names[_at(name)] if name.isdecimal() and _at(name) < len(names) else name: layout
        for name, layout in chosen.parts
    }
    placed = [_one(wanted, key, value, place) for key, value in zip(keys, args, strict=True)]
    return tuple(placed), {key: _one(wanted, key, one, place) for key, one in kwargs.items()}


def _one(wanted: Mapping[str, RuleLayout], key: str, value: Any, place: Place) -> Any:
    layout = wanted.get(key, wanted.get(_REST))
    return value if layout is None else place(layout, value)


def place_results(rule: str, module: str, chosen: Chosen, place: Place, result: Any) -> Any:
    """Return the result with the chosen parts placed.

    Raises:
        PlanError: the result has no such part. Results of one module have the same form on every
            rank, so that every rank raises.
    """
    # Before tuples, which a named one is as well: it is made of its fields, not of one sequence.
    if hasattr(result, "_fields"):
        keys: list[Any] = list(result._fields)
        placed = _parts(rule, module, chosen, place, dict(zip(keys, result, strict=True)))
        return type(result)(*placed.values())
    if isinstance(result, Mapping):
        placed = _parts(rule, module, chosen, place, dict(result))
        # Not `type(result)(...)`: model outputs are dataclasses, whose constructor takes fields.
        mapped: Any = copy.copy(result)
        for key, value in placed.items():
            mapped[key] = value
        return mapped
    if isinstance(result, tuple | list):
        placed = _parts(rule, module, chosen, place, dict(enumerate(result)))
        return type(result)(placed.values())
    # One tensor is the first of one.
    return _parts(rule, module, chosen, place, {0: result})[0]


def _parts(
    rule: str, module: str, chosen: Chosen, place: Place, parts: dict[Any, Any]
) -> dict[Any, Any]:
    """Return the parts of a result by key, the chosen ones placed; positions count keys as well."""
    keys = list(parts)
    wanted: dict[str, RuleLayout] = {}
    for name, layout in chosen.parts:
        # A key of digits is a key first, and a position where there is no such key.
        at = name.isdecimal() and name not in parts
        if name != _REST and (_at(name) >= len(keys) if at else name not in parts):
            raise PlanError(
                f"activation rule '{rule}': what leaves '{module}' has no '{name}'."
                f"{did_you_mean(name, map(str, keys))} It has {listed(keys)}. Choose by position, "
                "or by key where the result is a dict."
            )
        wanted[str(keys[_at(name)]) if at else name] = layout
    return {key: _one(wanted, str(key), value, place) for key, value in parts.items()}
