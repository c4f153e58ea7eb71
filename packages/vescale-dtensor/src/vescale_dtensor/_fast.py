"""The short road: a call that was seen before, with flat arguments, and moves nothing.

Most calls of a model are of this kind: the operands already lie as the plan wants them, one tensor
comes out. For those the table here leads from the function and the operands' specs (layout, shape,
dtype: interned, compared by identity) straight to the local call and the spec of the result.
Whatever is special takes `_dispatch`, which knows everything. Forgetting a route costs time only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vescale_dtensor._call import Call, Reads
from vescale_dtensor._convert import face, refuse_hidden_node
from vescale_dtensor._copies import check_writable
from vescale_dtensor._dispatch import dispatch, plan_for, rule_or_none
from vescale_dtensor._execute import written
from vescale_dtensor._layout import Spec, spec_of
from vescale_dtensor._plan import Plan, Rule, function_name
from vescale_dtensor._tensor import DTensor, wrap
from vescale_dtensor._torch_compat import dispatch_modes
from vescale_dtensor._watch import watchers

is_compiling = torch.compiler.is_compiling

_MOST_ROUTES = 32768
_routes: dict[tuple[Any, ...], Route | None] = {}
# Functions whose rule does not read numbers: a learning rate must not make a key of its own.
_number_free: set[Any] = set()
_PLAIN_TYPES = frozenset(
    {bool, str, type(None), type(...), torch.dtype, torch.memory_format, torch.device}
)


class Route:
    """Where a known call leads.

    Attributes:
        varying: per operand, the mask of axes on which it is used varyingly.
        spec: of the result.
        writes: whether argument 0 is changed in place and returned.
        views: whether the result aliases argument 0.
    """

    __slots__ = ("spec", "varying", "views", "writes")

    def __init__(self, plan: Plan, spec: Spec) -> None:
        self.varying = tuple(need.varying for need in plan.needs)
        self.spec = spec
        self.writes = plan.rule.writes is not None
        self.views = plan.rule.views


def call_through(func: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None) -> Any:
    """Run a torch function that was called with a DTensor among its arguments."""
    if watchers or is_compiling() or dispatch_modes():
        return _special(func, args, kwargs or {})
    by_value = func not in _number_free
    key: list[Any] = [func]
    operands: list[DTensor] = []
    for value in args:
        if not _scan(value, key, operands, by_value):
            return dispatch(func, args, kwargs or {})
    if kwargs:
        for name, value in kwargs.items():
            key.append(name)
            if not _scan(value, key, operands, by_value):
                return dispatch(func, args, kwargs)
    differentiable = torch.is_grad_enabled() and _records(operands)
    key.append(differentiable)
    filed = tuple(key)
    route = _routes.get(filed, _UNKNOWN)
    if route is _UNKNOWN:
        return _learn(func, args, kwargs or {}, filed, differentiable)
    if route is None or (route.views and args[0]._copied_from is not None):
        return dispatch(func, args, kwargs or {})
    return _follow(route, func, args, kwargs, operands, differentiable)


_UNKNOWN: Any = object()


def _scan(value: Any, key: list[Any], operands: list[DTensor], by_value: bool) -> bool:
    """Add an argument to the key; False if it is of no kind that the table knows."""
    kind = type(value)
    if kind is DTensor:
        key.append(value._spec)
        operands.append(value)
    elif kind is float or kind is int:
        key.append((kind, value) if by_value else kind)
    elif kind in _PLAIN_TYPES:
        key.append(value)
    elif kind is slice:
        key.append((slice, value.start, value.stop, value.step))
    elif kind is tuple or kind is torch.Size:
        key.append((tuple, len(value)))
        # Tensors in a sequence (cat, stack) take the long road: only flat arguments are replaced.
        return all(type(item) is not DTensor and _scan(item, key, operands, True) for item in value)
    else:
        return False
    return True


def _records(operands: list[DTensor]) -> bool:
    """Whether autograd records a call on these. Notices what a custom Function returned."""
    found = False
    for operand in operands:
        if operand._suspect:
            refuse_hidden_node(operand)
        found = found or operand._local_tensor.requires_grad
    return found


def _special(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if is_compiling():
        return _eagerly(func, args, kwargs)
    return dispatch(func, args, kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _eagerly(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A break in a graph that torch.compile builds: this call runs as it would without."""
    return dispatch(func, args, kwargs)


def _follow(
    route: Route,
    func: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any] | None,
    operands: list[DTensor],
    differentiable: bool,
) -> Any:
    if route.writes:
        check_writable(args[0], function_name(func))
    if differentiable:
        used = iter([face(o, v) for o, v in zip(operands, route.varying, strict=True)])
    else:
        used = iter([operand._local_tensor for operand in operands])
    locals_ = [next(used) if type(value) is DTensor else value for value in args]
    if kwargs:
        named = {k: next(used) if type(v) is DTensor else v for k, v in kwargs.items()}
        result = func(*locals_, **named)
    else:
        result = func(*locals_)
    if route.writes:
        return written(args[0])
    if result is operands[0]._local_tensor:
        return operands[0]  # x.contiguous(), x.to(…): one tensor keeps one wrapper
    spec = route.spec
    if result.dtype is not spec.tensor_meta.dtype:  # autocast, or another default dtype
        spec = spec_of(spec.layout, tuple(spec.shape), result.dtype)
    return wrap(result, spec)


def _learn(
    func: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    filed: tuple[Any, ...],
    differentiable: bool,
) -> Any:
    rule = rule_or_none(func)
    if rule is not None and not rule.reads & Reads.NUMBERS and func not in _number_free:
        _number_free.add(func)
        return dispatch(func, args, kwargs)  # this key has numbers in it that later ones lack
    # Before the call, which may change a layout: reading a gradient's total makes it whole.
    plan = None if rule is None else _still_plan(func, args, kwargs, rule, differentiable)
    result = dispatch(func, args, kwargs)
    _file(filed, Route(plan, result._spec) if plan and type(result) is DTensor else None)
    return result


def _still_plan(
    func: Callable[..., Any], args: Any, kwargs: dict[str, Any], rule: Rule, differentiable: bool
) -> Plan | None:
    """The plan of a call, if following it moves no operand and needs nothing special."""
    if kwargs.get("out") is not None or rule.writes not in (None, 0):
        return None
    if differentiable and rule.writes is not None:
        return None
    call = Call(func, args, kwargs, rule.reads)
    plan = plan_for(call, rule)
    if plan is None or plan.strategy.local is not None:
        return None
    still = all(
        isinstance(operand, DTensor) and operand._spec.layout.placements == need.layout.placements
        for operand, need in zip(call.operands, plan.needs, strict=True)
    )
    return plan if still else None


def _file(filed: tuple[Any, ...], route: Route | None) -> None:
    if len(_routes) >= _MOST_ROUTES:
        _routes.clear()
    _routes[filed] = route
