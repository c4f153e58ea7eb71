"""Convolutions: batch, input channels and output channels may be sharded; image dims may not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._ops.common.channel_groups import group_candidates
from vescale_dtensor._ops.common.empty_shards import pad_empty_shards, pads_empty
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._torch.compat import no_torch_function

_GROUPS = 6
"""Position of the argument `groups`, in all of torch's convolutions."""


def _convolution(spatial: int, transposed: bool) -> Callable[[OpCall], Strategy | None]:
    def strategy(call: OpCall) -> Strategy | None:
        shapes = call.shapes()
        if len(shapes[0]) not in (spatial + 1, spatial + 2) or len(shapes[1]) != spatial + 2:
            return None
        groups = call.argument(_GROUPS, "groups", 1)
        made = _ungrouped if groups == 1 else _grouped
        return made(call, spatial, transposed)

    return strategy


def _ungrouped(call: OpCall, spatial: int, transposed: bool) -> Strategy:
    """One group: output channels may be sharded, and input channels, which are summed."""
    inputs, output = _letters(call, spatial, "i", ("i", "o") if transposed else ("o", "i"), "o")
    added = (2,) if len(inputs) == 3 else ()
    signature = Signature(inputs, (output,), {"i": "sum"}, linear=((0,), (1,)), bias_operands=added)
    # An empty shard of input channels becomes one channel of zeros: it adds nothing to the sum.
    return pads_empty(signature).strategy()


def _grouped(call: OpCall, spatial: int, transposed: bool) -> Strategy | None:
    """Several groups: channels may be sharded between groups."""
    groups = call.argument(_GROUPS, "groups", 1)
    operand, weight = call.operands[:2]
    channel = operand.ndim - spatial - 1
    if groups < 1 or operand.shape[channel] % groups or weight.shape[0] % groups:
        return None
    shape = _result_shape(call) if transposed else None
    if transposed and shape is None:
        return None  # the fallback raises torch's error
    made = weight.shape[0] if shape is None else shape[channel]
    first = "i" if transposed else "o"
    inputs, output = _letters(call, spatial, "i", (first, None), "o")
    channels = [channel, 0, 0][: len(inputs)]
    # A rank without any group computes one group of zeros.
    # One letter for channels of all operands: they are empty together.
    same, result = _letters(call, spatial, "c", ("c", None), "c")
    slices = {(i, d): call.operands[i].shape[d] // groups for i, d in enumerate(channels)}
    strategy = Signature(
        inputs,
        (output,),
        unshardable=frozenset("io"),
        linear=((0,), (1,)),
        bias_operands=(2,) if len(inputs) == 3 else (),
        local=pad_empty_shards(same, (result,), _in_groups(groups), slices),
    ).strategy()
    rows = group_candidates(call, channels, (channel, made), groups)
    return replace(strategy, axis_candidates=rows, shapes=None if shape is None else (shape,))


def _result_shape(call: OpCall) -> tuple[int, ...] | None:
    """The global shape of a transposed convolution, which no operand has; from meta tensors."""
    # From global shapes, which all ranks know: all of them get the same shape, or None.
    with no_torch_function(), torch.no_grad():
        args, kwargs = call.replaced([torch.empty(shape, device="meta") for shape in call.shapes()])
        try:
            return tuple(call.func(*args, **kwargs).shape)
        except RuntimeError:
            return None


def _letters(
    call: OpCall, spatial: int, read: str, weight: tuple[str | None, str | None], made: str
) -> tuple[tuple[Dims, ...], Dims]:
    image: Dims = (None,) * spatial
    batch: Dims = ("n",) if call.operands[0].ndim == spatial + 2 else ()
    inputs: list[Dims] = [(*batch, read, *image), (*weight, *image)]
    if len(call.operands) == 3:
        inputs.append((made,))
    return tuple(inputs), (*batch, made, *image)


def _in_groups(groups: int) -> Callable[..., Tensor]:
    """The convolution with the number of groups that this rank has."""

    def kernel(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
        # The width of a group is global, the count local: of the shard after padding, so that a
        # rank without groups runs its one group of zeros.
        each = context.call.operands[1].shape[0] // groups
        count = args[1].shape[0] // each
        if len(args) > _GROUPS:
            args = [*args[:_GROUPS], count, *args[_GROUPS + 1 :]]
        else:
            kwargs = {**kwargs, "groups": count}
        return context.call.func(*args, **kwargs)  # type: ignore[no-any-return]

    return kernel


RULES = {
    getattr(torch, f"conv{'_transpose' if transposed else ''}{spatial}d"): Rule(
        "convolution", _convolution(spatial, transposed), Reads.NUMBERS | Reads.SHAPES
    )
    for spatial in (1, 2, 3)
    for transposed in (False, True)
}
