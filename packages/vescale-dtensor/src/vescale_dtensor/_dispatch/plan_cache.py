"""Caches plans by what determines them: function, layouts, and the arguments that the rule reads.

Four caches, for four different questions:

- `_plans`: the plan of a call, by its key.
- `_plans_by_size`: the plan of a call whose operands have to be redistributed. The cheapest way
  depends on their relative sizes, so those are part of the key.
- `_by_shape_class`: plans that serve another shape of the same class (`Rule.shape_class`).
- `_write_layouts`: for an in-place operation without a plan in its target's own layout, the layout
  of the copy on which it runs before the result is written back.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

from vescale_dtensor._dispatch.mutate import other_layout
from vescale_dtensor._dispatch.registry import on_change
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OpPlan, Rule, build, require_one_spelling
from vescale_dtensor._torch.bounded_cache import BoundedCache
from vescale_dtensor._torch.worlds import on_world_change


class _Other(Enum):
    """What is found in place of a plan. None is a plan's absence: the fallback serves."""

    UNKNOWN = "not asked before"
    BY_SIZE = "in the cache of plans by size"


Key = tuple[Hashable, ...]
SizeRatios = tuple[int, ...]

_plans: BoundedCache[Key, OpPlan | _Other | None] = BoundedCache(16384)
_plans_by_size: BoundedCache[tuple[Key, SizeRatios], OpPlan] = BoundedCache(16384)
_by_shape_class: BoundedCache[Hashable, OpPlan] = BoundedCache(16384)
_write_layouts: BoundedCache[tuple[Key, SizeRatios], Layout | None] = BoundedCache(4096)

for _cache in (_plans, _plans_by_size, _by_shape_class, _write_layouts):
    on_change(_cache.clear)
    on_world_change(_cache.clear)  # layouts, in keys and plans, hold meshes


def plan_for(call: OpCall, rule: Rule) -> OpPlan | None:
    """The plan of a call, from the cache or newly made; None if the fallback has to serve.

    Raises:
        SeveralSpellingsError: its operands are on several spellings of one mesh. No plan is stored
            for such a call, so that one whose operands agree pays nothing for the question.
    """
    known = _plans.get(call.key, _Other.UNKNOWN)
    # Computed only for calls that need them: most plans redistribute nothing.
    if known is _Other.BY_SIZE:
        known = _plans_by_size.get((call.key, call.size_ratios()), _Other.UNKNOWN)
    return _planned(call, rule) if isinstance(known, _Other) else known


def _planned(call: OpCall, rule: Rule) -> OpPlan | None:
    """Make a plan, or adapt one of the same shape class, and store it.

    Raises:
        SeveralSpellingsError: its operands are on several spellings of one mesh.
    """
    require_one_spelling(call)
    # The key holds the shape if the rule reads shapes, so every new batch size misses `_plans`.
    # `differentiable` is in that key, and has to be in this one.
    shape_class = rule.shape_class(call) if rule.shape_class is not None else None
    common = None if shape_class is None else (call.func, call.differentiable, shape_class[0])
    like = None if common is None else _by_shape_class.get(common)
    plan = (
        build(call, rule)
        if like is None or shape_class is None
        else like.with_shape(shape_class[1])
    )
    # Not by shape class: such a plan depends on sizes too.
    if plan is not None and plan.redistributes:
        _plans.store(call.key, _Other.BY_SIZE)
        _plans_by_size.store((call.key, call.size_ratios()), plan)
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
    # One look-up: ranks that are threads share the cache, and another may empty it between two.
    found = _write_layouts.get(key, _Other.UNKNOWN)
    if not isinstance(found, _Other):
        return found
    found = other_layout(call, build(call, rule, moves_target=True))
    _write_layouts.store(key, found)
    return found
