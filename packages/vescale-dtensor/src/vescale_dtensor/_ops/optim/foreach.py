"""`torch._foreach_*`: one operation per element, run as one call on the lists of local tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.local_use import local_for_use
from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._dispatch.dispatch import dispatch
from vescale_dtensor._dispatch.execute import after_mutation, global_shape, local_of
from vescale_dtensor._dispatch.overlapping_writes import refuse_overlapping
from vescale_dtensor._dispatch.plain_operands import replicated_operand
from vescale_dtensor._dispatch.plan_cache import plan_for
from vescale_dtensor._dispatch.registry import rule_of
from vescale_dtensor._dispatch.written_views import write_through
from vescale_dtensor._fast_path.cache import REDUCES_GRADIENTS
from vescale_dtensor._fast_path.foreach import local_lists, run_cached, store_specs
from vescale_dtensor._planning import OpCall, Reads
from vescale_dtensor._planning.plan import OpPlan, SeveralSpellingsError, function_name
from vescale_dtensor._tensor.copied_views import any_copies, check_writable
from vescale_dtensor._tensor.dtensor import DTensor, wrap_as


def _element(arguments: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return tuple(a[index] if isinstance(a, list | tuple) else a for a in arguments)


def _foreach(func: Callable[..., Any], single: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of a foreach function whose elements are `single`."""

    def run(*arguments: Any, **kwargs: Any) -> Any:
        written = write_through(func, arguments, kwargs) if any_copies() else None
        if written is not None:
            return written[0]
        if torch.is_grad_enabled():
            # Autograd has to know which uses vary over ranks: a cached call does not tell it.
            return slow(arguments, kwargs)[0]
        # Looked up at the call: rules are registered after the handlers are made.
        exact = bool(rule_of(single).reads & Reads.NUMBERS)
        lists, known, result = run_cached(func, arguments, kwargs, exact)
        if not known:
            result, specs = slow(arguments, kwargs)
            # A cached call takes local tensors as they are: not if one was redistributed here.
            if specs is not _REDISTRIBUTED:
                store_specs(lists, specs)
        return result

    def slow(arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The result, and the specs to cache for the call; `_REDISTRIBUTED`: nothing is cached."""
        alone = _number_form(single, arguments)
        # The key does not hold the values of a tensor of factors.
        unknown = alone.__name__ in _SCALED and any(
            isinstance(value, Tensor) for value in (*arguments, *kwargs.values())
        )
        if alone.__name__ in _SCALED:
            arguments, kwargs = _scaled(arguments, kwargs)
        count = _count(func, arguments, kwargs)
        elements = [_element(arguments, i) for i in range(count)]
        named = [
            {
                _ALONE.get(k, k): v[i] if isinstance(v, list | tuple) else v
                for k, v in kwargs.items()
            }
            for i in range(count)
        ]
        # All elements are planned before the first one communicates or is written.
        planned = [_plan(alone, e, n) for e, n in zip(elements, named, strict=True)]
        if any(
            plan is None or plan.strategy.local is not None for _, plan in planned
        ) or _has_derivative_by_rows(alone, planned):
            return _element_by_element(alone, elements, named), _REDISTRIBUTED
        # Asked before `_ready`, which may reduce a gradient and so change its layout.
        in_layout = all(_has_layout(call, plan) for call, plan in planned if plan is not None)
        # In the order of the list, which all ranks share: so the collectives in here match.
        ready = [_ready(call, plan) for call, plan in planned if plan is not None]
        # One call on lists passes a shared tensor once, so it cannot have a layout per element.
        if not _is_shared_in_one_layout((*arguments, *kwargs.values()), ready):
            return _element_by_element(alone, elements, named), _REDISTRIBUTED
        # Reducing a gradient has changed its layout in place.
        reduced = all(_has_layout(call, plan) for call, plan in planned if plan is not None)
        result = _on_lists(func, planned, arguments, kwargs, ready)  # type: ignore[arg-type]
        if unknown or not (in_layout or reduced):
            return result, _REDISTRIBUTED
        if not in_layout:
            return result, REDUCES_GRADIENTS
        # In place, the written list is itself the result: None says that there is nothing to wrap.
        writes = planned[0][1].rule.writes is not None  # type: ignore[union-attr]
        return result, None if writes else tuple(item._spec for item in result)

    return run


def _count(func: Callable[..., Any], arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many elements the lists have.

    Raises:
        RuntimeError: torch's error for lists of different lengths.
    """
    values = (*arguments, *kwargs.values())
    counts = {len(value) for value in values if isinstance(value, list | tuple)}
    if len(counts) > 1:
        # Torch compares the lengths before it looks at any tensor.
        named = {name: local_lists(value) for name, value in kwargs.items()}
        func(*map(local_lists, arguments), **named)
        raise RuntimeError(f"{function_name(func)}: lists of different lengths: {sorted(counts)}")
    return counts.pop()


_REDISTRIBUTED = object()


def _has_derivative_by_rows(
    single: Callable[..., Any], planned: list[tuple[OpCall, OpPlan | None]]
) -> bool:
    """Whether the backward of the lists may fail on some ranks only.

    That of torch looks, for quotients, for row i of the divisor of element i, so it raises
    where a shard has fewer rows than the lists have elements. That of one element does not.
    """
    return (
        single.__name__ in ("addcdiv", "addcdiv_")
        and torch.is_grad_enabled()
        and any(operand.requires_grad for call, _ in planned for operand in call.operands)
    )


def _has_layout(call: OpCall, plan: OpPlan) -> bool:
    """Whether every operand has the layout that the plan wants."""
    return all(
        isinstance(operand, DTensor) and operand._spec.layout.placements == use.layout.placements
        for operand, use in zip(call.operands, plan.uses, strict=True)
    )


# The names that arguments of lists have for one element.
_ALONE = {"scalars": "value"}
# Functions whose last positional argument may be a factor, which the single form takes by name.
_SCALED = frozenset({"addcmul", "addcmul_", "addcdiv", "addcdiv_"})


def _scaled(
    arguments: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with its factors by name."""
    if len(arguments) == 4:
        *rest, factor = arguments
        arguments = tuple(rest)
        kwargs["scalars" if isinstance(factor, list | tuple | Tensor) else "value"] = factor
    factors = kwargs.get("scalars")
    if isinstance(factors, Tensor) and factors.ndim == 1:
        # One for each element of the lists. Torch, too, makes numbers of them.
        kwargs["scalars"] = factors.tolist()
    return arguments, kwargs


# What `maximum` and `minimum` are called when the other side is a number.
_OF_NUMBERS = {
    "maximum": "clamp_min",
    "maximum_": "clamp_min_",
    "minimum": "clamp_max",
    "minimum_": "clamp_max_",
}


def _number_form(single: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """The single function for these arguments."""
    if not isinstance(arguments[0], list | tuple):
        found: Callable[..., Any] = torch.pow
        return found
    other = arguments[1] if len(arguments) > 1 else None
    item = other[0] if isinstance(other, list | tuple) and other else other
    name = _OF_NUMBERS.get(single.__name__)
    if name is not None and isinstance(item, int | float):
        found = getattr(torch.Tensor, name)
        return found
    return single


def _is_shared_in_one_layout(arguments: tuple[Any, ...], ready: list[list[Tensor]]) -> bool:
    """Whether a tensor that all elements share is used by all of them in the same layout."""
    position = 0
    for argument in arguments:
        shared = isinstance(argument, Tensor)
        # By identity, which is cheap, and where in doubt costs a call per element, no more.
        if shared and any(own[position] is not ready[0][position] for own in ready):
            return False
        position += shared or (
            isinstance(argument, list | tuple) and isinstance(argument[0], Tensor)
        )
    return True


def _plan(
    single: Callable[..., Any], element: tuple[Any, ...], named: dict[str, Any]
) -> tuple[OpCall, OpPlan | None]:
    rule = rule_of(single)
    call = OpCall(single, element, named, rule.reads)
    has_wrapper = any(isinstance(o, DTensor) for o in call.operands)
    try:
        return call, plan_for(call, rule) if has_wrapper else None
    except SeveralSpellingsError:  # which the call of the element alone brings to one
        return call, None


def _element_by_element(
    single: Callable[..., Any], elements: list[tuple[Any, ...]], named: list[dict[str, Any]]
) -> Any:
    results: list[Any] = []
    for element, own in zip(elements, named, strict=True):
        wrapped = any(isinstance(v, DTensor) for v in (*element, *own.values()))
        results.append(dispatch(single, element, own) if wrapped else single(*element, **own))
    return results


def _on_lists(
    func: Callable[..., Any],
    planned: list[tuple[OpCall, OpPlan]],
    arguments: tuple[Any, ...],
    kwargs: dict[str, Any],
    ready: list[list[Tensor]],
) -> Any:
    columns: list[Any] = []
    position = 0
    for argument in arguments:
        column, position = _column(argument, ready, position)
        columns.append(column)
    named: dict[str, Any] = {}
    for name, value in kwargs.items():
        named[name], position = _column(value, ready, position)
    results = func(*columns, **named)
    writes = planned[0][1].rule.writes
    # The kernel wrote to local tensors, unseen by the wrappers around them.
    if writes is not None:
        for call, _ in planned:
            after_mutation(call.operands[writes])
        return None if results is None else arguments[0]
    return [
        wrap_as(local, plan.outputs[0], global_shape(local, 0, plan, call))
        for local, (call, plan) in zip(results, planned, strict=True)
    ]


def _ready(call: OpCall, plan: OpPlan) -> list[Tensor]:
    tensors = [
        o if isinstance(o, DTensor) else replicated_operand(o, use.layout.mesh, call)
        for o, use in zip(call.operands, plan.uses, strict=True)
    ]
    redistributed_operands = [
        redistributed(t, use.layout) for t, use in zip(tensors, plan.uses, strict=True)
    ]
    locals_ = []
    for index, (operand, use) in enumerate(zip(call.operands, plan.uses, strict=True)):
        # Reducing a gradient for one operand changes the layout of an earlier one that is the same
        # tensor: redistributed again, which is free for all others.
        used = redistributed(redistributed_operands[index], use.layout)
        # The operand's own local tensor, not a redistributed one: the write has to reach it.
        if plan.rule.writes == index:
            check_writable(operand, function_name(call.func))
            refuse_overlapping(operand, call.func, call.operands)
            locals_.append(local_of(operand))
        else:
            locals_.append(local_for_use(used, use.varying))
    return locals_


def _column(argument: Any, ready: list[list[Tensor]], position: int) -> tuple[Any, int]:
    if isinstance(argument, list | tuple) and argument and isinstance(argument[0], Tensor):
        return [own[position] for own in ready], position + 1
    if isinstance(argument, Tensor):
        return ready[0][position], position + 1
    return argument, position


_SINGLES = """
add add_ sub sub_ mul mul_ div div_ addcmul addcmul_ addcdiv addcdiv_ lerp lerp_ sqrt sqrt_ neg neg_
abs abs_ zero_ maximum maximum_ minimum minimum_ clamp_min clamp_min_ clamp_max clamp_max_ pow
pow_ reciprocal reciprocal_ exp exp_ log log_ sign sign_ copy_
acos acos_ asin asin_ atan atan_ ceil ceil_ clone cos cos_ cosh cosh_ erf erf_ erfc erfc_ expm1
expm1_ floor floor_ frac frac_ lgamma lgamma_ log10 log10_ log1p log1p_ log2 log2_ round round_
rsqrt rsqrt_ sigmoid sigmoid_ sin sin_ sinh sinh_ tan tan_ tanh tanh_ trunc trunc_ max
"""


# The single form of what has no name of its own.
_BY_OTHER_NAME = {"maximum_": "clamp_min_", "minimum_": "clamp_max_"}


def _handlers() -> dict[Any, Callable[..., Any]]:
    found: dict[Any, Callable[..., Any]] = {}
    for name in _SINGLES.split():
        func = getattr(torch, f"_foreach_{name}", None)
        alone = _BY_OTHER_NAME.get(name, name)
        single = getattr(torch.Tensor, alone, None) or getattr(torch, alone, None)
        if func is not None and single is not None:
            found[func] = _foreach(func, single)
    return found


_norms = _foreach(torch._foreach_norm, torch.linalg.vector_norm)


def _norm(tensors: Any, ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    """Its third argument is a dtype, which the norm of one tensor takes by name only."""
    named = {} if dtype is None else {"dtype": dtype}
    return _norms(tensors, **named) if ord == 2 else _norms(tensors, ord, **named)


HANDLERS: dict[Any, Callable[..., Any]] = {**_handlers(), torch._foreach_norm: _norm}
