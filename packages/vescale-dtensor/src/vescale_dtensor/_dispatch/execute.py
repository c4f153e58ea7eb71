"""Runs a plan: redistribute the operands, call torch on the local tensors, wrap the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.grad_property import track_gradient_view
from vescale_dtensor._autograd.leaf_gradient import is_alias_of_leaf
from vescale_dtensor._autograd.local_use import local_for_use
from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._autograd.redistribution_cache import redistributed_cached
from vescale_dtensor._dispatch.observers import notify_plan
from vescale_dtensor._dispatch.plain_operands import replicated_operand
from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._layout.spec import spec_of, with_strides
from vescale_dtensor._planning.memory_order import views_on_one_device
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OpPlan, function_name
from vescale_dtensor._tensor.copied_views import check_writable, mark_copy, same_memory
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.observers import observers
from vescale_dtensor._torch.compat import mirror_metadata, mirror_requires_grad


@dataclass(frozen=True)
class LocalContext:
    """What a rule's own local call may ask.

    Attributes:
        call: the parsed call.
        plan: the plan that runs.
    """

    call: OpCall
    plan: OpPlan

    def input_layout(self, index: int) -> Layout:
        """Layout of an operand as it is used."""
        return self.plan.uses[index].layout

    def output_layout(self, index: int = 0) -> Layout:
        """Layout of an output."""
        return self.plan.outputs[index]

    def output_shape(self, index: int = 0) -> Shape:
        """Global shape of an output whose rule states shapes."""
        assert self.plan.strategy.shapes is not None
        return self.plan.strategy.shapes[index]

    def local_output_shape(self, index: int = 0) -> Shape:
        """Local shape of an output whose rule states shapes."""
        return local_shape(self.output_layout(index), self.output_shape(index))


def execute(plan: OpPlan, call: OpCall) -> Any:
    """Run a call by its plan."""
    if observers:
        notify_plan(call, plan)
    target = plan.rule.writes
    if target is not None:
        check_writable(call.operands[target], function_name(call.func))
        refuse_view_of_leaf(call.operands[target])
    redistributed_operands = [
        redistributed_cached(_as_dtensor(operand, use.layout, call), use.layout)
        for operand, use in zip(call.operands, plan.uses, strict=True)
    ]
    # x.grad * x.grad: bringing the second operand to the plan's layout sums the gradient that the
    # first one still takes for a term.
    if any(t._grad_of is not None for t in redistributed_operands):
        # Settling a gradient for one operand changes it for an earlier one that is the same.
        redistributed_operands = [
            redistributed(t, use.layout)
            for t, use in zip(redistributed_operands, plan.uses, strict=True)
        ]
    locals_ = [
        local_for_use(t, use.varying)
        for t, use in zip(redistributed_operands, plan.uses, strict=True)
    ]
    if target is not None:
        # In-place operations take the local tensor itself: autograd would record a write to
        # an alias on the alias alone, and the local tensor would keep its old history.
        locals_[target] = local_of(call.operands[target])
    # Operands were found from left to right, at any depth, and go back in the same order.
    args, kwargs = call.replaced(locals_)
    local = plan.strategy.local
    result = (
        call.func(*args, **kwargs)
        if local is None
        else local(LocalContext(call, plan), args, kwargs)
    )
    # The caller gets the wrapper that he wrote to, and not a second one of the same memory.
    if target is not None:
        return after_mutation(call.operands[target])
    if result is redistributed_operands[0]._local_tensor:
        result = result.view_as(result)  # a leaf keeps one wrapper, which types its gradient
    wrapped = _wrap_results(
        result, plan, call, _base_of_copied_view(plan, call, redistributed_operands[0], result)
    )
    if plan.rule.views:
        set_view_strides(wrapped, call)
        _track_gradient_views(call.operands[0], wrapped)
    return wrapped


def _track_gradient_views(base: Tensor, views: Any) -> None:
    if isinstance(base, DTensor) and base._grad_of is not None:
        for view in _tensors(views):
            track_gradient_view(base, view)


def _base_of_copied_view(
    plan: OpPlan, call: OpCall, redistributed_operands: DTensor, result: Any
) -> DTensor | None:
    """What the result of a view stands for, where it shares no memory with it."""
    base: Tensor = call.operands[0]
    if not plan.rule.views or plan.strategy.copy_on_one_device or not isinstance(base, DTensor):
        return None
    indexed = call.func is torch.Tensor.__getitem__ and call.operands[1:]
    if indexed and any(index.ndim or index.dtype is torch.bool for index in indexed):
        return None  # what a tensor or a mask picks is a copy on one device, too
    local: Tensor = base._local_tensor
    copied = (
        redistributed_operands is not base
        or plan.strategy.copy_on_shards
        or base._view_copy_of is not None
    )
    if not copied and not local.is_contiguous() and isinstance(result, Tensor):
        # The caller's piece may lie so that no view of it has the shape that one device views.
        copied = not same_memory(result, local)
    return base if copied else None


def set_view_strides(results: Any, call: OpCall) -> None:
    """Give views the strides that they have on one device, which torch is asked for.

    Pieces do not tell: of a matrix that is cut by columns, a rank's one column has no gaps.
    """
    base = call.operands[0]
    if not isinstance(base, DTensor) or (call.func is _GETITEM and len(call.operands) > 1):
        return  # what tensors pick is a copy
    if not (base._spec.has_gaps or call.func.__name__ in _LEAVES_GAPS):
        return
    if call.func.__name__ == "tensor_split" and len(call.operands) > 1:
        # At places that a tensor holds, which takes data: every part has the strides of the whole.
        strides = [base._spec.tensor_meta.stride] * len(results)
    else:
        views = views_on_one_device(call)
        if views is None:
            return  # one device has no such view; here it is one, or was marked as a copy
        strides = [tuple(view.stride()) for view in views]
    for result, found in zip(_tensors(results), strides, strict=True):
        if isinstance(result, DTensor) and result is not base and result.ndim == len(found):
            give_strides(result, found)


def give_strides(result: DTensor, strides: Shape) -> None:
    """Let a new tensor have these strides, which leave gaps on one device."""
    strided = with_strides(result._spec, strides)
    if strided is not result._spec:
        result._spec = strided
        # What C++ knows answers `stride()` and `is_contiguous()`.
        mirror_metadata(result, wrap(result._local_tensor.detach(), strided))


# Views that leave elements out, or name one more than once. Others of what has no gaps have none.
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
    """The wrapper of a local that an in-place op has changed: it may now require grad."""
    if not isinstance(target, DTensor):
        return target
    if torch.is_grad_enabled():
        if target._local_tensor.requires_grad:
            mirror_requires_grad(target, True)
    elif not target._local_tensor.requires_grad:
        # A Function may have changed it. What requires grad it could not have: torch refuses that.
        target._may_have_hidden_node = True
    return target


def refuse_view_of_leaf(target: Tensor) -> None:
    """Notice a recorded write to a view of a leaf, where torch saw no view but our alias.

    Raises:
        RuntimeError: it is one, and the leaf wants gradients; as on one device.
    """
    if not (isinstance(target, DTensor) and torch.is_grad_enabled()):
        return
    local = target._local_tensor
    if not local.requires_grad or local.is_leaf:
        return
    base = local._base if local._is_view() and local._base is not None else local
    if is_alias_of_leaf(base):
        raise RuntimeError(
            f"a view of a leaf that requires grad is being used in an in-place operation: "
            f"{target!r}. Write to it under no_grad, or to a clone."
        )


def local_of(operand: Tensor) -> Tensor:
    """The local data of an operand, for writing; a plain tensor is its own."""
    return operand._local_tensor if isinstance(operand, DTensor) else operand


def _as_dtensor(operand: Tensor, layout: Layout, call: OpCall) -> DTensor:
    mesh = layout.mesh
    return operand if isinstance(operand, DTensor) else replicated_operand(operand, mesh, call)


def _wrap_results(result: Any, plan: OpPlan, call: OpCall, base: DTensor | None) -> Any:
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
    """These items in place of those of a list, a tuple or a named one."""
    if type(result) in (list, tuple):
        return type(result)(items)
    return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)


def _wrap_result(
    local: Tensor, index: int, plan: OpPlan, call: OpCall, base: DTensor | None
) -> DTensor:
    layout = plan.outputs[index if len(plan.outputs) > 1 else 0]
    if any(isinstance(o, DTensor) and local is o._local_tensor for o in call.operands):
        local = local.view_as(local)  # one among several results, as it came in
    shape = global_shape(local, index, plan, call)
    wrapper = wrap(local, spec_of(layout, shape, local.dtype))
    if base is not None:
        mark_copy(wrapper, base)
    return wrapper


def global_shape(local: Tensor, index: int, plan: OpPlan, call: OpCall) -> Shape:
    """Global shape of an output, from the local result and the operands."""
    strategy = plan.strategy
    if strategy.shapes is not None:
        return strategy.shapes[index if len(strategy.shapes) > 1 else 0]
    if not strategy.extents:
        return tuple(local.shape)  # nothing is cut
    sources = strategy.extents[index if len(strategy.extents) > 1 else 0]
    operands: Sequence[Tensor] = call.operands
    return tuple(
        local.shape[dim] if source is None else operands[source[0]].shape[source[1]]
        for dim, source in enumerate(sources)
    )
