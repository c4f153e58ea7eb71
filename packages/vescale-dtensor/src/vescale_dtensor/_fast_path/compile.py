"""Routes: what is left of a call once its plan is known and nothing has to move.

A route is a closure over the torch function, what it does to its operands and the spec of its
result; following it is a call. It is filed under the function and the operands' specs (layout,
shape, dtype: interned, compared by identity), one table for each way that autograd looks at a call.
Routes are made before the call that teaches them: reading a gradient's total changes its layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.local_use import used
from vescale_dtensor._autograd.redistribution_cache import for_use
from vescale_dtensor._dispatch.dispatch import dispatch
from vescale_dtensor._dispatch.execute import Run, execute, written
from vescale_dtensor._dispatch.plain_operands import is_settled
from vescale_dtensor._dispatch.plan_cache import plan_for
from vescale_dtensor._dispatch.registry import rule_for
from vescale_dtensor._fast_path.cache import (
    Route,
    Table,
    of_two,
    recorded,
    unrecorded,
    unwatched,
)
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.spec import Spec, spec_of
from vescale_dtensor._planning.op_call import Call
from vescale_dtensor._planning.plan import Plan, Rule, function_name
from vescale_dtensor._tensor.copied_views import any_copies, check_writable, mark_copy, same_memory
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._torch.compat import close_memory, is_traced, new_wrapper
from vescale_dtensor._torch.scalars import asks_numbers

is_grad_enabled = torch.is_grad_enabled


def learn(
    func: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    key: tuple[Any, ...],
    table: Table,
) -> Any:
    """Answer a call by the long road, and file the short one where there is one."""
    if is_traced() or kwargs.get("out") is not None or asks_numbers(func, args, kwargs):
        return dispatch(func, args, kwargs)  # which refuses, or writes into what is given
    rule = rule_for(func, args, kwargs)
    call = None if rule is None else Call(func, args, kwargs, rule.reads)
    plan = None if call is None or rule is None else _usable_plan(call, plan_for(call, rule))
    # A plain operand counts as replicated once it has been compared over the ranks.
    moves = call is not None and plan is not None and not _stays(call, plan)
    settled = call is None or all(
        isinstance(o, DTensor) or is_settled(o, call) for o in call.operands
    )
    known = call is not None and plan is not None
    result = execute(plan, call) if known else dispatch(func, args, kwargs)  # type: ignore[arg-type]
    if not settled:
        return result
    specs = _specs(result)
    several = moves and type(result) is not DTensor  # also a tuple of one
    if call is None or plan is None or specs is None or several:
        table.store(key, partial(dispatch_call, func))
    elif moves:
        table.store(key, _moving(call, plan, specs, table))
    else:
        table.store(key, _compiled(call, plan, result, specs, table))
    return result


def learn_constant(func: Callable[..., Any], asked: DTensor, answer: Any) -> Any:
    """File the answer to a question about shape or dtype, which depends on the spec alone."""
    for table in (unwatched, unrecorded, recorded):
        table.store((func, asked._spec), lambda _: answer)
    return answer


def dispatch_call(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The long road as a route."""
    return dispatch(func, args, kwargs)


def _usable_plan(call: Call, plan: Plan | None) -> Plan | None:
    """The plan of a call, if following it needs nothing special."""
    if plan is None or call.kwargs.get("out") is not None or plan.rule.writes not in (None, 0):
        return None
    if plan.strategy.unforeseen or (plan.rule.views and plan.strategy.copied):
        return None  # results have shapes of their own, or have to be marked as copies
    if call.differentiable and plan.rule.writes is not None:
        return None
    if _stays(call, plan):
        return plan
    # What moves is new memory: neither a write nor a view would reach the operand.
    plain = all(type(value) is DTensor for value in call.operands) and plan.rule.writes is None
    return plan if plain and not plan.rule.views and _places(call) is not None else None


def _stays(call: Call, plan: Plan) -> bool:
    """Whether every operand lies as the plan wants it."""
    pairs = zip(call.operands, plan.needs, strict=True)
    return all(_is_still(operand, need.layout) for operand, need in pairs)


def _is_still(operand: Tensor, needed: Layout) -> bool:
    if isinstance(operand, DTensor):
        return bool(operand._spec.layout.placements == needed.placements)
    return needed.replicated == needed.active


