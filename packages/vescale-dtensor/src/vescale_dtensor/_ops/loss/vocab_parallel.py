"""Vocabulary-parallel losses: classes are sharded, and ranks exchange a few numbers per row.

A row's loss is a partial sum: every rank contributes its own logits' part and coordinate 0 the log
of the global normaliser. The gradient needs no communication.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from vescale_comm import all_reduce, group_of

from vescale_dtensor._autograd.uses import zero_off_first
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._ops.common.sharded_dim import pad_empty_dims, sum_over_axes
from vescale_dtensor._torch.overridable import overridable


class ClassSharding(NamedTuple):
    """How the classes are sharded.

    Attributes:
        layout: of the logits.
        axes: mesh axes that shard the classes.
        number: the global number of classes.
    """

    layout: Layout
    axes: tuple[int, ...]
    number: int


@overridable
def partial_index_losses(
    logits: Tensor, columns: Tensor, weight: Tensor | None, smoothing: float, classes: ClassSharding
) -> Tensor:
    """This rank's part `[n, …]` of rows' losses.

    Args:
        logits: `[n, c, …]`, of this rank's classes.
        columns: `[n, …]`, the target's place among these classes, or -1 if another rank has it.
        weight: `[c]`, of these classes; no gradient reaches it.
        smoothing: the probability that is spread over all classes.
        classes: how they are sharded.
    """
    peak = peaks(logits, classes)
    return _PartialLosses.apply(logits, peak, columns, weight, smoothing, classes)[0]  # type: ignore[no-any-return, no-untyped-call]


@overridable
def log_normalisers(logits: Tensor, peak: Tensor, classes: ClassSharding) -> Tensor:
    """A partial sum `[n, …]`: the log of the sum over classes of `exp(logits - peak)`."""
    return _PartialLosses.apply(logits, peak, None, None, 0.0, classes)[0]  # type: ignore[no-any-return, no-untyped-call]


@overridable
def peaks(logits: Tensor, classes: ClassSharding) -> Tensor:
    """The largest logit of each row, over all classes; at least single precision, no gradient."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    with torch.no_grad():  # the loss does not depend on the shift
        largest = pad_empty_dims(logits, (1,), -torch.inf).amax(1).to(wide)
        return all_reduce(largest, group_of(classes.layout.mesh, classes.axes), op="max")


def partial_probability_losses(
    logits: Tensor, target: Tensor, weight: Tensor | None, classes: ClassSharding
) -> Tensor:
    """The same for targets `[n, c, …]` of probabilities; they and weights have gradients."""
    shares = target if weight is None else target * broadcast_over_classes(weight, target)
    peak = peaks(logits, classes)
    above = (logits - peak.unsqueeze(1)).to(torch.promote_types(logits.dtype, shares.dtype))
    scale = sum_over_axes(shares.sum(1), classes.layout, classes.axes)
    return scale * log_normalisers(logits, peak, classes) - (shares * above).sum(1)


def partial_nll_losses(input: Tensor, columns: Tensor, weight: Tensor | None) -> Tensor:
    """This rank's part of rows' losses, given log-probabilities `[n, c, …]`."""
    padded = pad_empty_dims(input, (1,), 0)
    weights = None if weight is None else pad_empty_dims(weight, (0,), 0)
    return F.nll_loss(padded, columns, weights, ignore_index=-1, reduction="none")


def broadcast_over_classes(weight: Tensor, like: Tensor) -> Tensor:
    """Weights `[c]` in a shape that multiplies rows `[n, c, …]`."""
    return weight.view(-1, *(1,) * (like.ndim - 2))


class _PartialLosses(torch.autograd.Function):
    """This rank's part of the losses, and the probabilities, for a second derivative only.

    loss = scale · log(normaliser) - hit · logit of the target - Σ spread · logit
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        peak: Tensor,
        columns: Tensor | None,
        weight: Tensor | None,
        smoothing: float,
        classes: ClassSharding,
    ) -> tuple[Tensor, Tensor]:
        group = group_of(classes.layout.mesh, classes.axes)
        # `peak` has at least single precision, and so has all that follows: as in torch's kernels,
        # half precision is rounded once, at the end.
        shifted = logits - peak.unsqueeze(1)
        powers = shifted.exp()
        hit = None if columns is None else _hits(columns, weight, peak.dtype)
        # All sums of one row travel in one collective.
        told = [powers.sum(1)]
        if weight is not None and hit is not None:
            told += [hit, weight.sum().to(peak.dtype)]
        sums = _sum_together(told, group)
        scale = None
        each = smoothing / classes.number
        if len(sums) == 3:
            scale = (1 - smoothing) * sums[1] + each * sums[2]
        logs = sums[0].log() if scale is None else sums[0].log() * scale
        # The log of the normaliser is known to every rank: it counts on coordinate 0 only.
        losses = zero_off_first(logs, classes.layout, sum(1 << axis for axis in classes.axes))
        if columns is not None and hit is not None:
            hit = hit * (1 - smoothing)
            losses = losses - hit * _picked(shifted, columns)
        if smoothing:
            wide = shifted if weight is None else shifted * broadcast_over_classes(weight, shifted)
            losses = losses - wide.sum(1) * each
        # Returned as well as saved, so that backward can be differentiated.
        probabilities = (powers / sums[0].unsqueeze(1)).to(logits.dtype)
        ctx.save_for_backward(probabilities, columns, hit, scale, weight)
        ctx.each, ctx.classes = each, classes
        # The second cotangent is None unless somebody differentiates twice.
        ctx.set_materialize_grads(False)
        return losses.to(logits.dtype), probabilities

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None, of_shares: Tensor | None) -> Any:
        shares, columns, hit, scale, weight = ctx.saved_tensors
        found = torch.zeros_like(shares)
        if cotangent is not None:
            scaled = cotangent if scale is None else (cotangent * scale).to(shares.dtype)
            found = shares * scaled.unsqueeze(1)
            # Rows whose target another rank has: `hit` is 0, so any column will do for them.
            if columns is not None and shares.shape[1]:
                at = columns.clamp(min=0).unsqueeze(1)
                found = found.scatter_add(1, at, (-hit * cotangent).to(shares.dtype).unsqueeze(1))
            if ctx.each:
                every = (cotangent * ctx.each).unsqueeze(1)
                found = found - (
                    every if weight is None else every * broadcast_over_classes(weight, shares)
                )
        if of_shares is not None:
            weighted = (of_shares * shares).sum(1, keepdim=True)
            # Softmax backward: the dot product is over the global classes.
            total = sum_over_axes(weighted, ctx.classes.layout, ctx.classes.axes)
            found = found + shares * (of_shares - total)
        return found, None, None, None, None, None


def _hits(columns: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight of each row's target where this rank has it, else zero."""
    mine = columns >= 0
    if weight is None:
        return mine.to(dtype)
    padded = pad_empty_dims(weight, (0,), 0)
    return padded[columns.clamp(min=0)].to(dtype).masked_fill(~mine, 0)


def _picked(shifted: Tensor, columns: Tensor) -> Tensor:
    at = columns.clamp(min=0).unsqueeze(1)
    found = pad_empty_dims(shifted, (1,), 0).gather(1, at).squeeze(1)
    return found.masked_fill(columns < 0, 0)


def _sum_together(parts: list[Tensor], group: Any) -> list[Tensor]:
    """The sums over a group of several tensors, by one collective."""
    if len(parts) == 1:
        return [all_reduce(parts[0], group)]
    flat = all_reduce(torch.cat([part.reshape(-1) for part in parts]), group)
    pieces = torch.split(flat, [part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
