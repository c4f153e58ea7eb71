"""Cross-entropy and likelihood: rows may be sharded, and classes too (vocabulary-parallel).

A mean divides by the global count (or weight) of targets that are not ignored, so uneven shards of
rows give the loss of one device. With sharded classes the loss is a partial sum.
"""

from __future__ import annotations

import inspect
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor._layout.local_shards import local_interval
from vescale_dtensor._ops.common.functions import by_name
from vescale_dtensor._ops.common.local_index import local_index
from vescale_dtensor._ops.common.sharded_dim import pad_empty_dims, sharding_axes, sum_over_axes
from vescale_dtensor._ops.loss.elementwise import reduction_of, unreduced
from vescale_dtensor._ops.loss.vocab_parallel import (
    ClassSharding,
    broadcast_over_classes,
    partial_index_losses,
    partial_nll_losses,
    partial_probability_losses,
)
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._torch.compat import any_autocast
from vescale_dtensor._torch.opmath import opmath_sum, result_dtype

_NAMES = tuple(inspect.signature(F.cross_entropy).parameters)


def _cross_entropy(call: OpCall) -> Strategy | None:
    given = by_name(_NAMES, call.args, call.kwargs)
    if len(call.operands) < 2:
        return None
    logits, reduction = call.operands[0], reduction_of(given)
    if reduction not in ("none", "mean", "sum") or not logits.ndim:
        return None
    shares = _has_probability_targets(call)
    if shares is None:
        return None
    image = tuple(range(2, logits.ndim))
    rows: Dims = (0, *image) if logits.ndim > 1 else ()
    dims: Dims = (0, "c", *image) if logits.ndim > 1 else ("c",)
    letters: list[Dims] = [dims, dims if shares else rows]
    if given.get("weight") is not None:
        letters.append(("c",))
    kept = reduction == "none"
    return Signature(
        tuple(letters),
        (rows if kept else (),),
        {**({} if kept else dict.fromkeys(rows, "sum")), "c": "sum"},
        contiguous_only=frozenset("c"),  # a target's column is counted from where the shard begins
        local=_local,
    ).strategy()


def _has_probability_targets(call: OpCall) -> bool | None:
    """Whether targets are probabilities of classes, not class indices; None if neither fits."""
    logits, target = call.operands[:2]
    if target.dtype.is_floating_point:
        alike = call.func is F.cross_entropy and target.shape == logits.shape
        return True if alike else None
    return False if target.ndim == max(0, logits.ndim - 1) else None


