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

import torch
from torch import Tensor

from vescale_dtensor._dispatch.dispatch import dispatch
from vescale_dtensor._dispatch.execute import execute, is_conversion
from vescale_dtensor._dispatch.plain_operands import needs_no_comparison
from vescale_dtensor._dispatch.plan_cache import plan_for
from vescale_dtensor._dispatch.registry import rule_for
from vescale_dtensor._fast_path.cache import (
    GRAD_IDLE,
    GRAD_RECORDED,
    NO_GRAD,
    CallTable,
    CompiledCall,
)
from vescale_dtensor._fast_path.compile_general import compile_general, unless_copy_or_gradient
from vescale_dtensor._fast_path.forms import BoundValues, Form, compiled_call
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._planning.local_context import LocalContext
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OperandUse, OpPlan
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.lineage import is_copy, marked
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
    if args and type(args[0]) is DTensor and args[0]._rare.way_back is not None:
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
    else:
        compiled = _compiled(call, plan, result, specs, table, redistributes)
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
    places = _places_of(call)
    apart = places is not None and not {"l", "s"} & {*places[0]}
    plain = all(type(value) is DTensor for value in call.operands) and plan.rule.writes is None
    fits = plain and not plan.rule.views and apart
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


def _compiled(
    call: OpCall, plan: OpPlan, result: Any, specs: tuple[Spec, ...], table: CallTable, moves: bool
) -> CompiledCall:
    """Compile a planned call: by the template, if it has a form for the arguments.

    Args:
        call: the parsed call.
        plan: its plan.
        result: what the first such call gave.
        specs: of the results.
        table: the one of the call's autograd state.
        moves: whether operands are redistributed.
    """
    strategy, rule = plan.strategy, plan.rule
    # The key holds all shapes and numbers that `specialize` may read.
    bound = None if strategy.specialize is None else strategy.specialize(LocalContext(call, plan))
    func, own = bound or call.func, strategy.local if bound is None else None
    # Outside of recorded calls no use has a type, and the local tensors are taken as they are.
    recorded, writes = table is GRAD_RECORDED, rule.writes is not None
    # `plain[dtensor]` picks from a plain tensor: a copy, and no view of a DTensor.
    of_first = type(call.operands[0]) is DTensor
    arguments, views = _places_of(call), rule.views and of_first
    others = own is not None or type(result) is not DTensor or (writes and not of_first)
    if arguments is None or others:
        if moves:
            return partial(slow_path, call.func)
        masks = [use.varying for use in _uses(call, plan)] if recorded else None
        general = compile_general(func, call.func, own, plan, result, specs, masks)
        return unless_copy_or_gradient(call.func, general) if views else general
    # Whether a rank copies where one device does, by whatever strides.
    never_copies = bound is None and call.func in _NEVER_COPY
    alike = never_copies or strategy.copy_on_one_device or is_conversion(call.func)
    steps = {
        "writes": writes,
        "makes": not writes,
        "typed": recorded and not writes,
        # A view of a tensor that requires grad does so in torch, also if it is made under no_grad.
        "grad": recorded or (rule.views and table is NO_GRAD),
        "moves": moves,
        "views": views,
        "strided": views and not alike and len(call.operands) == 1,
        "copies": is_copy(call.func),
        "checked": not never_copies and not _keeps_dtype(call, specs[0].tensor_meta.dtype),
    }
    form = Form(*arguments, bool(call.kwargs), frozenset(step for step in steps if steps[step]))
    # A result made without grad may be the output of a custom Function's forward.
    hidden = table is NO_GRAD
    return compiled_call(form, BoundValues(func, call.func, specs[0], hidden, _uses(call, plan)))


def _places_of(call: OpCall) -> tuple[str, tuple[str, ...]] | None:
    """Where the DTensors are among the arguments, as `Form` has it; None if no form has that."""
    kinds = "".join(map(_kind, call.args))
    names = tuple([name for name, value in call.kwargs.items() if type(value) is DTensor])
    lists = [value for kind, value in zip(kinds, call.args, strict=True) if kind in "ls"]
    wrappers = sum([type(operand) is DTensor for operand in call.operands])
    found = kinds.count("t") + len(names) + sum(map(len, lists))
    return (kinds, names) if len(lists) < 2 and found == wrappers else None


def _kind(value: Any) -> str:
    if type(value) is DTensor:
        return "t"
    if type(value) in (list, tuple) and value and all(type(item) is DTensor for item in value):
        return "l" if type(value) is list else "s"
    return "n" if value is None else "v"


def _uses(call: OpCall, plan: OpPlan) -> list[OperandUse]:
    """The use of each DTensor."""
    pairs = zip(plan.uses, call.operands, strict=True)
    return [use for use, operand in pairs if type(operand) is DTensor]


def _functions(names: str) -> frozenset[Any]:
    owners = (torch, torch.Tensor)
    return frozenset(getattr(o, name) for name in names.split() for o in owners if hasattr(o, name))


# Autocast knows lists of functions whose operands it casts. These are on none, so that their result
# has the dtype of their operands, if that is one and floating.
_KEEP_DTYPE = _functions("add sub mul div maximum minimum relu neg abs")
# They give views of a local tensor of any strides, in its dtype.
_NEVER_COPY = _functions("__getitem__ narrow select transpose permute t squeeze unsqueeze expand")


def _keeps_dtype(call: OpCall, dtype: torch.dtype) -> bool:
    """Whether every call like this one gives this dtype, also under autocast."""
    if call.func not in _KEEP_DTYPE or not dtype.is_floating_point:
        return False
    return all(operand.dtype is dtype for operand in call.operands)
