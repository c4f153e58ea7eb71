"""Torch's own attention and recurrent modules train over dp=2 x tp=2 as on one device.

Heads are cut over tp and the batch over dp, with dropout and with masks; nothing is gathered whole.
"""

import pytest
import torch
import vescale_dtensor as vd
from one_device import check
from torch import nn
from vescale_comm import simulate
from vescale_dtensor import InterleavedShard, Replicate, Shard

COLUMNS, ROWS = Shard(0), Shard(1)
SEQUENCE = torch.linspace(-1, 1, 5 * 3 * 8).reshape(5, 3, 8)
LEFT_OUT = torch.tensor([[False] * 3, [False, False, True], [False] * 3, [False, True, True]])
LEFT_OUT = torch.cat([LEFT_OUT, LEFT_OUT[:1]])

# The end of a parameter's name → its placement on tp; all others are whole there.
CUTS = {
    "in_proj_weight": InterleavedShard(0, 3),
    "in_proj_bias": InterleavedShard(0, 3),
    "out_proj.weight": ROWS,
    "linear1.weight": COLUMNS,
    "linear1.bias": COLUMNS,
    "linear2.weight": ROWS,
}


def distributed_module(place, module, cuts=CUTS):
    """The module with its parameters laid out."""
    for name, parameter in list(module.named_parameters()):
        owner, _, own = name.rpartition(".")
        cut = next((cut for end, cut in cuts.items() if name.endswith(end)), Replicate())
        made = place.parameter(parameter.detach(), Replicate(), cut)
        setattr(module.get_submodule(owner), own, made)
    return module


def trained(place, module, **options):
    """Two steps: results, and gradients of inputs and parameters."""
    found = []
    for scale in (1.0, 2.0):
        x = place(SEQUENCE * scale, Shard(0), Replicate(), grad=True)
        count = options.get("count", 1)
        result = module(*[x] * count, **options.get("more", {}))
        result = result[0] if isinstance(result, tuple) else result
        loss = result.square().mean()
        loss.backward()
        found.append((result, loss, x.grad, [p.grad for p in module.parameters()]))
    return found


def encoder_layer(place, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 4, 12, batch_first=True, **options)
    return distributed_module(place, layer)


def native(program):
    """The same program, in which nothing may be replicated for want of a rule."""

    def run_native(place):
        if place.mesh is None:
            return program(place)
        with vd.explain() as report:
            result = program(place)
        assert not report.fallbacks, [str(record.op) for record in report.fallbacks]
        return result

    return run_native


def causal():
    return nn.Transformer.generate_square_subsequent_mask(3)


def of_both(place):
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 12, dropout=0.2, batch_first=True)
    distributed_module(place, model)
    masks = {"tgt_mask": causal(), "tgt_is_causal": True, "memory_key_padding_mask": LEFT_OUT}
    return trained(place, model, count=2, more=masks)


def stacked(place):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 4, 12, dropout=0.1, batch_first=True)
    model = distributed_module(place, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    return trained(place, model, more={"mask": causal(), "is_causal": True})


def evaluated(place):
    layer = encoder_layer(place).eval()
    x = place(SEQUENCE, Shard(0), Replicate())
    with torch.inference_mode():
        results = [layer(x), layer(x, src_key_padding_mask=LEFT_OUT)]
    with torch.no_grad():
        return [*results, layer(x, src_mask=causal())]


def heads_of_weights(place):
    torch.manual_seed(0)
    module = distributed_module(place, nn.MultiheadAttention(8, 4, dropout=0.3, batch_first=True))
    more = {"average_attn_weights": False, "key_padding_mask": LEFT_OUT}
    return trained(place, module, count=3, more=more)


def rows_of_packed_weights(place):
    torch.manual_seed(0)
    cuts = CUTS | {"in_proj_weight": Shard(0), "in_proj_bias": Shard(0)}
    module = distributed_module(place, nn.MultiheadAttention(8, 4, batch_first=True), cuts)
    return trained(place, module, count=3)


def widths_apart(place):
    torch.manual_seed(0)
    cuts = {"proj_weight": COLUMNS, "out_proj.weight": ROWS}
    module = nn.MultiheadAttention(8, 4, kdim=8, vdim=8, batch_first=True, add_bias_kv=True)
    module._qkv_same_embed_dim = False
    for name in "qkv":
        weight = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8).roll(ord(name)))
        module.register_parameter(f"{name}_proj_weight", weight)
    module.in_proj_weight = None
    return trained(place, distributed_module(place, module, cuts), count=3)


def recurrent(place, kind, **options):
    torch.manual_seed(0)
    module = kind(8, 4, num_layers=2, batch_first=True, dropout=0.5, **options)
    return trained(place, distributed_module(place, module, {}))


def stepped(place):
    torch.manual_seed(0)
    cell = distributed_module(place, nn.LSTMCell(8, 4), {})
    x = place(SEQUENCE[:, 0].contiguous(), Shard(0), Replicate(), grad=True)
    state = None
    for _ in range(3):
        state = cell(x, state)
    state[0].square().sum().backward()
    return state, x.grad, [p.grad for p in cell.parameters()]


PROGRAMS = {
    "encoder layer": lambda place: trained(place, encoder_layer(place, dropout=0.3)),
    "encoder layer, norm first": lambda place: trained(
        place,
        encoder_layer(place, norm_first=True, activation="gelu"),
        more={"src_key_padding_mask": LEFT_OUT},
    ),
    "encoder": stacked,
    "encoder and decoder": of_both,
    "evaluation": evaluated,
    "weights of attention": heads_of_weights,
    "rows of packed weights": rows_of_packed_weights,
    "weights apart": widths_apart,
    "lstm": lambda place: recurrent(place, nn.LSTM),
    "lstm, projected": lambda place: recurrent(place, nn.LSTM, bidirectional=True, proj_size=2),
    "gru": lambda place: recurrent(place, nn.GRU, bidirectional=True),
    "rnn": lambda place: recurrent(place, nn.RNN),
    "cells": stepped,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_modules_train_as_on_one_device(name):
    simulate(4)(lambda rank, world: check(native(PROGRAMS[name])))