def _specs(result: Any) -> tuple[Spec, ...] | None:
    """The specs of the results, if all of them are DTensors."""
    items = (result,) if isinstance(result, Tensor) else result
    if not isinstance(items, list | tuple) or not items:
        return None
    if any(type(item) is not DTensor for item in items):
        return None
    return tuple(item._spec for item in items)


def _compiled(call: Call, plan: Plan, result: Any, specs: tuple[Spec, ...], table: Table) -> Route:
    """The route of a call: the plainest of the forms below that fits."""
    strategy, rule = plan.strategy, plan.rule
    bound = None if strategy.bind is None else strategy.bind(Run(call, plan))
    func = call.func if bound is None else bound
    pairs = zip(plan.needs, call.operands, strict=True)
    varying = tuple(need.varying for need, operand in pairs if type(operand) is DTensor)
    masks = varying if table is recorded else None
    own = strategy.local is not None and bound is None
    places = _places(call)
    if places is None and not own and masks is None and _is_of_list(call, result, rule):
        route = _listed(func, _finisher(specs[0], table))
    elif own or type(result) is not DTensor or places is None:
        route = _general(func, strategy.local if own else None, plan, result, specs, masks)
    elif rule.writes is not None:
        return _writing(func, places)
    elif len(call.args) == 2 == len(places) and not call.kwargs:
        route = _pair(func, specs[0], table, masks)
        if table is unrecorded and bound is None and not rule.views:
            of_two.store((func, call.args[0]._spec, call.args[1]._spec), specs[0])
    elif places == (0,) and rule.views:
        finish = _finisher(specs[0], table, views=True)
        return _viewing(func, finish, masks, call.func, strategy.copies)
    elif places == (0,) and masks is None and len(call.args) == 1 and not call.kwargs:
        route = _single(func, specs[0], table is unwatched)
    elif places == (0,):
        more = len(call.args) > 2 or bool(call.kwargs)
        route = (_leading if more else _alone)(func, _finisher(specs[0], table, rule.views), masks)
    elif places == (0, 1) and len(call.args) == 3 and call.args[2] is None and not call.kwargs:
        route = _layer(func, _finisher(specs[0], table), masks)
    else:
        route = _flat(func, places, _finisher(specs[0], table, rule.views), masks)
    # A plain tensor that an index of another kind picks from is no view of anything.
    views = rule.views and type(call.operands[0]) is DTensor
    return _of_no_copy(call.func, route) if views else route


def _moving(call: Call, plan: Plan, specs: tuple[Spec, ...], table: Table) -> Route:
    """The route of a call that redistributes operands first."""
    func, strategy = call.func, plan.strategy
    bound = None if strategy.bind is None else strategy.bind(Run(call, plan))
    if len(specs) != 1 or (strategy.local is not None and bound is None):
        return partial(dispatch_call, func)
    finish, typed = _finisher(specs[0], table), table is recorded
    places = _places(call) or ()
    needs = tuple(zip(places, plan.needs, strict=True))

    def run(*args: Any, **named: Any) -> DTensor:
        if any(args[place]._gradient_of is not None for place in places):
            # Settling a gradient changes other operands that are the same.
            return dispatch(func, args, named)  # type: ignore[no-any-return]
        values = list(args)
        # All are moved before one is used, as the long road does it, which some ranks may take:
        # nodes that communicate in backward have to be made in one order everywhere.
        for place, need in needs:
            values[place] = for_use(args[place], need.layout)
        for place, need in needs:
            operand = values[place]
            values[place] = used(operand, need.varying) if typed else operand._local_tensor
        return finish((bound or func)(*values, **named))

    return run


def _places(call: Call) -> tuple[int, ...] | None:
    """Which arguments are DTensors; None if one is elsewhere: given by name, or in a list."""
    places = tuple(i for i, value in enumerate(call.args) if type(value) is DTensor)
    wrappers = sum(type(operand) is DTensor for operand in call.operands)
    return places if len(places) == wrappers else None