class _ShardedLoss:
    """One loss over sharded rows or classes, as this rank sees it.

    Attributes:
        call: what was called.
        given: the arguments by name, with local tensors.
        logits, target, weight: of them, these.
        classes: how the classes are sharded.
        rows: mesh axes that shard rows.
        low, high: this rank's classes, from the first to the one behind the last.
        count: the global number of rows; 0 where there are no classes.
    """

    def __init__(self, context: LocalContext, args: Any, kwargs: Any) -> None:
        self.call, self.given = context.call, by_name(_NAMES, args, kwargs)
        # Casts come first: all that is derived below has their dtype.
        if any_autocast() and context.call.func is F.cross_entropy:
            self.given = _as_autocast(self.given)
        self.logits: Tensor = self.given["input"]
        self.target: Tensor = self.given["target"]
        self.weight: Tensor | None = self.given.get("weight")
        if self.has_probability_targets and self.given.get("ignore_index", -100) >= 0:
            raise RuntimeError("ignore_index is not supported for floating point target")
        shape, layout = tuple(context.call.operands[0].shape), context.input_layout(0)
        dim = min(1, len(shape) - 1)
        others = [d for d in range(len(shape)) if d != dim]
        # At least one class: an empty dim of classes must not divide by zero below.
        self.classes = ClassSharding(layout, sharding_axes(layout, (dim,)), max(1, shape[dim]))
        self.rows = sharding_axes(layout, others)
        self.low, self.high = local_interval(layout, shape, dim)
        self.count = prod(shape[d] for d in others) if prod(shape) else 0
        if dim == 0:  # one row
            self.logits, self.target = self.logits.unsqueeze(0), self.target.unsqueeze(0)

    @property
    def has_probability_targets(self) -> bool:
        """Whether targets are probabilities of classes."""
        return self.target.dtype.is_floating_point

    def ignored(self) -> Tensor:
        """A mask of rows whose target is `ignore_index`."""
        found: Tensor = self.target == self.given.get("ignore_index", -100)
        return found

    def columns(self) -> Tensor:
        """The place of each target among this rank's classes, or -1 if another rank has it.

        A target that is no class gets a place behind the last column: torch refuses it, on every
        rank.
        """
        interval, number = (self.low, self.high), self.classes.number
        # -1 and not 0: place 0 would take the first column of this rank for other ranks' targets.
        places, _ = local_index(self.target.long(), interval, number, elsewhere=-1)
        return places.masked_fill(self.ignored(), -1)

    def local_losses(self) -> Tensor:
        """Losses per row, where classes are not sharded."""
        given = unreduced(self.given)
        if given["target"].dtype is torch.uint8:
            # Without a reduction some of torch's kernels take no uint8, which those with one take.
            given["target"] = given["target"].long()
        found: Tensor = self.call.func(**given)
        return found

    def partial_losses(self) -> Tensor:
        """This rank's part of the losses per row, where classes are sharded."""
        smoothing = self.given.get("label_smoothing", 0.0)
        if self.has_probability_targets:
            target = self.target
            if not self.count:
                # No rows or no classes: zeros that depend on all operands, without a log of zero.
                nothing = self.logits * target
                if self.weight is not None:
                    nothing = nothing * broadcast_over_classes(self.weight, nothing)
                return nothing.sum(1)
            if smoothing:
                target = target * (1 - smoothing) + smoothing / self.classes.number
            return partial_probability_losses(self.logits, target, self.weight, self.classes)
        columns = self.columns()
        if self.call.func is F.nll_loss:
            return partial_nll_losses(self.logits, columns, self.weight)
        # Torch refuses weights that require grad for index targets (see `check`), so none is lost.
        weight = None if self.weight is None else self.weight.detach()
        partial = partial_index_losses(self.logits, columns, weight, smoothing, self.classes)
        # An ignored row has no target, but the normaliser and the smoothing would still count.
        return partial.masked_fill(self.ignored(), 0.0)

    def denominator(self) -> Tensor | int:
        """The global number, or weight, of the targets over which a mean is taken.

        Ranks hold different rows, of which different numbers are ignored: the count is summed.
        """
        if self.has_probability_targets:
            return self.count
        axes, dtype = self.rows, torch.promote_types(self.logits.dtype, torch.float32)
        if self.weight is None:
            count = self.ignored().logical_not().sum().to(dtype)
        else:
            columns, weights = self.columns(), pad_empty_dims(self.weight.detach(), (0,), 0)
            mine = (columns >= 0) & (columns < self.high - self.low)
            count = weights[torch.where(mine, columns, 0)].to(dtype).masked_fill(~mine, 0).sum()
            # Only the rank that has a target's class knows its weight: summed over those axes, too.
            axes = tuple(sorted({*axes, *self.classes.axes}))
        return sum_over_axes(count, self.classes.layout, axes) if axes else count

    def check(self) -> None:
        """Let torch check dtypes and weights, on a call without rows."""
        target = self.target[:0]
        given = {
            **unreduced(self.given),
            "input": pad_empty_dims(self.logits[:0], (1,), 0),
            "target": pad_empty_dims(target, (1,), 0) if self.has_probability_targets else target,
        }
        if self.weight is not None:
            given["weight"] = pad_empty_dims(self.weight, (0,), 0)
        self.call.func(**given)


def _local(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    layout = context.input_layout(0)
    if layout.replicated == layout.active:
        return context.call.func(*args, **kwargs)  # type: ignore[no-any-return]
    loss = _ShardedLoss(context, args, kwargs)
    reduction = reduction_of(loss.given)
    splits_classes = bool(loss.classes.axes)
    if splits_classes and loss.count:
        loss.check()
    # The collective comes first: below, torch may raise for one rank's rows only, and the others
    # would wait for it in the collective.
    count = loss.denominator() if reduction == "mean" else None
    losses = loss.partial_losses() if splits_classes else loss.local_losses()
    if reduction == "none":
        return losses.squeeze(0) if context.call.operands[0].ndim == 1 else losses
    return opmath_sum(losses, count)


def _as_autocast(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments in the dtypes in which autocast runs cross-entropy.

    The sharded loss is composed of other ops, of which autocast would choose others.
    """
    logits: Tensor = given["input"]
    row = torch.zeros(1, 1, dtype=logits.dtype, device=logits.device)
    dtype = result_dtype(F.cross_entropy, row, torch.zeros(1, dtype=torch.int64, device=row.device))
    return {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }


_READS = Reads.NUMBERS | Reads.BROADCAST_PATTERN
RULES = {
    F.cross_entropy: Rule("cross_entropy", _cross_entropy, _READS),
    F.nll_loss: Rule("nll_loss", _cross_entropy, _READS),
}
