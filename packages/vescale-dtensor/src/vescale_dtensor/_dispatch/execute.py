"""Runs a plan: redistribute the operands, call torch on the local tensors, wrap the results.

Whether a rank communicates here follows from the plan and from specs, which are equal on all ranks.
Branches on local data (strides, memory) only decide whether a result is marked as a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.grad_property import track_gradient_view
from vescale_dtensor._autograd.leaf_use import is_alias_of_leaf
from vescale_dtensor._autograd.local_use import local_for_use
from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._autograd.redistribution_cache import redistributed_cached
from vescale_dtensor._dispatch.observers import notify_plan
from vescale_dtensor._dispatch.overlapping_writes import is_overlap, read_apart, refuse_overlapping
from vescale_dtensor._dispatch.plain_operands import replicated_operand
from vescale_dtensor._dispatch.view_inverses import note_ways_back
from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.spec import spec_of, with_strides
from vescale_dtensor._planning.local_context import LocalContext
from vescale_dtensor._planning.memory_order import views_on_one_device
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OpPlan, function_name
from vescale_dtensor._tensor.copied_views import check_writable, mark_copy, same_memory
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.observers import observers
from vescale_dtensor._torch.compat import (
    forward_grad_enabled,
    mirror_metadata,
    mirror_requires_grad,
)


def execute(plan: OpPlan, call: OpCall) -> Any:
    """Run a call by its plan. Collective, if operands are redistributed.

    Returns:
        The results as DTensors; the target itself for a call that writes in place.

    Raises:
        UnsupportedError: a write to a copied view, or to a tensor that has a living one.
        RuntimeError: a recorded write to a view of a leaf, or one to elements that share memory.
    """
    if observers:
        notify_plan(call, plan)
    target = plan.rule.writes
    if target is not None:
        check_writable(call.operands[target], function_name(call.func))
        refuse_view_of_leaf(call.operands[target])
        refuse_overlapping(call.operands[target], call.func, call.operands)
    redistributed_operands = _redistributed_operands(plan, call)
    # Only now, when all are redistributed: the fast path does it in the same order, and nodes that
    # communicate in backward have to be made in one order on all ranks.
    recorded = call.differentiable
    locals_: list[Tensor] = []
    for operand, use in zip(redistributed_operands, plan.uses, strict=True):
        held = operand._local_tensor
        # Where no operand wants a gradient, C++ has marked none of their wrappers either.
        typed = recorded or held.requires_grad or operand._may_have_hidden_node
        locals_.append(local_for_use(operand, use.varying) if typed else held)
    if target is not None:
        # In-place ops get the local tensor itself: autograd would record a write to an alias on
        # the alias alone, and the local tensor would keep its old history.
        locals_[target] = local_of(call.operands[target])
    try:
        result = _called(plan, call, locals_)
    except RuntimeError as error:
        # A kernel of ours may have sent something: run again on this rank alone, it would wait.
        if target is None or plan.strategy.local is not None or not is_overlap(error):
            raise
        read_apart(call, target, locals_, error)
        result = _called(plan, call, locals_)
    # The wrapper that was written to, not a second one of the same memory, as in torch.
    if target is not None:
        return after_mutation(call.operands[target])
    if result is redistributed_operands[0]._local_tensor:
        # The op returned its argument. Two wrappers of one local tensor would each keep a gradient
        # state for its `.grad`.
        result = result.view_as(result)
    base = _base_of_copied_view(plan, call, redistributed_operands[0], result)
    wrapped = _wrap_results(result, plan, call, base)
    # Not where the strides of this rank's local tensor are the reason, which may be its alone.
    if base is not None and _copied_everywhere(plan, base, redistributed_operands[0]):
        note_ways_back(call, wrapped)
    if plan.rule.views:
        set_view_strides(wrapped, call)
        _track_gradient_views(call.operands[0], wrapped)
    return wrapped


def _called(plan: OpPlan, call: OpCall, locals_: list[Tensor]) -> Any:
    """The local results."""
    # `OpCall` found the operands from left to right at any depth; they go back in that order.
    args, kwargs = call.replaced(locals_)
    local = plan.strategy.local
    if local is None:
        return call.func(*args, **kwargs)
    return local(LocalContext(call, plan), args, kwargs)


def _redistributed_operands(plan: OpPlan, call: OpCall) -> list[DTensor]:
    """The operands in the layouts of the plan. Collective, unless they are in these."""
    found: list[DTensor] = []
    gradients = False
    for operand, use in zip(call.operands, plan.uses, strict=True):
        # Layouts are interned: what is in place is mostly seen without comparing placements.
        if isinstance(operand, DTensor) and operand._spec.layout is use.layout:
            ready = operand
        else:
            ready = redistributed_cached(_as_dtensor(operand, use.layout, call), use.layout)
        gradients = gradients or ready._grad_of is not None
        found.append(ready)
    # x.grad + x.grad: redistributing one operand may reduce the gradient in place, which changes
    # the layout of another that is the same gradient, and was looked at before. So look again.
    if gradients:
        return [redistributed(t, use.layout) for t, use in zip(found, plan.uses, strict=True)]
    return found


def _track_gradient_views(base: Tensor, views: Any) -> None:
    """Let views of a leaf's gradient change their layout with it: they share its memory."""
    if isinstance(base, DTensor) and base._grad_of is not None:
        for view in _tensors(views):
            track_gradient_view(base, view)


