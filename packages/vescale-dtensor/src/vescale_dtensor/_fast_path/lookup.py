"""The short road: a call that was seen before leads from its operands' specs to its route.

Most calls of a model are of this kind: the operands already lie as the plan wants them, and one
tensor comes out. `_routes` says what a route is. Whatever is special takes `_dispatch`, which knows
everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from vescale_dtensor._autograd.local_use import guarded, join_hidden_node
from vescale_dtensor._autograd.redistribution_cache import stand_in
from vescale_dtensor._dispatch.dispatch import dispatch
from vescale_dtensor._dispatch.registry import constants, handlers, rule_for, scalar_agnostic
from vescale_dtensor._fast_path.cache import (
    Table,
    of_two,
    recorded,
    unrecorded,
    unwatched,
)
from vescale_dtensor._fast_path.compile import learn, learn_constant, retyped
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.observers import watchers
from vescale_dtensor._torch.compat import close_memory, dispatch_modes, new_wrapper

# Tracing by torch.compile; the other tracers are dispatch modes.
is_compiling = torch.compiler.is_dynamo_compiling
is_grad_enabled = torch.is_grad_enabled

_NUMBERS = frozenset({int, float})
_VALUES = frozenset(
    {bool, str, type(None), type(...), torch.dtype, torch.memory_format, torch.device}
)
_ANY_VALUE = _VALUES | _NUMBERS
_SEQUENCES = frozenset({tuple, list, torch.Size})
_ALL_OURS = {DTensor}
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_TENSORS = frozenset({DTensor, *_PLAIN})
# Between positional arguments and named ones, so that no text is taken for a name.
NAMED = object()
GETITEM = torch.Tensor.__getitem__
_NO_TABLE = Table()


def torch_function(
    cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """`DTensor.__torch_function__`: a torch function was called with a DTensor at hand.

    Calls of one DTensor, of two, and of one with values are looked up without a loop: they are
    most of all calls, and half a microsecond matters to each.
    """
    if watchers or is_compiling() or dispatch_modes():
        return _special(func, args, kwargs or {})
    if not kwargs and len(args) == 2 and type(args[1]) is DTensor is type(args[0]):
        first, second = args
        local, other = first._local_tensor, second._local_tensor
        if not is_grad_enabled():
            guarded(first)
            guarded(second)
            table = unwatched
        elif first._suspect or second._suspect:
            table = _NO_TABLE
        elif local.requires_grad or other.requires_grad:
            table = recorded
        else:
            spec = of_two.get((func, first._spec, second._spec))
            if spec is not None:
                # A route written out: no call is as common as this one.
                result = func(local, other)
                if result.dtype is not spec.tensor_meta.dtype:
                    return retyped(result, spec)
                wrapper: DTensor = new_wrapper(DTensor, result, spec, requires_grad=False)
                close_memory(wrapper)
                wrapper._suspect = False
                return wrapper
            table = unrecorded
        route = table.get((func, first._spec, second._spec))
        return _any_call(func, args, {}) if route is None else route(first, second)
    if not args or type(args[0]) is not DTensor:
        return _any_call(func, args, kwargs or {})
    if len(args) == 1 and not kwargs:
        (first,) = args
        route = table_of_one(first).get((func, first._spec))
        return _any_call(func, args, {}) if route is None else route(first)
    return _of_mixed(func, args, kwargs or {})


def _of_mixed(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A call of a DTensor and of something else."""
    handler = handlers.get(func)
    if handler is not None:
        return handler(*args, **kwargs)
    kind = type(args[1]) if len(args) > 1 else None
    if kind is DTensor and len(args) == 3:
        return _of_three(func, args, kwargs)
    if kind in _TENSORS:
        return (
            _with_plain(func, args)
            if len(args) == 2 and not kwargs
            else _any_call(func, args, kwargs or {})
        )
    if kind in _NUMBERS and func in scalar_agnostic and len(args) == 2 and not kwargs:
        first, number = args
        route = table_of_one(first).get((func, first._spec, kind))
        return _any_call(func, args, {}) if route is None else route(first, number)
    rest = args[1:]
    if func is GETITEM:
        return of_value(func, _index_key(args[0]._spec, rest[0]), args[0], rest, {})
    key: Any = (func, args[0]._spec, rest, *map(type, rest))  # 1 == True, which differ
    if kwargs:
        key = (*key, NAMED, *kwargs.items())
    return of_value(func, key, args[0], rest, kwargs)


