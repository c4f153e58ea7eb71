"""Ops along a sharded dim, and losses, tables, bags, heads and sequences, send what
docs/operators.md says. None takes the fallback, and logits, tables and weights are never gathered.

The operand has 64 x 16 numbers of 8 bytes, in 4 pieces of 16 rows. To gather it a rank sends its
piece to 3 others.
A tensor that only lends its shape is not read: nothing is sent, however it lies.
Batch normalisation communicates its statistics once, under each of torch's names for it.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from on_mesh import on_mesh
from vescale_comm import simulate, trace
from vescale_comm.testing import device_mesh, on_ranks, run
from vescale_dtensor import (
    InterleavedShard,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    explain,
    init_device_mesh,
)
from vescale_dtensor.debug import CommDebugMode

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
    "logcumsumexp": (lambda x: x.logcumsumexp(0), 2 * ROW),
    "cummax": (lambda x: x.cummax(0), 2 * ROW),
    "softmax": (lambda x: x.softmax(0), 2 * ROW),
    "log_softmax": (lambda x: x.log_softmax(0), 2 * ROW),
    "max": (lambda x: x.max(0), 2 * ROW),
    "amax": (lambda x: x.amax(0), ROW),
    "argmax": (lambda x: x.argmax(0), 2 * ROW),
    "logsumexp": (lambda x: x.logsumexp(0), 2 * ROW),
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


BATCH, CLASSES = 8, 512
ROW_SUMS = BATCH * NUMBER * 6 // 4  # one number per row, added up over 4 ranks
TARGET = torch.arange(BATCH) * 50
SHARES = torch.linspace(0, 1, BATCH * CLASSES, dtype=torch.float64).reshape(BATCH, CLASSES)
WEIGHTS = torch.linspace(0, 1, CLASSES, dtype=torch.float64)
INDEX = torch.arange(12).reshape(4, 3) * 40
FEATURES = 12


def distributed(mesh, shape, placement):
    whole = torch.rand(shape, dtype=torch.float64)
    return distribute_tensor(whole, mesh, [placement], src_data_rank=None).requires_grad_()


def logits(mesh):
    return distributed(mesh, (BATCH, CLASSES), Shard(1))


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
    "classes": (lambda mesh: F.cross_entropy(logits(mesh), TARGET), 2 * ROW_SUMS),
    "classes, weighted and smoothed": (smoothed, 4 * ROW_SUMS),
    "shares of classes": (lambda mesh: F.cross_entropy(logits(mesh), SHARES), 4 * ROW_SUMS),
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


def measured(work):
    """Bytes sent forward and backward, and what took the fallback."""
    with explain() as report:
        result = work()
        forward = report.bytes
        if getattr(result, "requires_grad", False):
            result.to_local().sum().backward()
    return forward, report.bytes - forward, [str(record.op) for record in report.fallbacks]


def costs(rank, world_size):
    mesh = device_mesh((4,))
    torch.manual_seed(0)
    x = distribute_tensor(torch.rand(ROWS, COLUMNS, dtype=torch.float64), mesh, [Shard(0)])
    found = {name: measured(lambda: op(x)) for name, (op, _) in COSTS.items()}  # noqa: B023
    return found | {name: measured(lambda: op(mesh)) for name, (op, _) in FORWARD.items()}  # noqa: B023


@pytest.fixture(scope="module")
def found():
    return run(costs, 4)


@pytest.mark.parametrize("name", [*COSTS, *FORWARD])
def test_an_op_sends_what_is_said(found, name):
    _, most = {**COSTS, **FORWARD}[name]
    for forward, backward, fallbacks in (rank[name] for rank in found):
        assert not fallbacks
        assert forward <= most
        assert (forward == 0) == (most == 0)
        assert backward == 0


WHOLE = torch.arange(24.0).reshape(6, 4)
LENDING = {
    "view_as": lambda x, y: x.view_as(y),
    "reshape_as": lambda x, y: x.reshape_as(y),
    "expand_as": lambda x, y: x.expand_as(y),
    "type_as": lambda x, y: x.type_as(y),
    "empty_like": lambda x, y: x if torch.empty_like(y).shape == x.shape else None,
}


@pytest.mark.parametrize("name", LENDING)
def test_nothing_is_sent(name):
    def ours(mesh):
        for placement in (Shard(0), Shard(1), Replicate(), Partial()):
            local = vd.distribute_tensor(WHOLE * 2, mesh, [Replicate()]).to_local()
            shape = (6, 4)
            lender = (
                vd.DTensor.from_local(local, mesh, [placement], shape=shape)
                if isinstance(placement, Partial)
                else vd.distribute_tensor(WHOLE * 2, mesh, [placement])
            )
            x = vd.distribute_tensor(WHOLE, mesh, [Shard(0)]).requires_grad_()
            for _ in range(2):  # the second call is compiled
                with CommDebugMode() as sent:
                    result = LENDING[name](x, lender)
                assert not sent.get_total_counts()
                assert result.placements == (Shard(0),)
                assert torch.equal(result.full_tensor(), WHOLE)
            (result * result).sum().backward()
            assert torch.equal(x.grad.full_tensor(), WHOLE * 2)

    on_mesh((2,), ours)


def test_plain_tensors_beside_dtensors():
    """A plain tensor that borrows the shape of a DTensor, and one that lends its own."""

    def ours(mesh):
        lender = vd.distribute_tensor(WHOLE, mesh, [Shard(0)])
        assert torch.equal((WHOLE.view(4, 6).view_as(lender) * lender).full_tensor(), WHOLE * WHOLE)
        assert torch.equal(lender.view_as(WHOLE).full_tensor(), WHOLE)
        with pytest.raises(RuntimeError):
            lender.view_as(torch.zeros(5))

    on_mesh((2,), ours)


IMAGES = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(0))
NATIVE = {
    "native_batch_norm": lambda x, m, v: torch.native_batch_norm(
        x, None, None, m, v, True, 0.1, 1e-5
    ),
    "_native_batch_norm_legit": lambda x, m, v: torch._native_batch_norm_legit(
        x, None, None, m, v, True, 0.1, 1e-5
    ),
    "_batch_norm_with_update": lambda x, m, v: torch.ops.aten._batch_norm_with_update(
        x, None, None, m, v, 0.1, 1e-5
    ),
}


@pytest.mark.parametrize("name", NATIVE)
def test_statistics_are_sent_once(name):
    expected = NATIVE[name](IMAGES, torch.zeros(3), torch.ones(3))

    def measure(rank, world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        x = distribute_tensor(IMAGES, mesh, [Shard(0)])
        with trace() as functional:
            F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True)
        with trace() as native:
            found = NATIVE[name](x, torch.zeros(3), torch.ones(3))
        for ours, theirs in zip(found[:3], expected[:3], strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)
        return functional.counts(), native.counts()

    for functional, native in simulate(2)(measure):
        assert functional == native
        assert functional


def test_one_value_per_channel_is_no_error_where_torch_has_none():
    one = IMAGES[:1, :, :1, :1]
    expected = torch.native_batch_norm(one, None, None, None, None, True, 0.1, 1e-5)

    def run(rank, world_size):
        x = distribute_tensor(one, init_device_mesh("cpu", (world_size,)), [Shard(1)])
        found = torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)

    simulate(2)(run)


@on_ranks(2, simulated=True)
def test_the_rows_of_the_global_batch_are_counted(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    x = torch.randn(2, 3, 1, generator=torch.Generator().manual_seed(0))
    d = distribute_tensor(x, mesh, [Shard(0)])
    assert torch.equal(F.group_norm(d, 3).full_tensor(), F.group_norm(x, 3))
    for one in (x[:1], d[:1]):
        with pytest.raises(ValueError, match=r"more than 1 value per channel .* \[1, 3, 1\]"):
            F.group_norm(one, 3)
