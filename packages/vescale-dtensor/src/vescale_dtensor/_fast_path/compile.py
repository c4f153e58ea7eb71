"""Compiles a planned call into a closure: unwrap the operands, call torch, wrap the result.

A compiled call closes over the torch function, what each operand needs, and the spec of the result.
It is stored under the function and the operands' specs (layout, shape, dtype; interned, compared by
identity), in one table per autograd state. Here is decided which calls can be compiled and to which
of the closures of `forms` and `compile_general`.

Autocast and the default dtype are not in the key. They can change the dtype of a result, so every
compiled call compares that with the spec's; the layout does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from vescale_dtensor._autograd.local_use import recorded_local
from vescale_dtensor._autograd.redistribution_cache import redistributed_cached
from vescale_dtensor._dispatch.dispatch import dispatch
from vescale_dtensor._dispatch.execute import execute, is_conversion
from vescale_dtensor._dispatch.plain_operands import needs_no_comparison
from vescale_dtensor._dispatch.plan_cache import plan_for
from vescale_dtensor._dispatch.registry import rule_for
from vescale_dtensor._fast_path.cache import (
    GRAD_IDLE,
    GRAD_RECORDED,
    IDLE_CALLS,
    NO_GRAD,
    CallTable,
    CompiledCall,
)
from vescale_dtensor._fast_path.compile_general import (
    compile_general,
    compile_list,
    takes_one_list,
)
from vescale_dtensor._fast_path.forms import (
    checked_dtype,
    compile_binary,
    compile_first_dtensor,
    compile_in_place,
    compile_linear_without_bias,
    compile_positional,
    compile_ternary,
    compile_unary_no_grad,
    compile_unary_recorded,
    compile_view,
    compile_with_value,
    compile_with_values,
    result_wrapper,
    unless_copy_or_gradient,
)
from vescale_dtensor._fast_path.sampled_values import with_sampled_values
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._planning.local_context import LocalContext
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OpPlan
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.lineage import call_mark, marked, with_numbers
from vescale_dtensor._torch.compat import is_traced
from vescale_dtensor._torch.scalars import asks_numbers


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
    # A view that writes to its base is a matter of this tensor, and not of its spec.
    if args and type(args[0]) is DTensor and args[0]._way_back is not None:
        return dispatch(func, args, kwargs)
    rule = rule_for(func, args, kwargs)
    call = None if rule is None else OpCall(func, args, kwargs, rule.reads)
    # All are evaluated before the call runs, since it may change specs, and counts a comparison.
    plan, redistributes = None, False
    plain: list[Any] = []
    if call is not None and rule is not None:
        plan, redistributes = _compilable_plan(call, plan_for(call, rule))
        plain = [operand for operand in call.operands if type(operand) is not DTensor]
    compared = not plain or call is None or all(needs_no_comparison(o, call) for o in plain)
    if call is not None and plan is not None:
        result = marked(lambda *_, **__: execute(plan, call), func, args, kwargs)
    else:
        result = dispatch(func, args, kwargs)
    # A compiled call would skip the comparisons over ranks that are still due.
    if not compared:
        return result
    specs = _result_specs(result)
    several = redistributes and type(result) is not DTensor  # also a tuple of one
    # "Take the slow path" is stored too, so that such a call is analyzed once only.
    if call is None or plan is None or specs is None or several:
        compiled: CompiledCall = partial(slow_path, func)
    elif redistributes:
        compiled = _compile_redistributing(call, plan, specs, table)
    else:
        compiled = _specialize(call, plan, result, specs, table, len(plain))
    # Only of plain operands are values looked at.
    if plain and call is not None:
        compiled = with_sampled_values(compiled, call)
    table.store(key, compiled)
    return result


def compile_constant(func: Callable[..., Any], asked: DTensor, answer: Any) -> Any:
    """Store the answer to a question about shape or dtype, which depends on the spec alone."""
    for table in (NO_GRAD, GRAD_IDLE, GRAD_RECORDED):
        table.store((func, asked._spec), lambda _: answer)
    return answer


def slow_path(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`dispatch` with the signature of a compiled call, once `func` is bound."""
    return dispatch(func, args, kwargs)


