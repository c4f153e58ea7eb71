"""Normalisation: over trailing dims, groups of channels, images, or the batch.

Leading dims may be sharded, and channels between groups that are normalised together. Batch
normalisation in training takes the statistics of the global batch: it is a decomposition, whose
means are partial where the batch is sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor._autograd.conversion import full_tensor
from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._dispatch.dispatch import by_rule
from vescale_dtensor._dispatch.fallback import fallback
from vescale_dtensor._layout.placements import Partial, Replicate
from vescale_dtensor._ops.common.channel_groups import group_candidates
from vescale_dtensor._ops.common.empty_shards import pad_empty_shards, pads_empty
from vescale_dtensor._ops.common.functions import by_name, entries
from vescale_dtensor._ops.common.letters import letters
from vescale_dtensor._ops.common.memory_formats import MEMORY_FORMATS, in_format_of_operand
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._planning.op_call import memory_order
from vescale_dtensor._tensor.dtensor import DTensor


def _trailing(call: OpCall) -> Strategy | None:
    shape = call.argument(1, "normalized_shape")
    ndim = call.operands[0].ndim
    trailing = 1 if isinstance(shape, int) else len(tuple(shape))
    if trailing > ndim:
        return None
    dims = letters(ndim)
    fixed = frozenset(dims[ndim - trailing :])  # each row is normalised on one rank
    parameters = tuple(dims[ndim - trailing :] for _ in call.operands[1:])
    return Signature((dims, *parameters), (dims,), unshardable=fixed).strategy()


def _group_norm(call: OpCall) -> Strategy | None:
    """`group_norm(input, num_groups, weight, bias, eps)`: sharded between groups of channels."""
    groups, operand = call.argument(1, "num_groups"), call.operands[0]
    if operand.ndim < 2 or operand.shape[1] == 0:
        return None
    if not isinstance(groups, int) or groups < 1 or operand.shape[1] % groups:
        return None
    if prod(operand.shape) == groups:
        return None  # one value for each group: torch has the words for its error
    image: Dims = (None,) * (operand.ndim - 2)
    inputs: list[Dims] = [("n", "c", *image), *(("c",) for _ in call.operands[1:])]
    channels = [1, *(0 for _ in call.operands[1:])]
    each = operand.shape[1] // groups
    strategy = Signature(
        tuple(inputs),
        (inputs[0],),
        # Any shard could split a group: `group_candidates` has those that do not.
        unshardable=frozenset("c"),
        local=pad_empty_shards(
            inputs,
            inputs[:1],
            _in_groups(each),
            {(i, d): each for i, d in enumerate(channels)},
            varied=True,
        ),
    ).strategy()
    rows = group_candidates(call, channels, (1, operand.shape[1]), groups)
    return in_format_of_operand(call, replace(strategy, axis_candidates=rows))


def _in_groups(each: int) -> Callable[..., Tensor]:
    """`group_norm` of this rank's groups, of so many channels each."""

    def kernel(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
        named = by_name(("input", "num_groups", "weight", "bias", "eps"), args, kwargs)
        input = named["input"]
        # Past the check of the function around it, which would count the rows of this rank.
        return torch.group_norm(
            input,
            input.shape[1] // each,
            named.get("weight"),
            named.get("bias"),
            named.get("eps", 1e-5),
            torch.backends.cudnn.enabled,
        )

    return kernel


def _per_channel(call: OpCall) -> Strategy:
    """Batch and channels may be sharded; every other operand has one number per channel."""
    image: Dims = (None,) * (call.operands[0].ndim - 2)
    inputs: list[Dims] = [("n", "c", *image), *(("c",) for _ in call.operands[1:])]
    return pads_empty(Signature(tuple(inputs), (inputs[0],)), varied=True).strategy()


def _instance_norm(call: OpCall) -> Strategy | None:
    """`instance_norm(input, running_mean, running_var, weight, …)` without running statistics."""
    running = (call.argument(1, "running_mean"), call.argument(2, "running_var"))
    # Running statistics are the handler's matter, and known ones are a batch norm's.
    if call.operands[0].ndim < 3 or not call.argument(5, "use_input_stats", True):
        return None
    if any(statistic is not None for statistic in running):
        return None
    return _per_channel(call)


def _response_norm(call: OpCall) -> Strategy | None:
    """`local_response_norm`: over neighbouring channels at each point."""
    ndim = call.operands[0].ndim
    if len(call.operands) != 1 or ndim < 3:
        return None
    inputs: tuple[Dims, ...] = ((0, *(None,) * (ndim - 1)),)
    return pads_empty(Signature(inputs, inputs)).strategy()


def _known_statistics(call: OpCall) -> Strategy | None:
    """`batch_norm` that is not training."""
    found = _per_channel(call) if call.operands[0].ndim >= 2 else None
    return found and in_format_of_operand(call, found)


_EVALUATED = Rule("batch_norm", _known_statistics, Reads.NUMBERS | Reads.BROADCAST_PATTERN)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.batch_norm`, with the statistics of the global batch."""
    given = (input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not training:
        known: Tensor = by_rule(_EVALUATED, F.batch_norm, given, {})
        return known
    # One value per channel has no variance: torch refuses it.
    count = prod(input.shape) // max(1, input.shape[1]) if input.ndim >= 2 else 0
    if count <= 1 or not input.is_floating_point() or momentum is None:
        return fallback(F.batch_norm, given, {})  # type: ignore[no-any-return]
    running = running_mean, running_var
    return normalise_batch(input, running, weight, bias, momentum, eps)[0]


def normalise_batch(
    input: Tensor,
    running: tuple[Tensor | None, Tensor | None],
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch normalisation in training; running statistics follow those of the global batch.

    Returns:
        The result; the mean and one over the deviation of each channel, with all dims kept.
    """
    # As in torch's kernels, statistics of half precision are accumulated in single precision.
    narrow = input.dtype in (torch.float16, torch.bfloat16)
    x = input.float() if narrow else input
    dims = [d for d in range(x.ndim) if d != 1]
    mean = _total(x.mean(dims, keepdim=True))
    centred = x - mean
    # Deviations from the global mean, in a second pass: `E[x²] - E[x]²` cancels for large means.
    variance = _total(centred.square().mean(dims, keepdim=True))
    # Of the global batch: a rank's own count would scale its running variance otherwise.
    count = prod(x.shape[d] for d in dims)
    # Running variances are unbiased, the variance that normalises is not: as in torch.
    with torch.no_grad():
        _follow(running[0], mean.reshape(-1), momentum)
        _follow(running[1], variance.reshape(-1) * (count / (count - 1)), momentum)
    inverse = (variance + eps).rsqrt()
    result = centred * inverse
    shape = [-1 if d == 1 else 1 for d in range(x.ndim)]
    if weight is not None:
        result = result * weight.reshape(shape)
    if bias is not None:
        result = result + bias.reshape(shape)
    # Torch's kernel keeps the named memory formats, and no other order.
    kept = _FORMATS.get(memory_order(input) or (), torch.contiguous_format)
    result = result.to(input.dtype).contiguous(memory_format=kept)
    return result, mean, inverse


_FORMATS = {order: name for name, order in MEMORY_FORMATS.items()}


def _instances(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.instance_norm`: running statistics follow the mean over images."""
    given = (input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    follows = running_mean is not None and running_var is not None and input.ndim > 2
    count = prod(input.shape[2:])
    if follows and not use_input_stats and input.shape[0]:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if not any(isinstance(value, DTensor) for value in given):
        return F.instance_norm(*given)  # the statistics were the only DTensors
    if not follows or count < 2 or not input.numel() or not input.is_floating_point():
        known: Tensor = by_rule(_OF_IMAGES, F.instance_norm, given, {})
        return known
    # The result needs no communication, as images are not sharded; the running statistics do.
    with torch.no_grad():
        narrow = input.dtype in (torch.float16, torch.bfloat16)
        x = input.detach().float() if narrow else input.detach()
        dims = list(range(2, x.ndim))
        means = x.mean(dims)
        variances = (x - x.mean(dims, keepdim=True)).square().sum(dims) / (count - 1)
        _follow(running_mean, _total(means.mean(0)), momentum)
        _follow(running_var, _total(variances.mean(0)), momentum)
    return _instances(input, None, None, weight, bias, True, momentum, eps)


def _total(statistic: Tensor) -> Tensor:
    """A statistic with its partial sums reduced, so that all that follows is pointwise.

    Left partial, each use of it would reduce it again.
    """
    if not isinstance(statistic, DTensor):
        return statistic
    layout = statistic._spec.layout
    reduced = [Replicate() if isinstance(p, Partial) else p for p in layout.placements]
    return redistributed(statistic, layout.with_placements(reduced))


def _follow(running: Tensor | None, found: Tensor, momentum: float) -> None:
    """Move a running statistic towards what was found in this batch."""
    if running is None:
        return
    # A plain running statistic is one per rank: each has to follow the global value.
    if not isinstance(running, DTensor) and isinstance(found, DTensor):
        found = full_tensor(found)
    # Cast first: the running statistic keeps its own dtype, whatever that of the batch.
    running.mul_(1 - momentum).add_(found.to(running.dtype), alpha=momentum)


_OF_IMAGES = Rule("instance_norm", _instance_norm, Reads.NUMBERS | Reads.BROADCAST_PATTERN)
HANDLERS: dict[Any, Any] = {F.batch_norm: _batch_norm, F.instance_norm: _instances}
_READS = Reads.NUMBERS | Reads.SHAPES
RULES: dict[Any, Rule] = {
    **entries(
        "layer_norm rms_norm",
        Rule("layer_norm", _trailing, Reads.NUMBERS | Reads.BROADCAST_PATTERN),
    ),
    F.group_norm: Rule("group_norm", _group_norm, _READS),
    F.local_response_norm: Rule("local_response_norm", _response_norm),
}
