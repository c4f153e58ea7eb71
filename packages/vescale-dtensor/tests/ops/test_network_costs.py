"""Losses of sharded classes, tables, bags, heads and sequences send what docs/operators.md says.

Forward and backward. None takes the fallback, and logits, tables and weights are never gathered.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import InterleavedShard, Replicate, Shard, distribute_tensor, explain

ROWS, CLASSES, NUMBER = 8, 512, 8
ROW_NUMBERS = ROWS * NUMBER * 6 // 4  # one number per row, added up over 4 ranks
TARGET = torch.arange(ROWS) * 50
SHARES = torch.linspace(0, 1, ROWS * CLASSES, dtype=torch.float64).reshape(ROWS, CLASSES)
WEIGHTS = torch.linspace(0, 1, CLASSES, dtype=torch.float64)
INDEX = torch.arange(12).reshape(4, 3) * 40
FEATURES = 12


def distributed(mesh, shape, placement):
    whole = torch.rand(shape, dtype=torch.float64)
    return distribute_tensor(whole, mesh, [placement], src_data_rank=None).requires_grad_()


def logits(mesh):
    return distributed(mesh, (ROWS, CLASSES), Shard(1))


def table(mesh, dim):
    return distributed(mesh, (CLASSES, FEATURES), Shard(dim))


def heads(mesh):
    weights = [
        distributed(mesh, (24, 8), InterleavedShard(0, 3)),
        distributed(mesh, (24,), InterleavedShard(0, 3)),
    ]
    x = distributed(mesh, (5, 2, 8), Replicate())
    out = distributed(mesh, (8, 8), Shard(1))
    options = (None, None, False, 0.1, out, None)
    found = F.multi_head_attention_forward(x, x, x, 8, 4, *weights, *options, need_weights=False)
    return found[0]


def sequences(mesh):
    x = distributed(mesh, (5, 8, 4), Shard(1))
    states = distributed(mesh, (1, 8, 3), Shard(1))
    weights = [distributed(mesh, shape, Replicate()) for shape in ((9, 4), (9, 3), (9,), (9,))]
    return torch.gru(x, states, weights, True, 1, 0.0, True, False, False)[0]


def smoothed(mesh):
    return F.cross_entropy(logits(mesh), TARGET, WEIGHTS, label_smoothing=0.1)


# What is done, forward → numbers per row that are added up, or bytes.
FORWARD = {
    "classes": (lambda mesh: F.cross_entropy(logits(mesh), TARGET), 2 * ROW_NUMBERS),
    "classes, weighted and smoothed": (smoothed, 4 * ROW_NUMBERS),
    "shares of classes": (lambda mesh: F.cross_entropy(logits(mesh), SHARES), 4 * ROW_NUMBERS),
    "likelihood": (lambda mesh: F.nll_loss(logits(mesh), TARGET), 0),
    "rows of a table": (lambda mesh: F.embedding(INDEX, table(mesh, 0), max_norm=1.0), 0),
    "columns of a table": (
        lambda mesh: F.embedding(INDEX, table(mesh, 1), max_norm=1.0),
        INDEX.numel() * NUMBER * 3,
    ),
    "bags of rows": (lambda mesh: F.embedding_bag(INDEX, table(mesh, 0)), 0),
    "heads": (heads, 0),
    "sequences": (sequences, 0),
}


def costs(rank, world_size):
    mesh = device_mesh((4,))
    torch.manual_seed(0)
    found = {}
    for name, (op, _) in FORWARD.items():
        with explain() as report:
            result = op(mesh)
            forward = report.bytes
            result.to_local().sum().backward()
        found[name] = forward, report.bytes - forward, [str(r.op) for r in report.fallbacks]
    return found


@pytest.fixture(scope="module")
def found():
    return run(costs, 4)


@pytest.mark.parametrize("name", FORWARD)
def test_what_is_sent(found, name):
    for forward, backward, fallbacks in (rank[name] for rank in found):
        assert not fallbacks
        assert forward <= FORWARD[name][1]
        assert (forward == 0) == (FORWARD[name][1] == 0)
        assert backward == 0