def _finisher(spec: Spec, table: Table, views: bool = False) -> Callable[[Tensor], DTensor]:
    """What makes the local result of a call a DTensor."""
    dtype, suspect = spec.tensor_meta.dtype, table is unwatched

    def finish(result: Tensor) -> DTensor:
        if result.dtype is not dtype:
            return retyped(result, spec)
        wrapper: DTensor = new_wrapper(DTensor, result, spec, requires_grad=False)
        close_memory(wrapper)
        wrapper._suspect = suspect
        return wrapper

    def finish_recorded(result: Tensor) -> DTensor:
        if result.dtype is not dtype:
            return retyped(result, spec)
        wrapper: DTensor = new_wrapper(DTensor, result, spec, requires_grad=result.requires_grad)
        close_memory(wrapper)
        wrapper._suspect = suspect
        return wrapper

    # To torch a view of a leaf wants gradients, also one that is made without grad.
    return finish_recorded if table is recorded or views else finish


Finisher = Callable[[Tensor], DTensor]
Masks = tuple[int, ...] | None


def _pair(func: Callable[..., Any], spec: Spec, table: Table, masks: Masks) -> Route:
    """Two DTensors."""
    finish = _finisher(spec, table)
    if masks is None:
        return lambda one, other: finish(func(one._local_tensor, other._local_tensor))
    mask, another = masks
    return lambda one, other: finish(func(used(one, mask), used(other, another)))


def _layer(func: Callable[..., Any], finish: Finisher, masks: Masks) -> Route:
    """Two DTensors and a None: a linear layer that has no bias."""
    if masks is None:
        return lambda one, other, _: finish(func(one._local_tensor, other._local_tensor, None))
    mask, another = masks
    return lambda one, other, _: finish(func(used(one, mask), used(other, another), None))


def _single(func: Callable[..., Any], spec: Spec, suspect: bool) -> Route:
    """A DTensor, and nothing else; autograd records nothing."""
    dtype = spec.tensor_meta.dtype

    def still(first: DTensor) -> DTensor:
        local = first._local_tensor
        result = func(local)
        if result is local:
            return first
        if result.dtype is not dtype:
            return retyped(result, spec)
        wrapper: DTensor = new_wrapper(DTensor, result, spec, requires_grad=False)
        close_memory(wrapper)
        wrapper._suspect = suspect
        return wrapper

    return still


def _alone(func: Callable[..., Any], finish: Finisher, masks: Masks) -> Route:
    """A DTensor, or a DTensor and another argument."""

    def still(first: DTensor, *rest: Any) -> DTensor:
        local = first._local_tensor
        result = func(local, *rest)
        # x.contiguous(), x.to(…): one tensor keeps one wrapper
        return first if result is local else finish(result)

    if masks is None:
        return still
    (one,) = masks

    def differentiable(first: DTensor, *rest: Any) -> DTensor:
        result = func(used(first, one), *rest)
        return first if result is first._local_tensor else finish(result)

    return differentiable


def _leading(func: Callable[..., Any], finish: Finisher, masks: Masks) -> Route:
    """A DTensor, and other arguments that are none."""
    one = None if masks is None else masks[0]

    def run(first: DTensor, *rest: Any, **named: Any) -> DTensor:
        local = first._local_tensor
        result = func(local if one is None else used(first, one), *rest, **named)
        return first if result is local else finish(result)

    return run


def _viewing(
    func: Callable[..., Any],
    finish: Finisher,
    masks: Masks,
    original: Callable[..., Any],
    copies: bool,
) -> Route:
    """`_leading` for a view; see `_of_no_copy`. `copies`: one device copies as well."""
    one = None if masks is None else masks[0]

    def run(first: DTensor, *rest: Any, **named: Any) -> Any:
        if first._copied_from is not None or first._gradient_of is not None:
            return dispatch(original, (first, *rest), named)
        local = first._local_tensor
        result = func(local if one is None else used(first, one), *rest, **named)
        if result is local:
            return first
        wrapper = finish(result)
        # A piece may lie so that no view of it has the shape of one device's view.
        if not (copies or local.is_contiguous() or same_memory(result, local)):
            mark_copy(wrapper, first)
        return wrapper

    return run


def _flat(
    func: Callable[..., Any], places: tuple[int, ...], finish: Finisher, masks: Masks
) -> Route:
    """DTensors at these positions."""
    typed = None if masks is None else tuple(zip(places, masks, strict=True))

    def run(*args: Any, **named: Any) -> DTensor:
        values = list(args)
        if typed is None:
            for place in places:
                values[place] = values[place]._local_tensor
        else:
            for place, mask in typed:
                values[place] = used(values[place], mask)
        result = func(*values, **named)
        first = args[places[0]]
        return first if result is first._local_tensor else finish(result)

    return run


