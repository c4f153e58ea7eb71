"""Compiled calls of any form: DTensors in lists and by name, any number of results.

What the template has a form for is quicker; this serves all else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from vescale_dtensor._autograd.local_use import recorded_local
from vescale_dtensor._dispatch.dispatch import dispatch
from vescale_dtensor._dispatch.execute import after_mutation
from vescale_dtensor._fast_path.cache import CompiledCall
from vescale_dtensor._layout.execution_events import sampling_of
from vescale_dtensor._layout.spec import Spec, spec_of
from vescale_dtensor._planning.local_context import LocalContext
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OpPlan, function_name
from vescale_dtensor._tensor.copied_views import check_writable
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.lineage import is_copy, note_write, noted


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


def compile_general(
    func: Callable[..., Any],
    original: Callable[..., Any],
    local: Callable[..., Any] | None,
    plan: OpPlan,
    result: Any,
    specs: tuple[Spec, ...],
    masks: Sequence[int] | None,
) -> CompiledCall:
    """The call of DTensors anywhere among the arguments, in lists too; any number of results.

    Args:
        func: called on the local tensors, where `local` is None.
        original: the torch function of the call.
        local: the rule's own local call.
        plan: the plan.
        result: of the first such call: one DTensor or several.
        specs: of the results.
        masks: the axes on which the use of each DTensor varies; None where nothing is recorded.
    """
    writes = plan.rule.writes is not None
    single = type(result) is DTensor
    log, copies = sampling_of(specs[0].layout.mesh), is_copy(original)

    def run(*args: Any, **kwargs: Any) -> Any:
        operands: list[Any] = []
        feed = None if masks is None else iter(masks)
        values = [_local_arguments(value, operands, feed) for value in args]
        named = {name: _local_arguments(value, operands, feed) for name, value in kwargs.items()}
        if writes:
            if type(operands[0]) is DTensor and operands[0]._rare.way_back is not None:
                return dispatch(original, args, kwargs)
            check_writable(operands[0], function_name(original))
        if local is None:
            found = func(*values, **named)
        else:
            known = OpCall.known(func, args, kwargs, operands, masks is not None)
            found = local(LocalContext(known, plan), values, named)
        if writes:
            after_mutation(operands[0])
            if log.samples:
                note_write(original, operands[0], args, kwargs)
            return operands[0]
        own = [operand._local_tensor for operand in operands if type(operand) is DTensor]
        if single and found is own[0]:
            return next(operand for operand in operands if type(operand) is DTensor)
        made: Any
        if single:
            made = _typed(found, specs[0])
        else:
            # One among several results may be an operand itself. Another wrapper of the same local
            # tensor would type its gradient a second time, so it gets a view.
            fresh = [i.view_as(i) if any(i is one for one in own) else i for i in found]
            items = [_typed(item, spec) for item, spec in zip(fresh, specs, strict=True)]
            made = items if type(found) is list else _rebuilt(found, items)
        return noted(original, made, args, kwargs) if log.samples or copies else made

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