def _picks(index: Any) -> bool:
    """Whether an index picks elements one by one, and takes no view."""
    for item in index if isinstance(index, tuple) else (index,):
        # To torch a truth value is a mask, and any sequence a tensor of indices.
        if isinstance(item, bool | list | tuple | range):
            return True
        if isinstance(item, Tensor) and (item.ndim or item.dtype is torch.bool):
            return True
    return False


def _base_of_copied_view(
    plan: OpPlan, call: OpCall, redistributed_operands: DTensor, result: Any
) -> DTensor | None:
    """The base of a view that had to be a copy; None for a real view, or a copy on one device too.

    Args:
        plan: the plan.
        call: the parsed call.
        redistributed_operands: operand 0 after redistribution.
        result: the local result.
    """
    base: Tensor = call.operands[0]
    if not plan.rule.views or plan.strategy.copy_on_one_device or not isinstance(base, DTensor):
        return None
    if is_conversion(call.func) and not same_memory(result, redistributed_operands._local_tensor):
        return None  # to another dtype, say
    if call.func is torch.Tensor.__getitem__ and _picks(call.args[1]):
        return None  # indexing by a list, a tensor or a mask copies on one device too
    local: Tensor = base._local_tensor
    copied = _copied_everywhere(plan, base, redistributed_operands)
    if not copied and not local.is_contiguous() and isinstance(result, Tensor):
        # The strides of a local tensor that the caller made may allow no view of this shape, where
        # those of the global tensor do.
        copied = not same_memory(result, local)
    return base if copied else None


def is_conversion(func: Any) -> bool:
    """Whether a function of views is one that copies on one device where it copies here."""
    return func.__name__ in _CONVERTING


_CONVERTING = frozenset(("to", "cpu", "cuda"))


def _copied_everywhere(plan: OpPlan, base: DTensor, redistributed_operand: DTensor) -> bool:
    """Whether a view has to be a copy because of layouts, which are the same on all ranks."""
    return (
        redistributed_operand is not base
        or plan.strategy.copy_on_shards
        or base._view_copy_of is not None
    )


def set_view_strides(results: Any, call: OpCall) -> None:
    """Give views the strides that they have on one device.

    Local strides do not show them: one column of a matrix has gaps, but none if the matrix is
    sharded by columns and this rank holds only that one. They come from torch, which runs the call
    on tensors without data.
    """
    base = call.operands[0]
    if not isinstance(base, DTensor) or (call.func is _GETITEM and len(call.operands) > 1):
        return  # indexing by a tensor copies
    if not (base._spec.has_gaps or call.func.__name__ in _LEAVES_GAPS):
        return
    if call.func.__name__ == "tensor_split" and len(call.operands) > 1:
        # Asking would read the data of the tensor of places. It is not needed: every
        # part has the strides of the tensor that is split.
        strides = [base._spec.tensor_meta.stride] * len(results)
    else:
        views = views_on_one_device(call)
        if views is None:
            return  # torch refuses the view on one device: there are no strides to copy
        strides = [tuple(view.stride()) for view in views]
    for result, found in zip(_tensors(results), strides, strict=True):
        if isinstance(result, DTensor) and result is not base and result.ndim == len(found):
            give_strides(result, found)


def give_strides(result: DTensor, strides: Shape) -> None:
    """Give a new tensor these global strides, which may leave gaps between its elements."""
    strided = with_strides(result._spec, strides)
    if strided is not result._spec:
        result._spec = strided
        # C++ answers `stride()` and `is_contiguous()` from its own copy of the metadata.
        mirror_metadata(result, wrap(result._local_tensor.detach(), strided))


# Views that leave out elements, or repeat one. Any other view of a tensor without gaps has none
# either, and needs no such run.
_NAMES = """
__getitem__ narrow select split split_with_sizes chunk tensor_split hsplit vsplit dsplit unbind
unsafe_split unsafe_split_with_sizes unsafe_chunk
diagonal linalg_diagonal unfold expand expand_as broadcast_to real imag
"""
_GETITEM = torch.Tensor.__getitem__
_LEAVES_GAPS = frozenset(name for name in _NAMES.split())


def _tensors(results: Any) -> Sequence[Any]:
    return (results,) if isinstance(results, Tensor) else results


