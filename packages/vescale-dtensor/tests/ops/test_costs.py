"""Ops that work along a sharded dim send what docs/operators.md says, and none takes the fallback.

The operand has 64 x 16 numbers of 8 bytes, in 4 pieces of 16 rows. To gather it a rank sends its
piece to 3 others.
"""

from __future__ import annotations

import pytest
import torch
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Shard, distribute_tensor, explain

ROWS, COLUMNS, NUMBER = 64, 16, 8
GATHERED = ROWS // 4 * COLUMNS * NUMBER * 3
ROW = COLUMNS * NUMBER * 3  # one row of results, to 3 others

FEW = 3 * 4 * NUMBER  # a few numbers, to 3 others
PLACES = torch.tensor([40, 3])


def assigned(x, index, value):
    """`x[index] = value`, on a copy."""
    copy = x.clone()
    copy[index] = value


# Op → at most so many bytes that one rank sends.
COSTS = {
    "cumsum": (lambda x: x.cumsum(0), ROW),
    "cumprod": (lambda x: x.cumprod(0), ROW),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), ROW),
    "cummax": (lambda x: x.cummax(0), 2 * ROW),
    "softmax": (lambda x: x.softmax(0), 2 * ROW),
    "log_softmax": (lambda x: x.log_softmax(0), 2 * ROW),
    "max": (lambda x: x.max(0), 2 * ROW),
    "amax": (lambda x: x.amax(0), ROW),
    "argmax": (lambda x: x.argmax(0), 2 * ROW),
    "logsumexp": (lambda x: x.logsumexp(0), ROW),
    "prod": (lambda x: x.prod(0), ROW),
    "norm": (lambda x: torch.linalg.vector_norm(x, 3, 0), ROW),
    "var": (lambda x: x.var(0), 2 * ROW),
    "topk": (lambda x: x.topk(3, 0), 2 * 3 * ROW),
    "any": (lambda x: (x > 2).any(0), ROW),
    "sort": (lambda x: x.sort(0), GATHERED // 4),
    "flip": (lambda x: x.flip(0), GATHERED // 4),
    "median": (lambda x: x.median(0), GATHERED // 4),
    "fft": (lambda x: torch.fft.rfft(x, dim=0), GATHERED // 4),
    "searchsorted": (lambda x: torch.searchsorted(x[:, 0] * 1, 0.5), 0),
    "index_add": (lambda x: x.index_add(0, torch.tensor([1]), torch.ones(1, COLUMNS).double()), 0),
    "scatter": (lambda x: x.scatter(0, torch.zeros(1, COLUMNS).long(), 1.0), 0),
    "index_put": (lambda x: x.index_put((PLACES,), torch.ones(2, COLUMNS).double()), 0),
    "assignment": (lambda x: assigned(x, PLACES, 2.0), 0),
    "masked assignment": (lambda x: assigned(x, x > 0.5, 2.0), 0),
    "put": (lambda x: x.put(PLACES, torch.ones(2).double(), accumulate=True), 0),
    "masked_scatter": (lambda x: x.masked_scatter(x > 9, torch.ones(1).double()), FEW),
    "unique": (lambda x: (x > 0.5).unique(return_inverse=True), FEW),
    "unique_consecutive": (lambda x: (x > -1).unique_consecutive(return_counts=True), FEW),
    "slice_scatter": (lambda x: x.slice_scatter(torch.ones(3, COLUMNS).double(), 0, 5, 8), 0),
    "abs_ of a partial sum": (lambda x: x.sum(0).abs_(), 2 * ROW),
    "einsum": (lambda x: torch.einsum("ij->ji", x), 0),
    "histc": (lambda x: x.histc(4, min=-1, max=1), 0),
    "count_nonzero": (lambda x: x.count_nonzero(0), 0),
    "inverse": (lambda x: torch.linalg.inv(x.view(ROWS, 4, 4)), 0),
}


def costs(rank, world_size):
    mesh = device_mesh((4,))
    torch.manual_seed(0)
    x = distribute_tensor(torch.rand(ROWS, COLUMNS, dtype=torch.float64), mesh, [Shard(0)])
    found = {}
    for name, (op, _) in COSTS.items():
        with explain() as report:
            op(x)
        found[name] = (report.bytes, [str(record.op) for record in report.fallbacks])
    return found


@pytest.fixture(scope="module")
def found():
    return run(costs, 4)


@pytest.mark.parametrize("name", COSTS)
def test_an_op_sends_what_is_said(found, name):
    for sent, fallbacks in (rank[name] for rank in found):
        assert not fallbacks
        assert sent <= COSTS[name][1]
        assert (sent == 0) == (COSTS[name][1] == 0)