def _is_of_list(call: Call, result: Any, rule: Rule) -> bool:
    """Whether a call is of one list of DTensors, first, and of values: `cat`, `stack`."""
    if type(result) is not DTensor or rule.writes is not None or rule.views:
        return False
    items: Any = call.args[0] if call.args else None
    if type(items) not in (list, tuple) or len(items) != len(call.operands):
        return False
    return all(type(item) is DTensor for item in items)


def _listed(func: Callable[..., Any], finish: Finisher) -> Route:
    """A list of DTensors, of which autograd records nothing."""

    def run(items: Any, *rest: Any, **named: Any) -> DTensor:
        return finish(func([item._local_tensor for item in items], *rest, **named))

    return run


def _writing(func: Callable[..., Any], places: tuple[int, ...]) -> Route:
    """An op in place on the first argument; autograd records nothing."""

    def run(*args: Any, **named: Any) -> DTensor:
        target: DTensor = args[0]
        if any_copies() or target._copied_from is not None:
            check_writable(target, function_name(func))
        values = list(args)
        for place in places:
            values[place] = values[place]._local_tensor
        func(*values, **named)
        written(target)
        return target

    return run


def _general(
    func: Callable[..., Any],
    local: Callable[..., Any] | None,
    plan: Plan,
    result: Any,
    specs: tuple[Spec, ...],
    masks: Masks,
) -> Route:
    """DTensors anywhere among the arguments, in lists too; any number of results."""
    writes = plan.rule.writes is not None
    single = type(result) is DTensor

    def run(*args: Any, **kwargs: Any) -> Any:
        operands: list[Any] = []
        feed = None if masks is None else iter(masks)
        values = [_taken(value, operands, feed) for value in args]
        named = {name: _taken(value, operands, feed) for name, value in kwargs.items()}
        if writes:
            check_writable(operands[0], function_name(func))
        if local is None:
            found = func(*values, **named)
        else:
            known = Call.known(func, args, kwargs, operands, masks is not None)
            found = local(Run(known, plan), values, named)
        if writes:
            return written(operands[0])
        if single:
            first = next(operand for operand in operands if type(operand) is DTensor)
            return first if found is first._local_tensor else _typed(found, specs[0])
        own = [operand._local_tensor for operand in operands if type(operand) is DTensor]
        # One among several results may be what came in.
        fresh = [item.view_as(item) if any(item is o for o in own) else item for item in found]
        items = [_typed(item, spec) for item, spec in zip(fresh, specs, strict=True)]
        return items if type(found) is list else _rebuilt(found, items)

    return run


def _taken(value: Any, operands: list[Any], masks: Iterator[int] | None) -> Any:
    """An argument with locals in place of DTensors. Operands are noted, plain ones as well.

    `masks` has an entry for each DTensor.
    """
    if type(value) is DTensor:
        operands.append(value)
        return used(value, next(masks)) if masks is not None else value._local_tensor
    if isinstance(value, Tensor):
        operands.append(value)
    elif type(value) in (list, tuple):
        return type(value)([_taken(item, operands, masks) for item in value])
    return value


def _rebuilt(found: Any, items: list[Any]) -> Any:
    if type(found) is tuple:
        return tuple(items)
    return type(found)(*items) if hasattr(found, "_fields") else type(found)(items)


def _of_no_copy(func: Callable[..., Any], route: Route) -> Route:
    """Views of a copy and of a gradient have to be noted as such: that is for the long road."""

    def run(first: DTensor, *rest: Any, **named: Any) -> Any:
        if first._copied_from is not None or first._gradient_of is not None:
            return dispatch(func, (first, *rest), named)
        return route(first, *rest, **named)

    return run


def _typed(local: Tensor, spec: Spec) -> DTensor:
    return wrap(local, spec) if local.dtype is spec.tensor_meta.dtype else retyped(local, spec)


def retyped(local: Tensor, spec: Spec) -> DTensor:
    """What a known call gives under autocast or another default dtype: another dtype."""
    return wrap(local, spec_of(spec.layout, tuple(spec.shape), local.dtype))
