"""Where `to_local()` gives another part than torch's would, and only there, it is told, once."""

import logging

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch.distributed import tensor as stock
from torch.distributed.tensor import experimental as stock_experimental
from vescale_comm import trace
from vescale_comm.testing import on_ranks, run
from vescale_dtensor import Partial, Replicate, Shard, debug

WHOLE = torch.arange(24.0).reshape(4, 6) / 7
# Name -> call, the layout of its operand, and whether torch's result lies otherwise.
CALLS = {
    "softmax of rows": (lambda x: torch.softmax(x, 1), Shard(0), False),
    "softmax along shards": (lambda x: torch.softmax(x, 1), Shard(1), True),
    "what follows from it": (lambda x: torch.softmax(x, 1) * 2 + 1, Shard(1), True),
    "a slice of shards": (lambda x: x[1:3], Shard(0), True),
    "a slice of another dim": (lambda x: x[:, 1:3], Shard(0), False),
    "running sums along shards": (lambda x: x.cumsum(0), Shard(0), True),
    "products": (lambda x: x @ x.T, Shard(0), False),
    "sums": (lambda x: x.sum(0), Shard(0), False),
    "plain operands": (lambda x: x + torch.ones(6), Shard(0), False),
    "replicated": (lambda x: torch.softmax(x, 1), Replicate(), False),
}


@on_ranks(2)
def test_each_difference_is_told_once(rank, world_size):
    mesh = vd.init_device_mesh("cpu", (world_size,))
    state = torch.get_rng_state()
    for name, (call, placement, differs) in CALLS.items():
        x = vd.distribute_tensor(WHOLE, mesh, [placement], src_data_rank=None)
        with trace() as plain:
            expected = call(x)
        with debug.layout_differences() as found, trace() as traced:
            for _ in range(2):
                result = call(x)
                result.to_local()  # told here
            assert torch.equal(result.to_local(), expected.to_local())
            result.redistribute(placements=[Replicate()]).to_local()
        assert len(found) == (2 if differs else 0), (name, found)
        assert sum(traced.counts().values()) <= 2 * sum(plain.counts().values()) + 1, name
        if not name.startswith("plain"):
            theirs = call(stock.distribute_tensor(WHOLE, mesh, [placement]))
            assert (tuple(theirs.placements) != tuple(result.placements)) == differs, name
            if differs:
                assert f"torch's would be {list(theirs.placements)}" in found[0], found
                assert "test_torch_layouts.py" in found[0]
    assert torch.equal(torch.get_rng_state(), state)
    # Nothing is told outside, and what torch cannot do is not compared.
    with debug.layout_differences() as found:
        F.dropout(x, 0.5)
        flat = vd.distribute_tensor(WHOLE, mesh, [vd.InterleavedShard(1, 3)], src_data_rank=None)
        (flat * 2).to_local()
    torch.softmax(vd.distribute_tensor(WHOLE, mesh, [Shard(1)]), 1).to_local()
    assert found == []


def logged(rank, world_size):
    mesh = vd.init_device_mesh("cpu", (world_size,))
    x = vd.distribute_tensor(WHOLE, mesh, [Shard(1)], src_data_rank=None)
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("vescale_dtensor").addHandler(handler)
    try:
        with debug.layout_differences() as found:
            torch.softmax(x, 1).to_local()
    finally:
        logging.getLogger("vescale_dtensor").removeHandler(handler)
    return told, found


@pytest.mark.smoke
def test_it_is_a_warning_of_the_packages_logger():
    for told, found in run(logged, 2):
        assert told == found
        assert len(told) == 1
        assert "torch.softmax at" in told[0]
        assert "x.redistribute(placements=[Replicate()])" in told[0]


INDICES, TARGETS = torch.tensor([1, 2]), torch.tensor([1, 2, 0, 5])
# Rows of the table in docs/from-torch.md: call, layout of the operand, layout here, in torch.
TABLE = {
    "softmax": (lambda x: x.softmax(1), Shard(1), Shard(1), Replicate()),
    "cumsum": (lambda x: x.cumsum(0), Shard(0), Shard(0), Replicate()),
    "slice": (lambda x: x[1:3], Shard(0), Shard(0), Replicate()),
    "select": (lambda x: x[1], Shard(0), vd.RaggedShard((0,), (1, 0)), Replicate()),
    "indices": (lambda x: x[INDICES], Shard(0), Partial(), Replicate()),
    "index_select": (lambda x: x.index_select(0, INDICES), Shard(0), Partial(), Replicate()),
    "sort": (lambda x: x.sort(0)[0], Shard(0), Shard(1), Replicate()),
    "topk": (lambda x: x.topk(2, 0)[0], Shard(0), Shard(1), Replicate()),
    "roll": (lambda x: x.roll(1, 0), Shard(0), Shard(1), Replicate()),
    "amax": (lambda x: x.amax(0), Shard(0), Replicate(), Partial("max")),
    "mean": (lambda x: x.mean(0), Shard(0), Partial(), Partial("avg")),
    "mse_loss": (lambda x: F.mse_loss(x, x * 2), Shard(0), Partial(), Partial("avg")),
    "batch": (lambda x: F.cross_entropy(x, TARGETS), Shard(0), Partial(), Partial("avg")),
    "classes": (lambda x: F.cross_entropy(x, TARGETS), Shard(1), Partial(), Replicate()),
}


def gradients_of(library, mesh):
    """Layouts of gradients of a sharded weight and a replicated bias, with a sharded batch."""
    x = library.distribute_tensor(WHOLE, mesh, [library.Shard(0)])
    weight = library.distribute_tensor(torch.ones(3, 6), mesh, [library.Shard(0)])
    weight.requires_grad_()
    bias = library.distribute_tensor(torch.ones(3), mesh, [library.Replicate()]).requires_grad_()
    F.linear(x, weight).sum().backward()
    wide = library.distribute_tensor(torch.ones(3, 6), mesh, [library.Replicate()])
    F.linear(x, wide, bias).sum().backward()
    return weight.grad.placements, bias.grad.placements


@pytest.mark.skipif("2.13" not in torch.__version__, reason="the guide's table is of torch 2.13")
@on_ranks(2)
def test_the_table_of_what_lies_otherwise(rank, world_size):
    mesh = vd.init_device_mesh("cpu", (world_size,))
    for name, (call, placement, here, there) in TABLE.items():
        found = call(vd.distribute_tensor(WHOLE, mesh, [placement])).placements
        assert found == (here,), (name, found)
        with stock_experimental.implicit_replication():
            theirs = tuple(call(stock.distribute_tensor(WHOLE, mesh, [placement])).placements)
        assert theirs == (there,), (name, theirs)
    assert gradients_of(vd, mesh) == ((Shard(0),), (Partial(),))
    assert gradients_of(stock, mesh) == ((stock.Partial(),), (stock.Replicate(),))