def _compilable_plan(call: OpCall, plan: OpPlan | None) -> tuple[OpPlan | None, bool]:
    """The plan of a call if it can be compiled, and whether it redistributes operands.

    Without a plan each call takes the slow path.
    """
    # Compiled calls write to their first argument, if to any.
    if plan is None or call.kwargs.get("out") is not None or plan.rule.writes not in (None, 0):
        return None, False
    if plan.strategy.data_dependent_shape or (plan.rule.views and plan.strategy.copy_on_shards):
        # The result's spec may differ the next time, or it has to be marked as a copy.
        return None, False
    # A recorded write changes the target's history: `execute` checks and mirrors it.
    if call.differentiable and plan.rule.writes is not None:
        return None, False
    for operand, use in zip(call.operands, plan.uses, strict=True):
        # Layouts are interned: those in place are mostly seen without comparing placements.
        in_place = isinstance(operand, DTensor) and operand._spec.layout is use.layout
        if not in_place and not _has_layout(operand, use.layout):
            break
    else:
        return plan, False
    # A redistributed operand is new memory: neither a write nor a view would reach the original.
    plain = all(type(value) is DTensor for value in call.operands) and plan.rule.writes is None
    fits = plain and not plan.rule.views and _dtensor_names(call) is not None
    return (plan, True) if fits else (None, False)


def _has_layout(operand: Tensor, needed: Layout) -> bool:
    if isinstance(operand, DTensor):
        return bool(operand._spec.layout.placements == needed.placements)
    return needed.replicated == needed.active  # a plain tensor counts as replicated


def _result_specs(result: Any) -> tuple[Spec, ...] | None:
    """The specs of the results, if all of them are DTensors."""
    if type(result) is DTensor:
        return (result._spec,)
    items = (result,) if isinstance(result, Tensor) else result
    if not isinstance(items, list | tuple) or not items:
        return None
    if any(type(item) is not DTensor for item in items):
        return None
    return tuple([item._spec for item in items])


def _specialize(
    call: OpCall,
    plan: OpPlan,
    result: Any,
    specs: tuple[Spec, ...],
    table: CallTable,
    plain: int,
) -> CompiledCall:
    """Compile a call without redistributions: the cheapest of the forms below that fits.

    Args:
        call: the parsed call.
        plan: its plan.
        result: what the first such call gave.
        specs: of the results.
        table: the one of the call's autograd state.
        plain: how many of the operands are plain tensors.
    """
    strategy, rule = plan.strategy, plan.rule
    # The key holds all shapes and numbers that `specialize` may read.
    bound = None if strategy.specialize is None else strategy.specialize(LocalContext(call, plan))
    func = call.func if bound is None else bound
    # Outside of recorded calls no use has a type, and the local tensors are taken as they are.
    masks = _varying(call, plan) if table is GRAD_RECORDED else None
    own = strategy.local is not None and bound is None
    # By what the caller wrote, and not by what runs in its place.
    mark = call_mark(call.func, specs[0])
    token = mark.token
    places = _dtensor_positions(call, plain)
    if places is None and not own and masks is None and takes_one_list(call, result, rule):
        compiled = compile_list(func, result_wrapper(call.func, specs[0], table), mark)
    elif own or type(result) is not DTensor or places is None:
        compiled = compile_general(
            func, call.func, strategy.local if own else None, plan, result, specs, masks
        )
    elif rule.writes is not None:
        return compile_in_place(func, places, specs[0].layout.mesh)
    elif len(call.args) == 2 == len(places) and not call.kwargs:
        wrap_result = result_wrapper(call.func, specs[0], table, rule.views)
        compiled = compile_binary(func, wrap_result, masks, token)
        # `lookup` runs these inline: only calls that need nothing but the result's spec.
        if table is GRAD_IDLE and bound is None and not rule.views:
            first, second = call.args
            inline = (specs[0], checked_dtype(call, specs[0]), token, mark.call)
            IDLE_CALLS.store(func, (first._spec, second._spec), inline)
    elif places == (0,) and rule.views:
        wrap_result = result_wrapper(call.func, specs[0], table, views=True)
        copies = strategy.copy_on_one_device or is_conversion(call.func)
        return compile_view(func, wrap_result, masks, call.func, copies, mark, bool(call.kwargs))
    elif places == (0,) and masks is None and len(call.args) == 1 and not call.kwargs:
        dtype = checked_dtype(call, specs[0])
        compiled = compile_unary_no_grad(func, specs[0], table is NO_GRAD, mark, dtype)
        if table is GRAD_IDLE and bound is None:
            inline = (specs[0], dtype, token, mark.call)
            IDLE_CALLS.store(func, (call.args[0]._spec,), inline)
    elif places == (0,) and masks is None and len(call.args) == 2 and not call.kwargs:
        compiled = compile_with_value(func, specs[0], table is NO_GRAD, mark)
    elif places == (0,) and masks is None:
        compiled = compile_with_values(func, specs[0], table is NO_GRAD, mark)
    elif places == (0,) and masks is not None:
        wrap_result = result_wrapper(call.func, specs[0], table)
        if len(call.args) == 1 and not call.kwargs:
            compiled = compile_unary_recorded(func, wrap_result, masks, mark)
        else:
            compiled = compile_first_dtensor(func, wrap_result, masks[0], mark)
    elif places == (0, 1) and len(call.args) == 3 and call.args[2] is None and not call.kwargs:
        wrap_result = result_wrapper(call.func, specs[0], table)
        compiled = compile_linear_without_bias(func, wrap_result, masks, token)
    elif len(call.args) == 3 == len(places) and not call.kwargs and not rule.views:
        wrap_result = result_wrapper(call.func, specs[0], table)
        compiled = compile_ternary(func, wrap_result, masks, token)
    else:
        compiled = compile_positional(
            func,
            places,
            result_wrapper(call.func, specs[0], table, rule.views),
            masks,
            mark,
        )
    # `plain[dtensor]` picks from a plain tensor: a copy, and no view of a DTensor.
    views = rule.views and type(call.operands[0]) is DTensor
    return unless_copy_or_gradient(call.func, compiled) if views else compiled


