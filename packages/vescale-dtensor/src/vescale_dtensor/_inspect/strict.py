"""`strict`: makes errors of what is correct but probably not meant, as fallbacks and gathers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import and_
from threading import local as thread_local
from typing import Any

from vescale_dtensor._dispatch.observers import CallObserver, plain_comparison_mode
from vescale_dtensor._errors import StrictError
from vescale_dtensor._inspect.explain import changes
from vescale_dtensor._layout.layout import Layout, axes_in
from vescale_dtensor._layout.mesh import axis_names
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OpPlan, function_name
from vescale_dtensor._redistribute.plan import RedistributionPlan
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.observers import observing

# Functions that are called for what takes communication: values, and backward.
_VALUES = (
    "item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __array__ __contains__"
)
# What takes nearly all of a step's time where it is not shared.
_MATRICES = "linear bilinear matmul __matmul__ __rmatmul__ mm bmm mv addmm addmv baddbmm addbmm"
_OTHERS = (
    "einsum tensordot grouped_mm _grouped_mm scaled_dot_product_attention conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d"
)
_PRODUCTS = frozenset({*_MATRICES.split(), *_OTHERS.split()})
_EXPLICIT = frozenset({*_VALUES.split(), "backward", "grad"})


class _Strict(CallObserver):
    """The observer behind `strict()`."""

    compares_plain = True

    def __init__(self, scaling: bool) -> None:
        self._scaling = scaling
        # Per thread, the open calls, each with the names of the rules that planned it.
        self._calls = thread_local()

    def _stack(self) -> list[tuple[Callable[..., Any], list[str]]]:
        if not hasattr(self._calls, "stack"):
            self._calls.stack = []
        stack: list[tuple[Callable[..., Any], list[str]]] = self._calls.stack
        return stack

    def on_call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        self._stack().append((func, []))

    def on_return(self, result: Any) -> None:
        if self._stack():
            self._stack().pop()

    def on_plan(self, call: OpCall, plan: OpPlan) -> None:
        if self._stack():
            self._stack()[-1][1].append(plan.rule.name)
        self._require_shared(call, [use.layout for use in plan.uses])

    def _require_shared(self, call: OpCall, layouts: Sequence[Layout]) -> None:
        """Refuse a product of which the ranks of an axis compute all, each for itself.

        Raises:
            StrictError: from layouts alone, so every rank raises or none does.
        """
        name = getattr(call.func, "__name__", "")
        if not self._scaling or name not in _PRODUCTS or plain_comparison_mode() is not self:
            return
        same = reduce(and_, (one.replicated & one.active for one in layouts), -1)
        if same > 0:
            names = axis_names(layouts[0].mesh)
            axes = [names[axis] for axis in axes_in(same)]
            shapes = [list(operand.shape) for operand in call.operands]
            raise StrictError(
                f"strict: {function_name(call.func)} of operands of shapes {shapes} would be "
                f"computed by every rank of {', '.join(axes)} alike, and gets no faster with more "
                "of them. Shard an operand over that axis, or keep it from being gathered: "
                "local_map, or vescale_parallel.local_rows where rows are independent."
            )

    def on_fallback(self, call: OpCall) -> None:
        # Only the innermost `strict` decides: it may be a `strict(False)`.
        if plain_comparison_mode() is not self:
            return
        # From layouts alone, so every rank raises or none does.
        moving = [
            f"operand {i} {operand!r}"
            for i, operand in enumerate(call.operands)
            if isinstance(operand, DTensor)
            and operand._spec.layout.replicated != operand._spec.layout.active
        ]
        if moving:
            raise StrictError(
                f"strict: {function_name(call.func)} has no rule that holds for "
                f"{', '.join(moving)}, so it would be replicated first. Redistribute it to "
                "Replicate() where that is meant, teach a rule with register_rule, or use "
                "local_map."
            )
        distributed = [one for one in call.operands if isinstance(one, DTensor)]
        self._require_shared(call, [one._spec.layout for one in distributed])

    def on_redistribute(self, plan: RedistributionPlan, backward: bool) -> None:
        # Outside of any call the program asks for it: `redistribute`, `full_tensor`.
        if (
            backward
            or not plan.collectives
            or not self._stack()
            or plain_comparison_mode() is not self
        ):
            return
        func, rules = self._stack()[-1]
        if getattr(func, "__name__", "") in _EXPLICIT:
            return
        rule = f" by its rule {rules[-1]!r}" if rules else ""
        raise StrictError(
            f"strict: {function_name(func)} would redistribute an operand of shape "
            f"{list(plan.shape)}{rule}: {changes(plan)} ({_collectives(plan)}). "
            "Call x.redistribute(placements=…) where that is meant, or lay the operands out alike."
        )


def _collectives(plan: RedistributionPlan) -> str:
    """The collectives of a redistribution, in words."""
    names = axis_names(plan.mesh)
    found = [(step.title, [names[axis] for axis in step.axes]) for step in plan.steps if step.axes]
    return "; ".join(f"{title} over {', '.join(axes)}" for title, axes in found)


class _Lenient(CallObserver):
    """The observer behind `strict(False)`: it silences outer ones by being the innermost."""

    compares_plain = False


@contextmanager
def strict(enabled: bool = True, *, scaling: bool = False) -> Iterator[None]:
    """Raise an error, on every rank alike, for what is right but perhaps not meant.

    - An op without a rule that holds, so that sharded operands would be replicated first.
    - An op that would communicate to redistribute an operand. Asking for it by name is allowed:
      `redistribute`, `full_tensor`, `item` and the like, a backward, and the reduction of a
      gradient that is still partial.
    - With `scaling`, a product (of matrices, a convolution, attention) of which every rank of some
      axis computes the same.
    - A plain tensor among DTensors whose values differ over the ranks (0-dim ones too). This takes
      a small collective for each such operand, which `vescale_comm.trace` does not count.

    Outside of any `strict`, the last is checked at the first two executions of each kind of op.
    `strict(False)` allows everything again for a block and turns that check off too, as is needed
    where not all ranks run the same ops.

    Raises:
        StrictError: for all but the last.
        DisagreementError: for the last.
    """
    with observing(_Strict(scaling) if enabled else _Lenient()):
        yield
