"""Cases: recurrent networks of several layers and directions, and their cells."""

from __future__ import annotations

import torch
from rule_fuzz import T
from rule_table import each

WIDTH = 3
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def weights(w, count, gates, inner, outer, biases):
    """Weights of some layers, and directions, all taken from one tensor."""
    found = []
    for layer in range(count):
        width = inner if layer == 0 else outer
        found += [w[: gates * WIDTH, :width] * 0.2, w[-gates * WIDTH :, :WIDTH] * 0.1]
        found += [w[: gates * WIDTH, 0] * 0.5, w[: gates * WIDTH, 1] * 0.3] if biases else []
    return found


def network(name, layers=1, dropout=0.0, train=True, both=False, first=False, biases=True):
    """One network; with the batch first, its results are handed on so."""

    def call(x, h, w):
        count, gates = layers * (1 + both), GATES[name]
        states = h[:1].expand(count, -1, -1) * 0.5
        hx = (states, states + 1) if name == "lstm" else states
        own = weights(w, 1 + both, gates, 4, WIDTH, biases)
        more = weights(w, 1 + both, gates, WIDTH * (1 + both), 0, biases) * (layers - 1)
        pair = 2 + 2 * biases
        if both:  # the second direction of the first layer has inputs of the same width
            own = own[:pair] + own[:pair]
            more = (more[:pair] * 2) * (layers - 1)
        inputs = x.transpose(0, 1) if first else x
        args = (inputs, hx, own + more, biases, layers, dropout, train, both, first)
        return getattr(torch, name)(*args)

    return call


CALLS = [
    network(name, **options)
    for name in GATES
    for options in (
        {},
        {"layers": 2, "dropout": 0.5},
        {"layers": 3, "dropout": 0.4, "first": True, "both": True},
        {"layers": 2, "dropout": 0.5, "train": False, "both": True, "biases": False},
        {"first": True},
    )
]


def in_single(x, h, w):
    """Of single precision, for which torch has kernels of its own."""
    numbers = [t.detach().float() for t in (x, h, w)]
    return network("lstm", layers=3, dropout=0.5, both=True)(*numbers)


def packed(x, h, w):
    sizes = torch.tensor([x.shape[1]] * x.shape[0])
    own = weights(w, 1, 3, 4, WIDTH, True)
    return torch.gru(x.flatten(0, 1), sizes, h[:1], own, True, 1, 0.0, True, False)


def wrong(x, h, w):
    return torch.gru(x, h[:, :, :2], weights(w, 1, 3, 4, 3, True), True, 1, 0.0, True, False, False)


for tag, count in (("", 5), ("_few", 2), ("_one", 1), ("_none", 0)):
    each(
        f"recurrent{tag}",
        [*CALLS, in_single, packed, wrong],
        T((2, count, 4)),
        T((2, count, 3)),
        T((12, 6)),
    )


def cell(name, biases=True):
    """One step of a network."""

    def call(x, h, w):
        gates = GATES[name] * WIDTH
        hx = (h, h * 2) if name == "lstm" else h
        bias = (w[:gates, 0], w[:gates, 1]) if biases else ()
        return getattr(torch, f"{name}_cell")(x, hx, w[:gates, :4], w[:gates, :3], *bias)

    return call


CELLS = [cell(name, biases) for name in GATES for biases in (True, False)]
for tag, count in (("", 5), ("_few", 2), ("_none", 0)):
    each(f"recurrent cell{tag}", CELLS, T((count, 4)), T((count, 3)), T((12, 4)))
