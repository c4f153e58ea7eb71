"""The short road: a call that was seen before leads from its operands' specs to its route.

Most calls of a model are of this kind: the operands already lie as the plan wants them, and one
tensor comes out. `_routes` says what a route is. Whatever is special takes `_dispatch`, which knows
everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from vescale_dtensor._convert import guarded, join_hidden_node
from vescale_dtensor._dispatch import constants, dispatch, handlers, rule_for
from vescale_dtensor._remembered import stand_in
from vescale_dtensor._routes import (
    Table,
    learn,
    learn_constant,
    number_free,
    recorded,
    unrecorded,
    unwatched,
)
from vescale_dtensor._tensor import DTensor
from vescale_dtensor._torch_compat import dispatch_modes
from vescale_dtensor._watch import watchers

is_compiling = torch.compiler.is_compiling
is_grad_enabled = torch.is_grad_enabled

_NUMBERS = frozenset({int, float})
_VALUES = frozenset(
    {bool, str, type(None), type(...), torch.dtype, torch.memory_format, torch.device}
)
_SEQUENCES = frozenset({tuple, list, torch.Size})
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# Between positional arguments and named ones, so that no text is taken for a name.
_NAMED = object()
_NO_TABLE: Table = {}


def torch_function(
    cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """`DTensor.__torch_function__`: a torch function was called with a DTensor at hand.

    Calls of one DTensor, of two, and of one and a number are looked up without a loop: they are
    most of all calls, and half a microsecond matters to each.
    """
    if watchers or is_compiling() or dispatch_modes():
        return _special(func, args, kwargs or {})
    if not kwargs:
        if len(args) == 2:
            first, second = args
            kind = type(second)
            if type(first) is not DTensor:
                route = None
            elif kind is DTensor:
                route = _table_of_two(first, second).get((func, first._spec, second._spec))
            elif kind not in _NUMBERS:
                route = None
            elif func in number_free:
                route = _table_of_one(first).get((func, first._spec, kind))
            else:
                route = _table_of_one(first).get((func, first._spec, kind, second))
            if route is not None:
                return route(first, second)
        elif len(args) == 1:
            (first,) = args
            if type(first) is DTensor:
                route = _table_of_one(first).get((func, first._spec))
                if route is not None:
                    return route(first)
    return _any_call(func, args, kwargs or {})


def _table_of_one(first: DTensor) -> Table:
    """`_table` without a loop; where a hidden node has to be looked for, no table at all."""
    if not is_grad_enabled():
        guarded(first)
        return unwatched
    if first._suspect:
        return _NO_TABLE
    return recorded if first._local_tensor.requires_grad else unrecorded


def _table_of_two(first: DTensor, second: DTensor) -> Table:
    if not is_grad_enabled():
        guarded(first)
        guarded(second)
        return unwatched
    if first._suspect or second._suspect:
        return _NO_TABLE
    if first._local_tensor.requires_grad or second._local_tensor.requires_grad:
        return recorded
    return unrecorded


def _any_call(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A call with any arguments."""
    handler = handlers.get(func)
    if handler is not None:
        if func in constants and len(args) == 1 and not kwargs:
            return learn_constant(func, args[0], handler(args[0]))
        return handler(*args, **kwargs)
    key: list[Any] = [func]
    operands: list[DTensor] = []
    exact = func not in number_free
    if not _scan(args, key, operands, exact):
        return dispatch(func, args, kwargs)
    if kwargs:
        key.append(_NAMED)
        key.extend(kwargs)
        if not _scan(kwargs.values(), key, operands, exact):
            return dispatch(func, args, kwargs)
    table = _table(operands)
    filed = tuple(key)
    route = table.get(filed)
    if route is not None:
        return route(*args, **kwargs)
    if any(operand._spec.is_reduced for operand in operands):
        return _with_totals(func, args, kwargs)  # never filed, so that totals are looked for
    return learn(func, args, kwargs, filed, table)


def _with_totals(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A call with partial sums whose totals are known: those are used, but for writes and views."""
    rule = rule_for(func, args, kwargs)
    if rule is None or rule.views or rule.writes is not None or kwargs.get("out") is not None:
        return dispatch(func, args, kwargs)
    return torch_function(
        DTensor, func, (), _totals(args), {name: _totals(value) for name, value in kwargs.items()}
    )


def _totals(value: Any) -> Any:
    if type(value) is DTensor:
        return stand_in(value) if value._spec.is_reduced else value
    if type(value) in (tuple, list):
        return type(value)([_totals(item) for item in value])
    return value


def _scan(values: Iterable[Any], key: list[Any], operands: list[DTensor], exact: bool) -> bool:
    """Add arguments to the key; False if one is of no kind that the tables know."""
    for value in values:
        kind = type(value)
        if kind is DTensor:
            key.append(value._spec)
            operands.append(value)
        elif kind in _VALUES:
            key.append(value)
        elif kind in _NUMBERS:
            key.append(kind)
            if exact:
                key.append(value)
        elif kind in _SEQUENCES:
            key.append((kind, len(value)))
            if not _scan(value, key, operands, True):
                return False
        elif kind in _PLAIN:
            strided = value.layout is torch.strided
            if value.requires_grad or not (strided and value.is_contiguous()):
                return False  # it has a gradient to type, or a memory order
            key.append((value.shape, value.dtype))
        elif kind is slice:
            key.append(slice)
            if not _scan((value.start, value.stop, value.step), key, operands, True):
                return False
        else:
            return False
    return True


def _table(operands: list[DTensor]) -> Table:
    """The table for how autograd looks at a call. Notices what a custom Function returned."""
    if not is_grad_enabled():
        for operand in operands:
            guarded(operand)
        return unwatched
    found = unrecorded
    for operand in operands:
        if operand._suspect:
            join_hidden_node(operand)
        if operand._local_tensor.requires_grad:
            found = recorded
    return found


def _special(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if is_compiling():
        return _eagerly(func, args, kwargs)
    # A watcher has to see what runs without it.
    return (_with_totals if _any_reduced((*args, *kwargs.values())) else dispatch)(
        func, args, kwargs
    )


def _any_reduced(values: Iterable[Any]) -> bool:
    """Whether the total of one of the operands is known."""
    return any(
        value._spec.is_reduced
        if type(value) is DTensor
        else type(value) in (tuple, list) and _any_reduced(value)
        for value in values
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _eagerly(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A break in a graph that torch.compile builds: this call runs as it would without."""
    return dispatch(func, args, kwargs)
