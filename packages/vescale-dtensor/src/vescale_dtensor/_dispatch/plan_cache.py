"""Caches plans by what determines them: function, layouts, and the arguments that the rule reads.

Three caches, for three different questions:

- `_plans`: the plan of a call. If operands have to be redistributed, the cheapest way depends on
  their relative sizes, so those are part of the key (`_BY_SIZE_RATIOS` marks such a call).
- `_by_shape_class`: plans that serve another shape of the same class (`Rule.shape_class`).
- `_write_layouts`: for an in-place operation without a plan in its target's own layout, the layout
  of the copy on which it runs before the result is written back.
"""

from __future__ import annotations

from typing import Any

from vescale_dtensor._dispatch.mutate import other_layout
from vescale_dtensor._dispatch.registry import on_change
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OpPlan, Rule, build
from vescale_dtensor._torch.bounded_cache import BoundedCache

# Values: a plan; None if the rule has none, so that the fallback serves; or the marker below.
_plans: BoundedCache[Any, OpPlan | object | None] = BoundedCache(16384)
_by_shape_class: BoundedCache[Any, OpPlan] = BoundedCache(16384)
_write_layouts: BoundedCache[Any, Layout | None] = BoundedCache(4096)
# Under the key alone: look again under the key and the size ratios.
_BY_SIZE_RATIOS = object()
# Default of look-ups: None is a valid entry.
_UNKNOWN: Any = object()

for _cache in (_plans, _by_shape_class, _write_layouts):
    on_change(_cache.clear)


def plan_for(call: OpCall, rule: Rule) -> OpPlan | None:
    """The plan of a call, from the cache or newly made; None if the fallback has to serve."""
    known: Any = _plans.get(call.key, _UNKNOWN)
    # Computed only for calls that need them: most plans redistribute nothing.
    if known is _BY_SIZE_RATIOS:
        known = _plans.get((call.key, call.size_ratios()), _UNKNOWN)
    return _planned(call, rule) if known is _UNKNOWN else known


def _planned(call: OpCall, rule: Rule) -> OpPlan | None:
    """Make a plan, or adapt one of the same shape class, and store it."""
    # The key holds the shape if the rule reads shapes, so every new batch size misses `_plans`.
    # `differentiable` is in that key, and has to be in this one.
    shape_class = rule.shape_class(call) if rule.shape_class is not None else None
    common = None if shape_class is None else (call.func, call.differentiable, shape_class[0])
    like = _by_shape_class.get(common)
    plan = (
        build(call, rule)
        if like is None or shape_class is None
        else like.with_shape(shape_class[1])
    )
    # Not by shape class: such a plan depends on sizes too.
    if plan is not None and plan.redistributes:
        _plans.store(call.key, _BY_SIZE_RATIOS)
        _plans.store((call.key, call.size_ratios()), plan)
        return plan
    _plans.store(call.key, plan)
    if plan is not None and common is not None:
        _by_shape_class.store(common, plan)
    return plan


def write_layout(call: OpCall, rule: Rule) -> Layout | None:
    """The layout in which an in-place op can write a copy of its target; None if there is none.

    Args:
        call: without a plan.
        rule: of an op that writes in place.
    """
    # Such a plan redistributes the target at least, so it always depends on sizes.
    key = (call.key, call.size_ratios())
    found = _write_layouts.get(key, _UNKNOWN)
    if found is _UNKNOWN:
        found = other_layout(call, build(call, rule, moves_target=True))
        _write_layouts.store(key, found)
    return found  # type: ignore[no-any-return]
