"""Cross-entropy: rows may be split, and so may the classes (vocabulary-parallel).

A mean divides by the global count of targets that are not ignored, so uneven rows give the loss of
one device. With split classes every rank holds a term of the loss: the target's logit where it
holds the target, and on coordinate 0 the log of the global normaliser. Their sum is the loss, and
its gradient needs no further communication.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from vescale_comm import all_reduce, group_of

from vescale_dtensor._call import Call
from vescale_dtensor._execute import Run
from vescale_dtensor._faces import kept_at_zero
from vescale_dtensor._layout import Layout, axes_in, local_box
from vescale_dtensor._placements import RaggedShard, Shard
from vescale_dtensor._plan import Rule
from vescale_dtensor._strategy import Dims, Signature, Strategy

_NAMES = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)


def _given(args: Any, kwargs: Any) -> dict[str, Any]:
    return {**dict(zip(_NAMES, args, strict=False)), **kwargs}


def _cross_entropy(call: Call) -> Strategy | None:
    given = _given(call.args, call.kwargs)
    logits, target = call.operands[:2]
    classes = logits.ndim != target.ndim or logits.ndim == 0
    legacy = given.get("size_average") is not None or given.get("reduce") is not None
    if legacy or not classes or logits.ndim < 2 or target.dtype.is_floating_point:
        return None
    weighted = given.get("weight") is not None
    rows: Dims = (0, *range(2, logits.ndim))
    letters: list[Dims] = [(0, "c", *range(2, logits.ndim)), rows]
    if weighted:
        letters.append(("c",))
    kept = given.get("reduction", "mean") == "none"
    splittable = not weighted and not given.get("label_smoothing") and logits.ndim == 2
    return Signature(
        tuple(letters),
        (rows if kept else (),),
        {**({} if kept else dict.fromkeys(rows, "sum")), "c": "sum"},
        fixed=frozenset() if splittable else frozenset("c"),
        local=_local,
    ).strategy()


def _local(run: Run, args: Any, kwargs: Any) -> Tensor:
    given = _given(args, kwargs)
    logits = run.input_layout(0)
    if logits.replicated == logits.active:
        return run.call.func(*args, **kwargs)  # type: ignore[no-any-return]
    if _axes_cutting(logits, 1):
        losses = _split_classes(run, given)
    else:
        losses = F.cross_entropy(**{**given, "reduction": "none"})
    reduction = given.get("reduction", "mean")
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / _denominator(run, given) if reduction == "mean" else total


def _axes_cutting(layout: Layout, dim: int) -> tuple[int, ...]:
    """The active axes along which a dim is split."""
    return tuple(
        axis
        for axis in axes_in(layout.active)
        if isinstance(layout.placements[axis], Shard | RaggedShard)
        and layout.placements[axis].is_shard(dim)
    )


def _denominator(run: Run, given: dict[str, Any]) -> Tensor:
    """The global number (or weight) of targets that count."""
    target = given["target"]
    counted = target != given.get("ignore_index", -100)
    weight = given.get("weight")
    if weight is None:
        count = counted.sum().to(given["input"].dtype)
    else:
        count = torch.where(counted, weight.detach()[target.clamp(min=0)], 0).sum()
    layout = run.input_layout(1)
    axes = [axis for dim in range(target.ndim) for axis in _axes_cutting(layout, dim)]
    if not axes:
        return count
    return all_reduce(count, group_of(layout.mesh, tuple(sorted(axes))))


def _split_classes(run: Run, given: dict[str, Any]) -> Tensor:
    """This rank's term of every row's loss."""
    layout = run.input_layout(0)
    shape = tuple(run.call.operands[0].shape)
    low, high = local_box(layout, shape)[1]
    logits, target = given["input"], given["target"]
    axes = _axes_cutting(layout, 1)
    losses: Tensor = _VocabularyParallel.apply(  # type: ignore[no-untyped-call]
        logits, target, low, high, layout, axes
    )
    return losses.masked_fill(target == given.get("ignore_index", -100), 0.0)


class _VocabularyParallel(torch.autograd.Function):
    """Rows of logits [n, c/k] and targets [n] to this rank's terms of the losses [n]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        low: int,
        high: int,
        layout: Layout,
        axes: tuple[int, ...],
    ) -> Tensor:
        group = group_of(layout.mesh, axes)
        lowest = torch.finfo(logits.dtype).min
        peak = logits.amax(1) if high > low else logits.new_full(logits.shape[:1], lowest)
        peak = all_reduce(peak, group, op="max")
        shifted = logits - peak.unsqueeze(1)
        exponentials = shifted.exp()
        normaliser = all_reduce(exponentials.sum(1), group)
        mine = (target >= low) & (target < high)
        column = torch.where(mine, target - low, 0)
        if high > low:
            picked = shifted.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill(~mine, 0)
        else:
            picked = torch.zeros_like(peak)
        ctx.save_for_backward(exponentials / normaliser.unsqueeze(1), column, mine)
        mask = sum(1 << axis for axis in axes)
        return kept_at_zero(normaliser.log(), layout, mask) - picked

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        probabilities, column, mine = ctx.saved_tensors
        gradient = probabilities.clone()
        if gradient.shape[1]:
            hit = mine.to(gradient.dtype).unsqueeze(1)
            gradient.scatter_add_(1, column.unsqueeze(1), -hit)
        return gradient * cotangent.unsqueeze(1), None, None, None, None, None


RULES = {F.cross_entropy: Rule("cross_entropy", _cross_entropy)}
