"""Cross-entropy and likelihood: rows may be split, and classes, too (vocabulary-parallel).

A mean divides by the global count of targets that are not ignored, so uneven rows give the loss of
one device. With split classes every rank holds a term of the loss: the target's logit where it
holds the target, and on coordinate 0 the log of the global normaliser. Their sum is the loss, and
its gradient needs no further communication.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vescale_comm import all_reduce, group_of

from vescale_dtensor._call import Call, Reads
from vescale_dtensor._execute import Run
from vescale_dtensor._faces import kept_at_zero
from vescale_dtensor._layout import Layout, axes_in, local_box
from vescale_dtensor._one_step import one_step
from vescale_dtensor._plan import Rule
from vescale_dtensor._rules._names import in_order
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
    if not in_order(call, "input target weight") or len(call.operands) < 2:
        return None
    if given.get("reduction", "mean") not in ("none", "mean", "sum"):
        return None
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
    splittable = splittable and call.func is F.cross_entropy
    return Signature(
        tuple(letters),
        (rows if kept else (),),
        {**({} if kept else dict.fromkeys(rows, "sum")), "c": "sum"},
        fixed=frozenset() if splittable else frozenset("c"),
        located=frozenset("c"),
        local=_local,
    ).strategy()


def _local(run: Run, args: Any, kwargs: Any) -> Tensor:
    given = _given(args, kwargs)
    logits = run.input_layout(0)
    if logits.replicated == logits.active:
        return run.call.func(*args, **kwargs)  # type: ignore[no-any-return]
    reduction = given.get("reduction", "mean")
    # The collective comes first: what is raised below may concern some ranks' rows only.
    count = _denominator(run, given) if reduction == "mean" else None
    if _axes_cutting(logits, 1):
        losses = _split_classes(run, given)
    else:
        losses = run.call.func(**{**given, "reduction": "none"})
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if count is None else total / count


def _axes_cutting(layout: Layout, dim: int) -> tuple[int, ...]:
    """The active axes along which a dim is split."""
    return tuple(axis for axis in axes_in(layout.active) if layout.placements[axis].is_shard(dim))


def _denominator(run: Run, given: dict[str, Any]) -> Tensor:
    """The global number (or weight) of targets that count."""
    target = given["target"]
    counted = target != given.get("ignore_index", -100)
    weight = given.get("weight")
    if weight is None:
        count: Tensor = counted.sum().to(given["input"].dtype)
    else:
        count = (weight.detach()[torch.where(counted, target, 0)] * counted).sum()
    layout = run.input_layout(1)
    axes = [axis for dim in range(target.ndim) for axis in _axes_cutting(layout, dim)]
    if not axes:
        return count
    total: Tensor = all_reduce(count, group_of(layout.mesh, tuple(sorted(axes))))
    return total


def _split_classes(run: Run, given: dict[str, Any]) -> Tensor:
    """This rank's term of every row's loss."""
    layout = run.input_layout(0)
    shape = tuple(run.call.operands[0].shape)
    low, high = local_box(layout, shape)[1]
    logits, target = given["input"], given["target"]
    axes = _axes_cutting(layout, 1)
    ignored = target == given.get("ignore_index", -100)
    columns = _checked_columns(target, ignored, shape[1], low, high)
    return _losses(logits, columns, layout, axes).masked_fill(ignored, 0.0)


@one_step
def _losses(logits: Tensor, columns: Tensor, layout: Layout, axes: tuple[int, ...]) -> Tensor:
    losses: Tensor = _VocabularyParallel.apply(logits, columns, layout, axes)  # type: ignore[no-untyped-call]
    return losses


def _checked_columns(target: Tensor, ignored: Tensor, classes: int, low: int, high: int) -> Tensor:
    """Column of each target among classes low to high, or -1 where another rank holds it.

    A target that is no class lies behind the last column: torch refuses it when it looks there,
    on every rank.
    """
    mine = (target >= low) & (target < high)
    outside = ((target < 0) | (target >= classes)) & ~ignored
    return torch.where(mine, target - low, torch.where(outside, high - low + 1, -1))


class _VocabularyParallel(torch.autograd.Function):
    """Rows of logits [n, c/k] and targets [n] to this rank's terms of the losses [n]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        columns: Tensor,
        layout: Layout,
        axes: tuple[int, ...],
    ) -> Tensor:
        group = group_of(layout.mesh, axes)
        lowest = logits.new_full((len(logits), 1), torch.finfo(logits.dtype).min)
        peak = logits.amax(1) if logits.shape[1] else lowest.squeeze(1)
        peak = all_reduce(peak, group, op="max")
        shifted = logits - peak.unsqueeze(1)
        exponentials = shifted.exp()
        normaliser = all_reduce(exponentials.sum(1), group)
        there = shifted if shifted.shape[1] else torch.zeros_like(lowest)
        picked = there.gather(1, columns.clamp(min=0).unsqueeze(1)).squeeze(1)
        picked = picked.masked_fill(columns < 0, 0)
        ctx.save_for_backward(exponentials / normaliser.unsqueeze(1), columns)
        mask = sum(1 << axis for axis in axes)
        return kept_at_zero(normaliser.log(), layout, mask) - picked

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        probabilities, columns = ctx.saved_tensors
        hit = columns.unsqueeze(1) == torch.arange(probabilities.shape[1], device=columns.device)
        gradient = (probabilities - hit.to(probabilities.dtype)) * cotangent.unsqueeze(1)
        return gradient, None, None, None


_READS = Reads.NUMBERS | Reads.EXTENTS
RULES = {
    F.cross_entropy: Rule("cross_entropy", _cross_entropy, _READS),
    # The same, of what is normalised already: the classes stay whole.
    F.nll_loss: Rule("nll_loss", _cross_entropy, _READS),
}
