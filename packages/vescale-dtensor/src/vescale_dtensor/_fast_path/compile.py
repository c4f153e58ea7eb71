"""Compiles a planned call into a closure: unwrap the operands, call torch, wrap the result.

A compiled call closes over the torch function, what each operand needs, and the spec of the result.
It is stored under the function and the operands' specs (layout, shape, dtype; interned, compared by
identity), in one table per autograd state.

Autocast and the default dtype are not in the key. They can change the dtype of a result, so every
compiled call compares that with the spec's; the layout does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.local_use import recorded_local
from vescale_dtensor._autograd.redistribution_cache import redistributed_cached
from vescale_dtensor._dispatch.dispatch import dispatch
from vescale_dtensor._dispatch.execute import after_mutation, execute
from vescale_dtensor._dispatch.plain_operands import needs_no_comparison
from vescale_dtensor._dispatch.plan_cache import plan_for
from vescale_dtensor._dispatch.registry import rule_for
from vescale_dtensor._fast_path.cache import (
    GRAD_IDLE,
    GRAD_RECORDED,
    NO_GRAD,
    CallTable,
    CompiledCall,
    binary_cache,
)
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.spec import Spec, spec_of
from vescale_dtensor._planning.local_context import LocalContext
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OpPlan, Rule, function_name
from vescale_dtensor._tensor.copied_views import any_copies, check_writable, mark_copy, same_memory
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._torch.compat import close_memory, is_traced, new_wrapper
from vescale_dtensor._torch.scalars import asks_numbers

is_grad_enabled = torch.is_grad_enabled


def compile_call(
    func: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    key: tuple[Any, ...],
    table: CallTable,
) -> Any:
    """Answer a call by the slow path, and store a compiled call for the next one like it.

    Args:
        func: the torch function.
        args: its arguments by position.
        kwargs: its arguments by name.
        key: where the compiled call is stored. Built before the call runs, as a call may change
            its operands' specs (by reducing a gradient, say).
        table: the one of the call's autograd state.
    """
    # Not stored: traced calls are refused, `out` may be resized, and sizes that are given as
    # tensors are values, which the key does not hold.
    if is_traced() or kwargs.get("out") is not None or asks_numbers(func, args, kwargs):
        return dispatch(func, args, kwargs)
    rule = rule_for(func, args, kwargs)
    call = None if rule is None else OpCall(func, args, kwargs, rule.reads)
    plan = None if call is None or rule is None else _compilable_plan(call, plan_for(call, rule))
    # Both are evaluated before the call runs, since it may change specs, and counts a comparison.
    moves = call is not None and plan is not None and not _needs_no_redistribution(call, plan)
    settled = call is None or all(
        isinstance(o, DTensor) or needs_no_comparison(o, call) for o in call.operands
    )
    known = call is not None and plan is not None
    result = execute(plan, call) if known else dispatch(func, args, kwargs)  # type: ignore[arg-type]
    # A compiled call would skip the comparisons over ranks that are still due.
    if not settled:
        return result
    specs = _result_specs(result)
    several = moves and type(result) is not DTensor  # also a tuple of one
    # "Take the slow path" is stored too, so that such a call is analyzed once only.
    if call is None or plan is None or specs is None or several:
        table.store(key, partial(slow_path, func))
    elif moves:
        table.store(key, _compile_redistributing(call, plan, specs, table))
    else:
        table.store(key, _specialize(call, plan, result, specs, table))
    return result


def compile_constant(func: Callable[..., Any], asked: DTensor, answer: Any) -> Any:
    """Store the answer to a question about shape or dtype, which depends on the spec alone."""
    for table in (NO_GRAD, GRAD_IDLE, GRAD_RECORDED):
        table.store((func, asked._spec), lambda _: answer)
    return answer


def slow_path(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`dispatch` with the signature of a compiled call, once `func` is bound."""
    return dispatch(func, args, kwargs)