def after_mutation(target: Any) -> Any:
    """Update and return the wrapper whose local tensor an in-place op has changed."""
    if not isinstance(target, DTensor):
        return target
    if torch.is_grad_enabled():
        # A recorded write of an operand that requires grad: now the target does too.
        local = target._local_tensor
        if local.requires_grad:
            mirror_requires_grad(target, True)
            if not local.numel() and local._is_view():
                target._local_tensor = _viewed_again(local)
        if not forward_grad_enabled():
            target._may_have_hidden_node = True  # such a forward that enables grad by itself
    elif not forward_grad_enabled() and not target._local_tensor.requires_grad:
        # The write is part of a custom Function's forward, which then gives the wrapper a node
        # (`mark_dirty`). Not if it requires grad: wrappers are leaves to C++, which refuses that.
        target._may_have_hidden_node = True
    return target


def _viewed_again(local: Tensor) -> Tensor:
    """The same part of its base, for an empty view that was written to.

    Torch has such a view begin at `as_strided`, which gives an empty gradient without a history: a
    second backward would miss collectives there in which other ranks wait.
    """
    base = local._base
    assert base is not None
    return base.reshape(-1)[:0].view(local.shape)


def refuse_view_of_leaf(target: Tensor) -> None:
    """Refuse a recorded write to a view of a leaf that requires grad, as torch does.

    A view of a leaf's alias is no view of the leaf to torch, so it would not notice.

    Raises:
        RuntimeError: it is one.
    """
    if not (isinstance(target, DTensor) and torch.is_grad_enabled()):
        return
    # Of a copied view some ranks may have nothing; what it is a copy of, all have.
    copied = target._view_copy_of
    local = target._local_tensor if copied is None else copied
    if not local.requires_grad or (local.is_leaf if copied is None else not target.requires_grad):
        return
    base = local._base if local._is_view() and local._base is not None else local
    if is_alias_of_leaf(base) or (base.is_leaf and base.requires_grad):
        raise RuntimeError(
            f"a view of a leaf that requires grad is being used in an in-place operation: "
            f"{target!r}. Write to it under no_grad, or to a clone."
        )


def refuse_leaf(target: Tensor) -> None:
    """Refuse a recorded write to a leaf that requires grad, where torch would see an alias of it.

    Raises:
        RuntimeError: it is one.
    """
    if isinstance(target, DTensor) and torch.is_grad_enabled() and target._view_copy_of is None:
        local = target._local_tensor
        if local.is_leaf and local.requires_grad:
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation."
            )


def local_of(operand: Tensor) -> Tensor:
    """The local tensor of an operand, to write to; a plain tensor itself."""
    return operand._local_tensor if isinstance(operand, DTensor) else operand


def _as_dtensor(operand: Tensor, layout: Layout, call: OpCall) -> DTensor:
    mesh = layout.mesh
    return operand if isinstance(operand, DTensor) else replicated_operand(operand, mesh, call)


def _wrap_results(result: Any, plan: OpPlan, call: OpCall, base: DTensor | None) -> Any:
    """Wrap one local result, or those in a list or tuple; `base`: of a view that is a copy."""
    if isinstance(result, Tensor):
        return _wrap_result(result, 0, plan, call, base)
    if isinstance(result, list | tuple):
        items = [
            _wrap_result(item, i, plan, call, base) if isinstance(item, Tensor) else item
            for i, item in enumerate(result)
        ]
        return rebuild_like(result, items)
    return result


def rebuild_like(result: Any, items: list[Any]) -> Any:
    """A list, a tuple or a named tuple like `result`, with these items."""
    if type(result) in (list, tuple):
        return type(result)(items)
    return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)


def _wrap_result(
    local: Tensor, index: int, plan: OpPlan, call: OpCall, base: DTensor | None
) -> DTensor:
    """Wrap output `index`; see `_wrap_results`."""
    layout = plan.outputs[index if len(plan.outputs) > 1 else 0]
    for operand in call.operands:
        if isinstance(operand, DTensor) and local is operand._local_tensor:
            local = local.view_as(local)  # an operand among several results, as in `execute`
            break
    shape = global_shape(local, index, plan, call)
    wrapper = wrap(local, spec_of(layout, shape, local.dtype))
    if base is not None:
        mark_copy(wrapper, base)
    return wrapper


def global_shape(local: Tensor, index: int, plan: OpPlan, call: OpCall) -> Shape:
    """Global shape of an output, from what the rule states, the operands, and the local result.

    Local extents are used only for dims that are never sharded.
    """
    strategy = plan.strategy
    if strategy.shapes is not None:
        return strategy.shapes[index if len(strategy.shapes) > 1 else 0]
    if not strategy.extents:
        return tuple(local.shape)  # no output of the rule is ever sharded
    sources = strategy.extents[index if len(strategy.extents) > 1 else 0]
    operands: Sequence[Tensor] = call.operands
    # Where several dims in front are one here, counted from the end.
    fewer = len(sources) - local.ndim
    return tuple(
        [
            local.shape[dim - fewer] if source is None else operands[source[0]].shape[source[1]]
            for dim, source in enumerate(sources)
        ]
    )