def _varying(call: OpCall, plan: OpPlan) -> tuple[int, ...]:
    """The axes on which the use of each DTensor varies, as masks."""
    pairs = zip(plan.uses, call.operands, strict=True)
    return tuple([use.varying for use, operand in pairs if type(operand) is DTensor])


def _compile_redistributing(
    call: OpCall, plan: OpPlan, specs: tuple[Spec, ...], table: CallTable
) -> CompiledCall:
    """Compile a call that redistributes operands first; none of them is in a list."""
    func, strategy = call.func, plan.strategy
    bound = None if strategy.specialize is None else strategy.specialize(LocalContext(call, plan))
    if len(specs) != 1 or (strategy.local is not None and bound is None):
        return partial(slow_path, func)
    wrap_result, typed = result_wrapper(func, specs[0], table), table is GRAD_RECORDED
    mark = call_mark(func, specs[0])
    places, names = _dtensor_names(call) or ((), ())
    uses = plan.uses

    def run(*args: Any, **named: Any) -> DTensor:
        operands = [args[place] for place in places]
        operands += [named[name] for name in names]
        if any(operand._grad_of is not None for operand in operands):
            # Reducing a gradient for one argument changes the layout of another that is the same
            # gradient: the slow path looks again after all were redistributed.
            return dispatch(func, args, named)  # type: ignore[no-any-return]
        lineages = [operand._lineage for operand in operands]
        # All are redistributed before any is used, in the order of the slow path, which another
        # rank may take. Backward runs nodes in the reverse order of their making, and those that
        # communicate have to do so in one order on all ranks.
        moved = [redistributed_cached(o, use.layout) for o, use in zip(operands, uses, strict=True)]
        if typed:
            used = [recorded_local(o, use.varying) for o, use in zip(moved, uses, strict=True)]
        else:
            used = [operand._local_tensor for operand in moved]
        lineage = hash((*lineages, mark.token))
        if mark.log.samples:
            lineage = with_numbers(lineage, mark, args, named)
        values = list(args)
        for place, local in zip(places, used, strict=False):
            values[place] = local
        for name, local in zip(names, used[len(places) :], strict=True):
            named[name] = local
        return wrap_result((bound or func)(*values, **named), lineage)

    return run


def _dtensor_names(call: OpCall) -> tuple[tuple[int, ...], tuple[str, ...]] | None:
    """Positions and names of the DTensors among the arguments; None if one is in a list."""
    places = tuple([i for i, value in enumerate(call.args) if type(value) is DTensor])
    names = tuple([name for name, value in call.kwargs.items() if type(value) is DTensor])
    wrappers = sum([type(operand) is DTensor for operand in call.operands])
    return (places, names) if len(places) + len(names) == wrappers else None


def _dtensor_positions(call: OpCall, plain: int) -> tuple[int, ...] | None:
    """Positions of the DTensors among the arguments; None if one is passed by name or in a list."""
    places = tuple([i for i, value in enumerate(call.args) if type(value) is DTensor])
    return places if len(places) == len(call.operands) - plain else None
