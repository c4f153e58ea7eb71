"""Relatives of dropout, and the noise of `gumbel_softmax`, with one device's draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import vescale_rng
from torch import Tensor

from vescale_dtensor._dispatch.dispatch import by_rule
from vescale_dtensor._dispatch.fallback import fallback
from vescale_dtensor._ops.common.letters import letters
from vescale_dtensor._ops.common.memory_formats import order_of_operand
from vescale_dtensor._ops.random.sampling import draw_layout
from vescale_dtensor._planning import LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._tensor.dtensor import DTensor

Handler = Callable[..., Any]


def _rule(name: str, drop: Callable[..., Any], outputs: int = 1) -> Rule:
    """The rule of an elementwise dropout, by `drop(local, p, ..., layout)` on local tensors."""

    def local(context: LocalContext, args: Any, kwargs: Any) -> Any:
        if args[0].is_meta:  # there nothing is drawn
            kept = args[0] * 1.0
            return kept if outputs == 1 else (kept, kept.detach().bool())
        # Drawn by the global index of each element: no rank has to know what others drew, and the
        # mask is the same however the tensor is sharded.
        return drop(*args, draw_layout(context, args[0]))

    def strategy(call: OpCall) -> Strategy | None:
        dims = letters(call.operands[0].ndim)
        orders = (order_of_operand(call),) * outputs
        return Signature(
            (dims,), (dims,) * outputs, elementwise=True, local=local, output_orders=orders
        ).strategy()

    return Rule(name, strategy, Reads.NOTHING)  # a new `p` needs no new plan


_ALPHA = _rule("alpha_dropout", vescale_rng.alpha_dropout)
_FEATURE = _rule("feature_dropout", vescale_rng.feature_dropout)
_FEATURE_ALPHA = _rule("feature_alpha_dropout", vescale_rng.feature_alpha_dropout)


def _native(local: Tensor, p: float, train: bool, rng_layout: Any) -> Any:
    """`native_dropout`. It returns an empty tensor itself, so that a leaf would get a history."""
    source = local if local.numel() else local.clone()
    return vescale_rng.native_dropout(source, p, train, rng_layout)


_NATIVE = _rule("native_dropout", _native, outputs=2)


def _planned(func: Any, rule: Rule, *args: Any) -> Any:
    return by_rule(rule, func, args, {})


def _dropping(func: Any, rule: Rule, ndims: tuple[int, ...] = ()) -> Handler:
    """The handler of a function of `torch.nn.functional`; the fallback decides unusual cases."""

    def run(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not isinstance(input, DTensor) or not _is_usual(input, p, training, ndims):
            return _unusual(func, input, p, training, inplace)
        result = _planned(_TORCHS[rule.name], rule, input, float(p))
        # Computed out of place, so that the write is checked and recorded as any `copy_`.
        return input.copy_(result) if inplace else result

    return run


def _as_torch_names(handler: Handler, inplace: bool = False) -> Handler:
    """The same for a function of `torch`, where `training` is called `train`."""
    return lambda input, p, train: handler(input, p, train, inplace)


def _is_usual(input: Tensor, p: float, training: bool, ndims: tuple[int, ...]) -> bool:
    """Whether elements are drawn, and torch has nothing to warn of."""
    # Of the global tensor: a rank whose shard is empty takes the same branch as the others.
    known = input.ndim in ndims if ndims else input.ndim >= 2
    # Other calls draw nothing, or torch refuses them or warns: see `_unusual`.
    return training and 0 < p < 1 and input.numel() > 0 and (known or not ndims)


def _unusual(func: Any, input: Tensor, p: float, training: bool, inplace: bool) -> Any:
    """Calls that torch refuses or warns of, and those that draw nothing."""
    how = (p, training) if func in _THREE else (p, training, inplace)
    # Torch returns the input itself and leaves the generator where it is: so does every rank.
    if isinstance(input, DTensor) and 0 <= p <= 1 and (not training or p == 0):
        # Some refuse a number of dims, or warn of it, also where they draw nothing.
        func(torch.empty((0,) * input.ndim, device="cpu"), *how)
        return input
    return fallback(func, (input, *how), {})


def _dropout1d(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    # An unbatched signal, which torch takes for a batch of one.
    # Not in place: the result has to be the input itself, and not a view of it.
    if isinstance(input, DTensor) and input.ndim == 2 and not inplace:
        batched: Tensor = _batched1d(input.unsqueeze(0), p, training)
        return batched.squeeze(0)
    result: Tensor = _batched1d(input, p, training, inplace)
    return result


def _native_dropout(input: Tensor, p: float, train: bool | None) -> Any:
    # What torch refuses, it refuses on global tensors, on every rank.
    if train is None or not 0 <= p <= 1 or not input.is_floating_point():
        return fallback(torch.native_dropout, (input, p, train), {})
    return _planned(torch.native_dropout, _NATIVE, input, float(p), train)


def _gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    # The same torch ops as in torch.nn.functional: each has its rule. The memory format is torch's,
    # too, in which the noise is drawn.
    noise = torch.empty_like(logits, memory_format=torch.contiguous_format).exponential_()
    soft = ((logits + -noise.log()) / tau).softmax(dim)
    if not hard:
        return soft
    index = soft.max(dim, keepdim=True)[1]
    zeros = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    chosen = zeros.scatter_(dim, index, 1.0)
    # Straight-through, in torch's order of operations: `chosen` up to rounding, with the gradient
    # of `soft`.
    return chosen - soft.detach() + soft


_TORCHS: dict[str, Any] = {
    "alpha_dropout": torch.alpha_dropout,
    "feature_dropout": torch.feature_dropout,
    "feature_alpha_dropout": torch.feature_alpha_dropout,
}
_IN_PLACE = (torch.alpha_dropout_, torch.feature_dropout_, torch.feature_alpha_dropout_)
_THREE = frozenset((*_TORCHS.values(), *_IN_PLACE))
_batched1d = _dropping(F.dropout1d, _FEATURE, (3,))

HANDLERS: dict[Any, Handler] = {
    F.alpha_dropout: _dropping(F.alpha_dropout, _ALPHA),
    torch.alpha_dropout: _as_torch_names(_dropping(torch.alpha_dropout, _ALPHA)),
    torch.alpha_dropout_: _as_torch_names(_dropping(torch.alpha_dropout_, _ALPHA), True),
    F.feature_alpha_dropout: _dropping(F.feature_alpha_dropout, _FEATURE_ALPHA),
    torch.feature_alpha_dropout: _as_torch_names(
        _dropping(torch.feature_alpha_dropout, _FEATURE_ALPHA)
    ),
    torch.feature_alpha_dropout_: _as_torch_names(
        _dropping(torch.feature_alpha_dropout_, _FEATURE_ALPHA), True
    ),
    torch.feature_dropout: _as_torch_names(_dropping(torch.feature_dropout, _FEATURE)),
    torch.feature_dropout_: _as_torch_names(_dropping(torch.feature_dropout_, _FEATURE), True),
    F.dropout1d: _dropout1d,
    F.dropout2d: _dropping(F.dropout2d, _FEATURE, (4,)),
    F.dropout3d: _dropping(F.dropout3d, _FEATURE, (5,)),
    torch.native_dropout: _native_dropout,
    F.gumbel_softmax: _gumbel_softmax,
}
