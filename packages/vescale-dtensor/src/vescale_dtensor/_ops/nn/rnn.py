"""Recurrent networks: the batch may be sharded, weights are replicated.

Dropout between layers draws for all sequences at once, so in training the layers run one by one,
with one device's dropout in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor._dispatch.dispatch import by_rule
from vescale_dtensor._dispatch.fallback import fallback
from vescale_dtensor._ops.common.empty_shards import pads_empty
from vescale_dtensor._ops.common.functions import entries, functions
from vescale_dtensor._ops.common.letters import no_letters
from vescale_dtensor._planning import Dims, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._torch.compat import variable_functions

_BATCH = "n"
_ARGUMENTS = 9
"""Of a network: input, hx, weights, biases, layers, dropout, train, bidirectional, batch_first."""


def _network(call: OpCall) -> Strategy | None:
    """Sequences `[t, n, i]` (or `[n, t, i]`), states `[layers, n, h]`, and weights."""
    if not _is_padded(call.args) or call.kwargs:
        return None
    states = _states(call.args[1])
    first = bool(call.args[8])
    if call.args[0].ndim != 3 or any(state.ndim != 3 for state in states):
        return None
    sequences: Dims = (_BATCH, None, None) if first else (None, _BATCH, None)
    kept: Dims = (None, _BATCH, None)
    inputs = [sequences, *(kept for _ in states)]
    inputs += [no_letters(w) for w in call.operands[len(inputs) :]]
    outputs = (sequences, *(kept for _ in states))
    # With the batch first, torch still computes step by step: that is the result's memory order.
    order = ((1, 0, 2) if first else None, *(None for _ in states))
    return _by_batch(inputs, outputs, order)


def _cell(call: OpCall) -> Strategy | None:
    """One step: inputs `[n, i]`, states `[n, h]`, and weights."""
    if len(call.args) < 2 or call.kwargs.keys() & {"input", "hx"}:
        return None
    states = _states(call.args[1])
    if any(x.ndim != 2 for x in (call.args[0], *states)):
        return None
    rows: Dims = (_BATCH, None)
    inputs = [rows, *(rows for _ in states)]
    inputs += [no_letters(w) for w in call.operands[len(inputs) :]]
    return _by_batch(inputs, (rows,) * len(states), (None,) * len(states))


def _by_batch(inputs: list[Dims], outputs: tuple[Dims, ...], order: Any) -> Strategy:
    # A rank without sequences runs one of zeros: its backward has to reach the replicated weights,
    # whose gradients are summed over all ranks.
    return pads_empty(Signature(tuple(inputs), outputs, output_orders=order)).strategy()


def _states(hx: Any) -> list[Tensor]:
    """The hidden state, and that of the cell where there is one."""
    return [hx] if isinstance(hx, Tensor) else list(hx)


def _is_padded(args: Any) -> bool:
    """Whether this is the form for padded sequences; that for packed ones has batch sizes."""
    return len(args) == _ARGUMENTS and isinstance(args[2], list | tuple)


_NETWORK = Rule("recurrent", _network, Reads.NUMBERS | Reads.BROADCAST_PATTERN)


def _run_planned(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    return by_rule(_NETWORK, func, args, kwargs)


def _handler(func: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _is_padded(args) or kwargs:
            return fallback(func, args, kwargs)
        layers, dropout, train = args[4:7]
        # Only dropout between layers draws for all sequences at once.
        if not (train and dropout and layers > 1):
            return _run_planned(func, args, kwargs)
        fits = args[0].ndim == 3 and len(args[2]) % layers == 0 and 0 < dropout <= 1
        # Kernels of accelerators draw the masks of all layers in an order of their own.
        if not fits or args[0].device.type != "cpu":
            return fallback(func, args, kwargs)
        return _layer_by_layer(func, args)

    return run


def _layer_by_layer(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    input, hx, weights, biases, layers, dropout, train, both, first = args
    # Time first, as torch stacks its layers: dropout in between draws by position in that order.
    x = input.transpose(0, 1) if first else input
    each = len(weights) // layers
    # States come layer by layer, the two directions of a layer side by side.
    split = [torch.split(state, 1 + both) for state in _states(hx)]
    kept = []
    for layer in range(layers):
        before = tuple(parts[layer] for parts in split)
        states = before[0] if isinstance(hx, Tensor) else before
        own = list(weights[layer * each : (layer + 1) * each])
        # One layer draws nothing, so this call is planned by the rule, and its batch stays sharded.
        x, *after = func(x, states, own, biases, 1, 0.0, train, both, False)
        kept.append(after)
        if layer < layers - 1:
            x = F.dropout(x, dropout)
    result = x.transpose(0, 1) if first else x
    return (result, *(torch.cat(list(parts)) for parts in zip(*kept, strict=True)))


_PLACES = (torch, variable_functions)
HANDLERS: dict[Any, Any] = {
    f: _handler(f) for f in functions("lstm gru rnn_tanh rnn_relu", _PLACES)
}
RULES = entries(
    "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    Rule("recurrent cell", _cell, Reads.NUMBERS | Reads.BROADCAST_PATTERN),
    _PLACES,
)
