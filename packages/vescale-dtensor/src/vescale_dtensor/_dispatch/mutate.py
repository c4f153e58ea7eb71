"""Writing where a tensor cannot be written as it lies: a copy that lies as the op needs is written.

`x.abs_()` of a partial sum needs its total first, `x.add_(y)` may have a piece of `x` be where `y`
has one. The copy goes back into the layout of `x`: what was replicated becomes a term again without
communication. So an in-place op costs what the op itself costs, and only the other way round more.
"""

from __future__ import annotations

from typing import Any

from vescale_dtensor._autograd.local_use import local_for_use
from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._dispatch.execute import after_mutation, local_of, refuse_view_of_leaf
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._planning.op_call import OpCall, substitute
from vescale_dtensor._planning.plan import OpPlan, function_name
from vescale_dtensor._tensor.copied_views import check_writable
from vescale_dtensor._tensor.dtensor import DTensor


def other_layout(call: OpCall, plan: OpPlan | None) -> Layout | None:
    """The layout of a copy of the target that an op can write; None where there is no other.

    Args:
        call: of an op that writes in place.
        plan: see `build`, whose targets may move.
    """
    if plan is None or plan.rule.writes is None:
        return None
    target = call.operands[plan.rule.writes]
    wanted = plan.uses[plan.rule.writes].layout
    return wanted if isinstance(target, DTensor) and target._spec.layout is not wanted else None


def mutate_via_copy(call: OpCall, index: int, layout: Layout) -> Any:
    """Run an in-place op on a copy of operand `index` in this layout, and take its values over."""
    target = call.operands[index]
    assert isinstance(target, DTensor)
    check_writable(target, function_name(call.func))
    copy: Any = redistributed(target, layout).clone()
    feed = iter([copy if i == index else o for i, o in enumerate(call.operands)])
    args = substitute(list(call.args), feed)
    kwargs = {name: substitute(value, feed) for name, value in call.kwargs.items()}
    call.func(*args, **kwargs)
    refuse_view_of_leaf(target)
    local_of(target).copy_(local_for_use(redistributed(copy, target._spec.layout), 0))
    return after_mutation(target)