def _compilable_plan(call: OpCall, plan: OpPlan | None) -> OpPlan | None:
    """The plan of a call if it can be compiled, else None: then each call takes the slow path."""
    # Compiled calls write to their first argument, if to any.
    if plan is None or call.kwargs.get("out") is not None or plan.rule.writes not in (None, 0):
        return None
    if plan.strategy.data_dependent_shape or (plan.rule.views and plan.strategy.copy_on_shards):
        return None  # the result's spec may differ the next time, or it has to be marked as a copy
    # A recorded write changes the target's history: `execute` checks and mirrors it.
    if call.differentiable and plan.rule.writes is not None:
        return None
    if _needs_no_redistribution(call, plan):
        return plan
    # A redistributed operand is new memory: neither a write nor a view would reach the original.
    plain = all(type(value) is DTensor for value in call.operands) and plan.rule.writes is None
    return plan if plain and not plan.rule.views and _dtensor_positions(call) is not None else None


def _needs_no_redistribution(call: OpCall, plan: OpPlan) -> bool:
    """Whether every operand has the placements that the plan wants."""
    pairs = zip(call.operands, plan.uses, strict=True)
    return all(_has_layout(operand, use.layout) for operand, use in pairs)


def _has_layout(operand: Tensor, needed: Layout) -> bool:
    if isinstance(operand, DTensor):
        return bool(operand._spec.layout.placements == needed.placements)
    return needed.replicated == needed.active  # a plain tensor counts as replicated


def _result_specs(result: Any) -> tuple[Spec, ...] | None:
    """The specs of the results, if all of them are DTensors."""
    items = (result,) if isinstance(result, Tensor) else result
    if not isinstance(items, list | tuple) or not items:
        return None
    if any(type(item) is not DTensor for item in items):
        return None
    return tuple(item._spec for item in items)


def _specialize(
    call: OpCall, plan: OpPlan, result: Any, specs: tuple[Spec, ...], table: CallTable
) -> CompiledCall:
    """Compile a call without redistributions: the cheapest of the forms below that fits."""
    strategy, rule = plan.strategy, plan.rule
    # The key holds all shapes and numbers that `specialize` may read.
    bound = None if strategy.specialize is None else strategy.specialize(LocalContext(call, plan))
    func = call.func if bound is None else bound
    pairs = zip(plan.uses, call.operands, strict=True)
    varying = tuple(use.varying for use, operand in pairs if type(operand) is DTensor)
    # Outside of recorded calls no use has a type, and the local tensors are taken as they are.
    masks = varying if table is GRAD_RECORDED else None
    own = strategy.local is not None and bound is None
    places = _dtensor_positions(call)
    if places is None and not own and masks is None and _takes_one_list(call, result, rule):
        compiled = _compile_list(func, _result_wrapper(specs[0], table))
    elif own or type(result) is not DTensor or places is None:
        compiled = _compile_general(
            func, strategy.local if own else None, plan, result, specs, masks
        )
    elif rule.writes is not None:
        return _compile_in_place(func, places)
    elif len(call.args) == 2 == len(places) and not call.kwargs:
        compiled = _compile_binary(func, specs[0], table, masks)
        # `lookup` runs these inline: only calls that need nothing but the result's spec.
        if table is GRAD_IDLE and bound is None and not rule.views:
            binary_cache.store((func, call.args[0]._spec, call.args[1]._spec), specs[0])
    elif places == (0,) and rule.views:
        wrap_result = _result_wrapper(specs[0], table, views=True)
        return _compile_view(func, wrap_result, masks, call.func, strategy.copy_on_one_device)
    elif places == (0,) and masks is None and len(call.args) == 1 and not call.kwargs:
        compiled = _compile_unary_no_grad(func, specs[0], table is NO_GRAD)
    elif places == (0,):
        more = len(call.args) > 2 or bool(call.kwargs)
        compiled = (_compile_first_dtensor if more else _compile_one_dtensor)(
            func, _result_wrapper(specs[0], table, rule.views), masks
        )
    elif places == (0, 1) and len(call.args) == 3 and call.args[2] is None and not call.kwargs:
        compiled = _compile_linear_without_bias(func, _result_wrapper(specs[0], table), masks)
    else:
        compiled = _compile_positional(
            func, places, _result_wrapper(specs[0], table, rule.views), masks
        )
    # `plain[dtensor]` picks from a plain tensor: a copy, and no view of a DTensor.
    views = rule.views and type(call.operands[0]) is DTensor
    return _unless_copy_or_gradient(call.func, compiled) if views else compiled


