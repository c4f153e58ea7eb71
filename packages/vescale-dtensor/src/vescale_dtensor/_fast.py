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
from vescale_dtensor._layout import Spec, spec_of
from vescale_dtensor._plan import Plan, function_name
from vescale_dtensor._tensor import DTensor, wrap
from vescale_dtensor._torch_compat import dispatch_modes

is_compiling = torch.compiler.is_compiling

_MOST_ROUTES = 32768
_routes: dict[tuple[Any, ...], Route | None] = {}
# Functions whose rule does not read numbers: a learning rate must not make a key of its own.
_number_free: set[Any] = set()
# While somebody watches (explain, strict), everything takes the road that can be watched.
watchers: list[Any] = []

_PLAIN_TYPES = (bool, str, type(None), torch.dtype, torch.memory_format, torch.device)


class Route:
    """Where a known call leads.

    Attributes:
        varying: per argument, the mask of axes on which it is used varyingly.
        spec: of the result.
        writes: whether argument 0 is changed in place and returned.
        views: whether the result aliases argument 0.
    """

    __slots__ = ("spec", "varying", "views", "writes")

    def __init__(self, plan: Plan, args: tuple[Any, ...], spec: Spec) -> None:
        needs = iter(plan.needs)
        self.varying = [next(needs).varying if isinstance(a, DTensor) else 0 for a in args]
        self.spec = spec
        self.writes = plan.rule.writes is not None
        self.views = plan.rule.views


def call_through(func: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None) -> Any:
    """Run a torch function that was called with a DTensor among its arguments."""
    if kwargs or watchers or is_compiling() or dispatch_modes():
        return _watched(func, args, kwargs or {})
    by_value = func not in _number_free
    recording = torch.is_grad_enabled()
    differentiable = False
    key: list[Any] = [func]
    for value in args:
        kind = type(value)
        if kind is DTensor:
            key.append(value._spec)
            if recording:
                if value._suspect:
                    refuse_hidden_node(value)
                if value._local_tensor.requires_grad:
                    differentiable = True
        elif kind is float or kind is int:
            key.append((kind, value) if by_value else kind)
        elif kind in _PLAIN_TYPES:
            key.append(value)
        else:
            return dispatch(func, args, {})
    key.append(differentiable)
    filed = tuple(key)
    route = _routes.get(filed, _UNKNOWN)
    if route is _UNKNOWN:
        return _learn(func, args, filed, differentiable)
    if route is None:
        return dispatch(func, args, {})
    return _follow(route, func, args, differentiable)


_UNKNOWN: Any = object()


def _watched(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if is_compiling():
        return _eagerly(func, args, kwargs)
    return dispatch(func, args, kwargs)


@torch.compiler.disable
def _eagerly(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A break in a graph that torch.compile builds: this call runs as it would without."""
    return dispatch(func, args, kwargs)


def _follow(route: Route, func: Callable[..., Any], args: Any, differentiable: bool) -> Any:
    if route.writes:
        check_writable(args[0], function_name(func))
        func(*[a._local_tensor if type(a) is DTensor else a for a in args])
        return args[0]
    if route.views and args[0]._copied_from is not None:
        return dispatch(func, args, {})
    if differentiable:
        varying = route.varying
        result = func(
            *[face(a, varying[i]) if type(a) is DTensor else a for i, a in enumerate(args)]
        )
    else:
        result = func(*[a._local_tensor if type(a) is DTensor else a for a in args])
    spec = route.spec
    if result.dtype is not spec.tensor_meta.dtype:  # autocast, or another default dtype
        spec = spec_of(spec.layout, tuple(spec.shape), result.dtype)
    return wrap(result, spec)


def _learn(
    func: Callable[..., Any], args: Any, filed: tuple[Any, ...], differentiable: bool
) -> Any:
    result = dispatch(func, args, {})
    rule = rule_or_none(func)
    if rule is None:
        if type(result) is DTensor:
            _file(filed, None)
        return result
    if not rule.reads & Reads.NUMBERS and func not in _number_free:
        _number_free.add(func)
        return result  # this key has a number in it that later ones will not have
    call = Call(func, args, {}, rule.reads)
    plan = plan_for(call, rule)
    routable = plan is not None and type(result) is DTensor and _moves_nothing(call, plan)
    if routable and plan is not None and not (differentiable and rule.writes is not None):
        _file(filed, Route(plan, args, result._spec))
    else:
        _file(filed, None)
    return result


def _moves_nothing(call: Call, plan: Plan) -> bool:
    if plan.strategy.local is not None or plan.rule.writes not in (None, 0):
        return False
    return all(
        isinstance(operand, DTensor) and operand._spec.layout.placements == need.layout.placements
        for operand, need in zip(call.operands, plan.needs, strict=True)
    )


def _file(filed: tuple[Any, ...], route: Route | None) -> None:
    if len(_routes) >= _MOST_ROUTES:
        _routes.clear()
    _routes[filed] = route
