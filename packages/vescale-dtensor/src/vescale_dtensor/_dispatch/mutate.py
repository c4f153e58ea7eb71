"""Runs in-place ops on a copy in another layout where the target's own does not do.

`x.abs_()` of a partial sum needs the total of `x` first; `x.add_(y)` may have to shard `x` where
`y` is sharded. It costs as much as the out-of-place operation, plus redistributing the result to
the target's layout. From `Replicate` to `Partial` that sends nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from vescale_dtensor._autograd.local_use import local_for_use
from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._dispatch.execute import after_mutation, local_of, refuse_view_of_leaf
from vescale_dtensor._dispatch.overlapping_writes import copy_into, refuse_overlapping
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OpPlan, function_name
from vescale_dtensor._tensor.copied_views import check_writable
from vescale_dtensor._tensor.dtensor import DTensor


def other_layout(call: OpCall, plan: OpPlan | None) -> Layout | None:
    """The layout in which an op can write a copy of its target; None if there is no other.

    Args:
        call: of an op that writes in place.
        plan: made by `build(..., moves_target=True)`.
    """
    if plan is None or plan.rule.writes is None:
        return None
    target = call.operands[plan.rule.writes]
    wanted = plan.uses[plan.rule.writes].layout
    return wanted if isinstance(target, DTensor) and target._spec.layout is not wanted else None


def mutate_via_copy(call: OpCall, index: int, layout: Layout) -> Any:
    """Run an in-place op on a copy of its target, and copy the result back. Collective.

    Args:
        call: of an op that writes in place.
        index: of the target among the operands.
        layout: of the copy.

    Returns:
        The target.

    Raises:
        UnsupportedError: the target is a copied view, or one of it lives.
        RuntimeError: a recorded write to a view of a leaf.
    """
    target = call.operands[index]
    assert isinstance(target, DTensor)
    check_writable(target, function_name(call.func))
    refuse_overlapping(target, call.func, call.operands)
    # A clone: the redistributed tensor may be a cached one that other uses share.
    copy: Any = redistributed(target, layout).clone()
    args, kwargs = call.replaced([copy if i == index else o for i, o in enumerate(call.operands)])
    before = copy._local_tensor.grad_fn
    call.func(*args, **kwargs)
    # Of what has no derivative (`logical_not_`) autograd records nothing, and refuses no leaf.
    recorded = torch.is_grad_enabled() and copy._local_tensor.grad_fn is not before
    with torch.set_grad_enabled(recorded):
        refuse_view_of_leaf(target)
        # Into the local tensor itself, so that autograd records the write on it, not on an alias.
        copy_into(local_of(target), local_for_use(redistributed(copy, target._spec.layout), 0))
    return after_mutation(target)