def _compile_redistributing(
    call: OpCall, plan: OpPlan, specs: tuple[Spec, ...], table: CallTable
) -> CompiledCall:
    """Compile a call that redistributes operands first; all of them are positional arguments."""
    func, strategy = call.func, plan.strategy
    bound = None if strategy.specialize is None else strategy.specialize(LocalContext(call, plan))
    if len(specs) != 1 or (strategy.local is not None and bound is None):
        return partial(slow_path, func)
    wrap_result, typed = _result_wrapper(specs[0], table), table is GRAD_RECORDED
    places = _dtensor_positions(call) or ()
    uses = tuple(zip(places, plan.uses, strict=True))

    def run(*args: Any, **named: Any) -> DTensor:
        if any(args[place]._grad_of is not None for place in places):
            # Reducing a gradient for one argument changes the layout of another that is the same
            # gradient: the slow path looks again after all were redistributed.
            return dispatch(func, args, named)  # type: ignore[no-any-return]
        values = list(args)
        # All are redistributed before any is used, in the order of the slow path, which another
        # rank may take. Backward runs nodes in the reverse order of their making, and those that
        # communicate have to do so in one order on all ranks.
        for place, use in uses:
            values[place] = redistributed_cached(args[place], use.layout)
        for place, use in uses:
            operand = values[place]
            values[place] = recorded_local(operand, use.varying) if typed else operand._local_tensor
        return wrap_result((bound or func)(*values, **named))

    return run


def _dtensor_positions(call: OpCall) -> tuple[int, ...] | None:
    """Positions of the DTensors among the arguments; None if one is passed by name or in a list."""
    places = tuple(i for i, value in enumerate(call.args) if type(value) is DTensor)
    wrappers = sum(type(operand) is DTensor for operand in call.operands)
    return places if len(places) == wrappers else None


def _result_wrapper(
    spec: Spec, table: CallTable, views: bool = False
) -> Callable[[Tensor], DTensor]:
    """A function that wraps the local result of a call; `views`: of a view.

    `wrap` written out twice, without what is known beforehand: it runs at every call.
    """
    # A result made without grad may be the output of a custom Function's forward.
    dtype, may_have_hidden_node = spec.tensor_meta.dtype, table is NO_GRAD

    def wrap_result(result: Tensor) -> DTensor:
        if result.dtype is not dtype:  # autocast, or another default dtype
            return wrap_other_dtype(result, spec)
        wrapper: DTensor = new_wrapper(DTensor, result, spec, requires_grad=False)
        close_memory(wrapper)
        wrapper._may_have_hidden_node = may_have_hidden_node
        return wrapper

    def finish_recorded(result: Tensor) -> DTensor:
        if result.dtype is not dtype:
            return wrap_other_dtype(result, spec)
        wrapper: DTensor = new_wrapper(DTensor, result, spec, requires_grad=result.requires_grad)
        close_memory(wrapper)
        wrapper._may_have_hidden_node = may_have_hidden_node
        return wrapper

    # A view of a tensor that requires grad does so in torch, also if it is made under no_grad.
    return finish_recorded if table is GRAD_RECORDED or views else wrap_result


WrapResult = Callable[[Tensor], DTensor]
# The axes on which each DTensor's use varies; None where autograd records nothing.
Masks = tuple[int, ...] | None


def _compile_binary(
    func: Callable[..., Any], spec: Spec, table: CallTable, masks: Masks
) -> CompiledCall:
    """The call of two DTensors and nothing else."""
    wrap_result = _result_wrapper(spec, table)
    if masks is None:
        return lambda one, other: wrap_result(func(one._local_tensor, other._local_tensor))
    mask, another = masks
    return lambda one, other: wrap_result(
        func(recorded_local(one, mask), recorded_local(other, another))
    )


def _compile_linear_without_bias(
    func: Callable[..., Any], wrap_result: WrapResult, masks: Masks
) -> CompiledCall:
    """The call of two DTensors and a None: a linear layer without bias."""
    if masks is None:
        return lambda one, other, _: wrap_result(func(one._local_tensor, other._local_tensor, None))
    mask, another = masks
    return lambda one, other, _: wrap_result(
        func(recorded_local(one, mask), recorded_local(other, another), None)
    )