def _of_three(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A call of two DTensors, and a third, a number, or None: a linear layer, `addcmul_`."""
    first, second, third = args
    last: Any = type(third)
    if third is None:
        table, last = _NO_TABLE, None
        if not (is_grad_enabled() and (first._suspect or second._suspect)):
            table = table_of_one(first)
            if table is not recorded and table_of_one(second) is recorded:
                table = recorded
    elif last is DTensor:
        table, last = _table([first, second, third]), third._spec
    elif last in _NUMBERS and func in scalar_agnostic:
        table = _table([first, second])
    else:
        return _any_call(func, args, kwargs)
    key: tuple[Any, ...] = (func, first._spec, second._spec, last)
    for name, value in kwargs.items():  # one: what the product of the others is scaled by
        if len(kwargs) > 1 or type(value) not in _NUMBERS or func not in scalar_agnostic:
            return _any_call(func, args, kwargs)
        key = (*key, NAMED, name, type(value))
    route = table.get(key)
    if route is None:
        return _any_call(func, args, kwargs)
    return route(first, second, third, **kwargs)


def _with_plain(func: Callable[..., Any], args: Any) -> Any:
    """A call of a DTensor and a plain tensor."""
    first, plain = args
    strided = plain.layout is torch.strided
    if plain.requires_grad or not (strided and plain.is_contiguous()):
        return _any_call(func, args, {})
    route = table_of_one(first).get((func, first._spec, (plain.shape, plain.dtype)))
    return _any_call(func, args, {}) if route is None else route(first, plain)


def _index_key(spec: Spec, index: Any) -> tuple[Any, ...]:
    """A key for an index; slices are none in all versions of Python."""
    kind = type(index)
    if kind is slice:
        return (GETITEM, spec, slice, index.start, index.stop, index.step)
    if kind is tuple:
        parts = tuple([(i.start, i.stop, i.step) if type(i) is slice else i for i in index])
        return (GETITEM, spec, parts, *map(type, index))
    return (GETITEM, spec, kind, index)


def of_value(
    func: Callable[..., Any], key: Any, first: DTensor, values: Any, named: dict[str, Any]
) -> Any:
    """A call of one DTensor and of values: the whole of them is one key of a shortcut."""
    try:
        route = table_of_one(first).shortcuts.get(key)
    except TypeError:  # a list is no key
        return _any_call(func, (first, *values), named)
    if route is not None:
        return route(first, *values, **named)
    return _any_call(func, (first, *values), named, key)


def table_of_one(first: DTensor) -> Table:
    """`_table` without a loop; where a hidden node has to be looked for, no table at all."""
    if not is_grad_enabled():
        if first._guard is None and first._local_tensor.requires_grad:
            guarded(first)
        return unwatched
    if first._suspect:
        return _NO_TABLE
    return recorded if first._local_tensor.requires_grad else unrecorded


def _any_call(
    func: Callable[..., Any], args: Any, kwargs: dict[str, Any], short: Any = None
) -> Any:
    """A call with any arguments."""
    handler = handlers.get(func)
    if handler is not None:
        if func in constants and len(args) == 1 and not kwargs:
            return learn_constant(func, args[0], handler(args[0]))
        return handler(*args, **kwargs)
    key: list[Any] = [func]
    operands: list[DTensor] = []
    exact = func not in scalar_agnostic
    if not _scan(args, key, operands, exact):
        return dispatch(func, args, kwargs)
    if kwargs:
        key.append(NAMED)
        key.extend(kwargs)
        if not _scan(kwargs.values(), key, operands, exact):
            return dispatch(func, args, kwargs)
    table = _table(operands)
    filed = tuple(key)
    route = table.get(filed)
    if route is not None:
        if short is not None and len(operands) == 1 and _is_plain(short[2:], exact):
            table.shortcuts.store(short, route)
        return route(*args, **kwargs)
    if any(operand._spec.is_reduced for operand in operands):
        return _with_totals(func, args, kwargs, filed, table)
    return learn(func, args, kwargs, filed, table)


def _with_totals(
    func: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    key: Any = None,
    table: Table | None = None,
) -> Any:
    """A call with partial sums whose totals are known: those are used, but for writes and views."""
    rule = rule_for(func, args, kwargs)
    if rule is None or rule.views or rule.writes is not None or kwargs.get("out") is not None:
        return dispatch(func, args, kwargs)
    if table is not None:
        # Filed is no way to a result: each time the totals are looked for.
        table.store(key, partial(_again_with_totals, func))
    return _again_with_totals(func, *args, **kwargs)


def _again_with_totals(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    named = {name: _totals(value) for name, value in kwargs.items()}
    return torch_function(DTensor, func, (), tuple(map(_totals, args)), named)


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
            if set(map(type, value)) == _ALL_OURS:  # hundreds of norms at once
                key += [item._spec for item in value]
                operands += value
            elif not _scan(value, key, operands, True):
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


def _is_plain(key: Any, numbers: bool) -> bool:
    """Whether a key holds values alone: a tensor in it would be kept, a varying number pile up."""
    known = _ANY_VALUE if numbers else _VALUES
    return all(
        _is_plain(part, numbers) if isinstance(part, tuple) else type(part) in known
        for part in key
        if part is not NAMED and not isinstance(part, type)
    )


def _table(operands: list[DTensor]) -> Table:
    """The table for how autograd looks at a call. Notices what a custom Function returned."""
    if not is_grad_enabled():
        for operand in operands:
            if operand._guard is None and operand._local_tensor.requires_grad:
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
