"""The forms of a compiled call that have code of their own, one for each pattern of arguments.

Each returns a closure that does for its pattern only what is left to do: take the local tensors,
call torch, wrap the result. What two forms have in common is written out in both where a Python
call for it would be a good part of what the closure costs. `compile` chooses among them;
`compile_general` serves what fits none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._autograd.local_use import recorded_local
from vescale_dtensor._dispatch.dispatch import dispatch
from vescale_dtensor._dispatch.execute import after_mutation
from vescale_dtensor._dispatch.overlapping import is_overlap
from vescale_dtensor._fast_path.cache import GRAD_RECORDED, NO_GRAD, CallTable, CompiledCall
from vescale_dtensor._fast_path.compile_general import wrap_other_dtype
from vescale_dtensor._layout.executed import calls, keeps_lineages, sampling_of
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import function_name
from vescale_dtensor._tensor.copied_views import (
    check_writable,
    live_copies,
    mark_copy,
    same_memory,
    unwritable,
)
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.lineage import (
    Mark,
    toggle,
    token_with_numbers,
    with_numbers,
    write_token,
)
from vescale_dtensor._torch.compat import close_memory, new_wrapper

note_call = calls.append

WrapResult = Callable[[Tensor, int], DTensor]
# The axes on which each DTensor's use varies; None where autograd records nothing.
Masks = tuple[int, ...] | None


# Autocast knows lists of functions whose operands it casts. These are on none, so that their result
# has the dtype of their operands, if that is one and floating.
_KEEP_DTYPE = frozenset(
    getattr(owner, name)
    for name in ("add", "sub", "mul", "div", "maximum", "minimum", "relu", "neg", "abs")
    for owner in (torch, torch.Tensor)
)


def checked_dtype(call: OpCall, spec: Spec) -> torch.dtype | None:
    """The dtype that a compiled call compares its result's with.

    Returns:
        None if every call like this one gives that dtype, also under autocast.
    """
    dtype = spec.tensor_meta.dtype
    if call.func not in _KEEP_DTYPE or not dtype.is_floating_point:
        return dtype
    for operand in call.operands:
        if operand.dtype is not dtype:
            return dtype
    return None


def result_wrapper(
    func: Callable[..., Any], spec: Spec, table: CallTable, views: bool = False
) -> WrapResult:
    """A function that wraps the local result of a call, of a lineage; `views`: of a view.

    `wrap` written out twice, without what is known beforehand: it runs at every call.
    """
    # A result made without grad may be the output of a custom Function's forward.
    dtype, may_have_hidden_node = spec.tensor_meta.dtype, table is NO_GRAD
    call, kept = (func, spec), keeps_lineages(spec.layout.mesh)

    def finish_recorded(result: Tensor, lineage: int) -> DTensor:
        if kept:
            note_call(call)
        if result.dtype is not dtype:
            return wrap_other_dtype(result, spec, lineage)
        wrapper: DTensor = new_wrapper(DTensor, result, spec, result.requires_grad)
        close_memory(wrapper)
        wrapper._may_have_hidden_node = may_have_hidden_node
        wrapper._lineage = lineage
        return wrapper

    # A view of a tensor that requires grad does so in torch, also if it is made under no_grad.
    if table is GRAD_RECORDED or views:
        return finish_recorded

    def wrap_result(result: Tensor, lineage: int) -> DTensor:
        if kept:
            note_call(call)
        if result.dtype is not dtype:  # autocast, or another default dtype
            return wrap_other_dtype(result, spec, lineage)
        wrapper: DTensor = new_wrapper(DTensor, result, spec, False)
        close_memory(wrapper)
        wrapper._may_have_hidden_node = may_have_hidden_node
        wrapper._lineage = lineage
        return wrapper

    return wrap_result


def compile_binary(
    func: Callable[..., Any], wrap_result: WrapResult, masks: Masks, token: int
) -> CompiledCall:
    """The call of two DTensors and nothing else."""
    if masks is None:
        return lambda one, other: wrap_result(
            func(one._local_tensor, other._local_tensor),
            hash((one._lineage, other._lineage, token)) if token else one._lineage,
        )
    mask, another = masks
    return lambda one, other: wrap_result(
        func(recorded_local(one, mask), recorded_local(other, another)),
        hash((one._lineage, other._lineage, token)) if token else one._lineage,
    )


def compile_ternary(
    func: Callable[..., Any], wrap_result: WrapResult, masks: Masks, token: int
) -> CompiledCall:
    """The call of three DTensors and nothing else: a linear layer with its bias."""
    if masks is None:
        return lambda one, other, third: wrap_result(
            func(one._local_tensor, other._local_tensor, third._local_tensor),
            hash((one._lineage, other._lineage, third._lineage, token)) if token else 0,
        )
    mask, another, last = masks
    return lambda one, other, third: wrap_result(
        func(
            recorded_local(one, mask), recorded_local(other, another), recorded_local(third, last)
        ),
        hash((one._lineage, other._lineage, third._lineage, token)) if token else 0,
    )


def compile_linear_without_bias(
    func: Callable[..., Any], wrap_result: WrapResult, masks: Masks, token: int
) -> CompiledCall:
    """The call of two DTensors and a None: a linear layer without bias."""
    if masks is None:
        return lambda one, other, _: wrap_result(
            func(one._local_tensor, other._local_tensor, None),
            hash((one._lineage, other._lineage, token)) if token else 0,
        )
    mask, another = masks
    return lambda one, other, _: wrap_result(
        func(recorded_local(one, mask), recorded_local(other, another), None),
        hash((one._lineage, other._lineage, token)) if token else 0,
    )


def compile_unary_no_grad(
    func: Callable[..., Any],
    spec: Spec,
    may_have_hidden_node: bool,
    mark: Mark,
    dtype: torch.dtype | None,
) -> CompiledCall:
    """The call of one DTensor and nothing else, not recorded: `result_wrapper` written out.

    `dtype`: of the result; None if it can be no other (see `checked_dtype`).
    """
    token, _, call = mark

    def still(first: DTensor) -> DTensor:
        local = first._local_tensor
        result = func(local)
        if result is local:  # x.contiguous(), x.detach_(): one local tensor keeps one wrapper
            return first
        lineage = first._lineage
        if token:
            note_call(call)
            lineage = hash((lineage, token))
        if dtype is not None and result.dtype is not dtype:
            return wrap_other_dtype(result, spec, lineage)
        wrapper: DTensor = new_wrapper(DTensor, result, spec, False)
        close_memory(wrapper)
        wrapper._may_have_hidden_node = may_have_hidden_node
        wrapper._lineage = lineage
        return wrapper

    return still


def compile_unary_recorded(
    func: Callable[..., Any], wrap_result: WrapResult, masks: tuple[int, ...], mark: Mark
) -> CompiledCall:
    """The recorded call of one DTensor and nothing else."""
    token, (one,) = mark.token, masks

    def differentiable(first: DTensor) -> DTensor:
        result = func(recorded_local(first, one))
        if result is first._local_tensor:
            return first
        return wrap_result(result, hash((first._lineage, token)) if token else first._lineage)

    return differentiable


def compile_with_value(
    func: Callable[..., Any], spec: Spec, may_have_hidden_node: bool, mark: Mark
) -> CompiledCall:
    """The call of one DTensor and one value, not recorded: `result_wrapper` written out."""
    token, log, call = mark
    dtype = spec.tensor_meta.dtype

    def still(first: DTensor, value: Any) -> DTensor:
        local = first._local_tensor
        result = func(local, value)
        if result is local:
            # x.contiguous(), x.to(…) may return their argument: one local tensor keeps one wrapper.
            return first
        lineage = first._lineage
        if token:
            note_call(call)
            lineage = hash((lineage, token))
        if log.samples:
            lineage = with_numbers(lineage, mark, (value,), {})
        if result.dtype is not dtype:
            return wrap_other_dtype(result, spec, lineage)
        wrapper: DTensor = new_wrapper(DTensor, result, spec, False)
        close_memory(wrapper)
        wrapper._may_have_hidden_node = may_have_hidden_node
        wrapper._lineage = lineage
        return wrapper

    return still


def compile_with_values(
    func: Callable[..., Any], spec: Spec, may_have_hidden_node: bool, mark: Mark
) -> CompiledCall:
    """The call of one DTensor and any values, not recorded: `result_wrapper` written out."""
    token, log, call = mark
    dtype = spec.tensor_meta.dtype

    def still(first: DTensor, *rest: Any, **named: Any) -> DTensor:
        local = first._local_tensor
        result = func(local, *rest, **named)
        if result is local:
            return first
        lineage = first._lineage
        if token:
            note_call(call)
            lineage = hash((lineage, token))
            if log.samples:
                lineage = with_numbers(lineage, mark, rest, named)
        if result.dtype is not dtype:
            return wrap_other_dtype(result, spec, lineage)
        wrapper: DTensor = new_wrapper(DTensor, result, spec, False)
        close_memory(wrapper)
        wrapper._may_have_hidden_node = may_have_hidden_node
        wrapper._lineage = lineage
        return wrapper

    return still


def compile_first_dtensor(
    func: Callable[..., Any], wrap_result: WrapResult, mask: int, mark: Mark
) -> CompiledCall:
    """The recorded call of one DTensor in the first place, and of any other arguments."""
    token, log, _ = mark

    def run(first: DTensor, *rest: Any, **named: Any) -> DTensor:
        result = func(recorded_local(first, mask), *rest, **named)
        if result is first._local_tensor:
            return first
        lineage = first._lineage
        if token:
            lineage = hash((lineage, token))
            if log.samples:
                lineage = with_numbers(lineage, mark, rest, named)
        return wrap_result(result, lineage)

    return run


def compile_view(
    func: Callable[..., Any],
    wrap_result: WrapResult,
    masks: Masks,
    original: Callable[..., Any],
    copies: bool,
    mark: Mark,
    named: bool,
) -> CompiledCall:
    """`compile_first_dtensor` for a view, with the checks of `unless_copy_or_gradient`.

    Args:
        func: called on the local tensor.
        wrap_result: wraps the local result.
        masks: see `Masks`.
        original: the torch function of the call, for the slow path.
        copies: whether the result is a copy on one device too.
        mark: of the call.
        named: whether there are arguments by name: to spread none costs as much as a look-up.
    """
    token, log, _ = mark
    one = None if masks is None else masks[0]

    def run(first: DTensor, *rest: Any) -> Any:
        if first._view_copy_of is not None or first._grad_of is not None:
            return dispatch(original, (first, *rest), {})
        local = first._local_tensor
        result = func(local if one is None else recorded_local(first, one), *rest)
        if result is local:
            return first
        lineage = hash((first._lineage, token)) if token else first._lineage
        if log.samples:
            lineage = with_numbers(lineage, mark, rest, {})
        wrapper = wrap_result(result, lineage)
        # The local op copies where its strides allow no view, though one device views. The branch
        # depends on the rank; nothing but the mark follows from it.
        if not (copies or local.is_contiguous() or same_memory(result, local)):
            mark_copy(wrapper, first)
        return wrapper

    def run_named(first: DTensor, *rest: Any, **options: Any) -> Any:
        if first._view_copy_of is not None or first._grad_of is not None:
            return dispatch(original, (first, *rest), options)
        local = first._local_tensor
        result = func(local if one is None else recorded_local(first, one), *rest, **options)
        if result is local:
            return first
        lineage = hash((first._lineage, token)) if token else first._lineage
        if log.samples:
            lineage = with_numbers(lineage, mark, rest, options)
        wrapper = wrap_result(result, lineage)
        if not (copies or local.is_contiguous() or same_memory(result, local)):
            mark_copy(wrapper, first)
        return wrapper

    return run_named if named else run


def compile_positional(
    func: Callable[..., Any],
    places: tuple[int, ...],
    wrap_result: WrapResult,
    masks: Masks,
    mark: Mark,
) -> CompiledCall:
    """The call of DTensors at these positions, and of any other arguments."""
    token, log, _ = mark
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
        first: DTensor = args[places[0]]
        if result is first._local_tensor:
            return first
        lineage = hash((*[args[place]._lineage for place in places], token))
        if log.samples:
            lineage = with_numbers(lineage, mark, args, named)
        return wrap_result(result, lineage)

    return run


def compile_in_place(
    func: Callable[..., Any], places: tuple[int, ...], mesh: DeviceMesh
) -> CompiledCall:
    """The call of an op in place on its first argument, which is on the mesh, not recorded."""
    token, log = write_token(func), sampling_of(mesh)

    def run(*args: Any, **named: Any) -> DTensor:
        target: DTensor = args[0]
        # Copied views come and go between calls, so this is checked every time.
        if live_copies or unwritable or target._view_copy_of is not None:
            if target._way_back is not None:
                written: DTensor = dispatch(func, args, named)
                return written
            check_writable(target, function_name(func))
        values = list(args)
        for place in places:
            values[place] = values[place]._local_tensor
        try:
            func(*values, **named)
        except RuntimeError as error:
            if not is_overlap(error):
                raise
            again: DTensor = dispatch(func, args, named)  # which knows of gaps on one device
            return again
        after_mutation(target)
        if log.samples:
            toggle(target, token_with_numbers(target, token, func, args, named))
            return target
        toggle(target, token)
        return target

    return run


def unless_copy_or_gradient(func: Callable[..., Any], compiled: CompiledCall) -> CompiledCall:
    """Send views of copied views and of gradients to the slow path.

    It marks the one as a copy too, and tracks the other, so that its layout changes with the
    gradient's.
    """

    def run(first: DTensor, *rest: Any, **named: Any) -> Any:
        if first._view_copy_of is not None or first._grad_of is not None:
            return dispatch(func, (first, *rest), named)
        return compiled(first, *rest, **named)

    return run