def _compile_unary_no_grad(
    func: Callable[..., Any], spec: Spec, may_have_hidden_node: bool
) -> CompiledCall:
    """The call of one DTensor and nothing else, not recorded: `_result_wrapper` written out."""
    dtype = spec.tensor_meta.dtype

    def still(first: DTensor) -> DTensor:
        local = first._local_tensor
        result = func(local)
        if result is local:  # x.contiguous(), x.detach_(): one local tensor keeps one wrapper
            return first
        if result.dtype is not dtype:
            return wrap_other_dtype(result, spec)
        wrapper: DTensor = new_wrapper(DTensor, result, spec, requires_grad=False)
        close_memory(wrapper)
        wrapper._may_have_hidden_node = may_have_hidden_node
        return wrapper

    return still


def _compile_one_dtensor(
    func: Callable[..., Any], wrap_result: WrapResult, masks: Masks
) -> CompiledCall:
    """The call of one DTensor, and at most one other argument."""

    def still(first: DTensor, *rest: Any) -> DTensor:
        local = first._local_tensor
        result = func(local, *rest)
        # x.contiguous(), x.to(…) may return their argument: one local tensor keeps one wrapper.
        return first if result is local else wrap_result(result)

    if masks is None:
        return still
    (one,) = masks

    def differentiable(first: DTensor, *rest: Any) -> DTensor:
        result = func(recorded_local(first, one), *rest)
        return first if result is first._local_tensor else wrap_result(result)

    return differentiable


def _compile_first_dtensor(
    func: Callable[..., Any], wrap_result: WrapResult, masks: Masks
) -> CompiledCall:
    """The call of one DTensor in the first place, and of any arguments that are not DTensors."""
    one = None if masks is None else masks[0]

    def run(first: DTensor, *rest: Any, **named: Any) -> DTensor:
        local = first._local_tensor
        result = func(local if one is None else recorded_local(first, one), *rest, **named)
        return first if result is local else wrap_result(result)

    return run


def _compile_view(
    func: Callable[..., Any],
    wrap_result: WrapResult,
    masks: Masks,
    original: Callable[..., Any],
    copies: bool,
) -> CompiledCall:
    """`_compile_first_dtensor` for a view, with the checks of `_unless_copy_or_gradient`.

    Args:
        func: called on the local tensor.
        wrap_result: wraps the local result.
        masks: see `Masks`.
        original: the torch function of the call, for the slow path.
        copies: whether the result is a copy on one device too.
    """
    one = None if masks is None else masks[0]

    def run(first: DTensor, *rest: Any, **named: Any) -> Any:
        if first._view_copy_of is not None or first._grad_of is not None:
            return dispatch(original, (first, *rest), named)
        local = first._local_tensor
        result = func(local if one is None else recorded_local(first, one), *rest, **named)
        if result is local:
            return first
        wrapper = wrap_result(result)
        # Strides of a local tensor may allow no view of the shape that one device views: then the
        # local op has copied. The branch depends on the rank, and nothing follows from it but the
        # mark.
        if not (copies or local.is_contiguous() or same_memory(result, local)):
            mark_copy(wrapper, first)
        return wrapper

    return run


def _compile_positional(
    func: Callable[..., Any], places: tuple[int, ...], wrap_result: WrapResult, masks: Masks
) -> CompiledCall:
    """The call of DTensors at these positions, and of any other arguments."""
    typed = None if masks is None else tuple(zip(places, masks, strict=True))

    def run(*args: Any, **named: Any) -> DTensor:
        values = list(args)
        if typed is None:
            for place in places:
                values[place] = values[place]._local_tensor
        else:
            for place, mask in typed:
                values[place] = recorded_local(values[place], mask)
        result = func(*values, **named)
        # The first operand may come back as it is: one local tensor keeps one wrapper.
        first = args[places[0]]
        return first if result is first._local_tensor else wrap_result(result)

    return run


def _takes_one_list(call: OpCall, result: Any, rule: Rule) -> bool:
    """Whether a call has one list of DTensors, first, and no other operand: `cat`, `stack`."""
    if type(result) is not DTensor or rule.writes is not None or rule.views:
        return False
    items: Any = call.args[0] if call.args else None
    if type(items) not in (list, tuple) or len(items) != len(call.operands):
        return False
    return all(type(item) is DTensor for item in items)


def _compile_list(func: Callable[..., Any], wrap_result: WrapResult) -> CompiledCall:
    """The call of a list of DTensors, not recorded."""

    def run(items: Any, *rest: Any, **named: Any) -> DTensor:
        return wrap_result(func([item._local_tensor for item in items], *rest, **named))

    return run


def _compile_in_place(func: Callable[..., Any], places: tuple[int, ...]) -> CompiledCall:
    """The call of an op in place on its first argument, not recorded."""

    def run(*args: Any, **named: Any) -> DTensor:
        target: DTensor = args[0]
        # Copied views come and go between calls, so this is checked every time.
        if any_copies() or target._view_copy_of is not None:
            check_writable(target, function_name(func))
        values = list(args)
        for place in places:
            values[place] = values[place]._local_tensor
        func(*values, **named)
        after_mutation(target)
        return target

    return run


def _compile_general(
    func: Callable[..., Any],
    local: Callable[..., Any] | None,
    plan: OpPlan,
    result: Any,
    specs: tuple[Spec, ...],
    masks: Masks,
) -> CompiledCall:
    """The call of DTensors anywhere among the arguments, in lists too; any number of results.

    Args:
        func: called on the local tensors, where `local` is None.
        local: the rule's own local call.
        plan: the plan.
        result: of the first such call: one DTensor or several.
        specs: of the results.
        masks: see `Masks`.
    """
    writes = plan.rule.writes is not None
    single = type(result) is DTensor

    def run(*args: Any, **kwargs: Any) -> Any:
        operands: list[Any] = []
        feed = None if masks is None else iter(masks)
        values = [_local_arguments(value, operands, feed) for value in args]
        named = {name: _local_arguments(value, operands, feed) for name, value in kwargs.items()}
        if writes:
            check_writable(operands[0], function_name(func))
        if local is None:
            found = func(*values, **named)
        else:
            known = OpCall.known(func, args, kwargs, operands, masks is not None)
            found = local(LocalContext(known, plan), values, named)
        if writes:
            return after_mutation(operands[0])
        if single:
            first = next(operand for operand in operands if type(operand) is DTensor)
            return first if found is first._local_tensor else _typed(found, specs[0])
        own = [operand._local_tensor for operand in operands if type(operand) is DTensor]
        # One among several results may be an operand itself. Another wrapper of the same local
        # tensor would type its gradient a second time, so it gets a view.
        fresh = [item.view_as(item) if any(item is o for o in own) else item for item in found]
        items = [_typed(item, spec) for item, spec in zip(fresh, specs, strict=True)]
        return items if type(found) is list else _rebuilt(found, items)

    return run


def _local_arguments(value: Any, operands: list[Any], masks: Iterator[int] | None) -> Any:
    """An argument with local tensors in place of DTensors.

    Args:
        value: the argument.
        operands: the tensors in it are appended, plain ones too.
        masks: yields the varying axes of each DTensor; None where nothing is recorded.
    """
    if type(value) is DTensor:
        operands.append(value)
        return recorded_local(value, next(masks)) if masks is not None else value._local_tensor
    if isinstance(value, Tensor):
        operands.append(value)
    elif type(value) in (list, tuple):
        return type(value)([_local_arguments(item, operands, masks) for item in value])
    return value


def _rebuilt(found: Any, items: list[Any]) -> Any:
    """A tuple, named tuple or other sequence like `found`, with these items."""
    if type(found) is tuple:
        return tuple(items)
    return type(found)(*items) if hasattr(found, "_fields") else type(found)(items)


def _unless_copy_or_gradient(func: Callable[..., Any], compiled: CompiledCall) -> CompiledCall:
    """Send views of copied views and of gradients to the slow path.

    It marks the one as a copy too, and tracks the other, so that its layout changes with the
    gradient's.
    """

    def run(first: DTensor, *rest: Any, **named: Any) -> Any:
        if first._view_copy_of is not None or first._grad_of is not None:
            return dispatch(func, (first, *rest), named)
        return compiled(first, *rest, **named)

    return run


def _typed(local: Tensor, spec: Spec) -> DTensor:
    """Wrap a local result with this spec, or with its twin of the result's dtype."""
    return (
        wrap(local, spec)
        if local.dtype is spec.tensor_meta.dtype
        else wrap_other_dtype(local, spec)
    )


def wrap_other_dtype(local: Tensor, spec: Spec) -> DTensor:
    """Wrap the result of a compiled call that has another dtype, as under autocast."""
    return wrap(local, spec_of(spec.layout, tuple(spec.shape), local.dtype))
