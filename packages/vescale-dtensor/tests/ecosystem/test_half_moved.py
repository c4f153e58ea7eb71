"""Scripts that use torch.distributed.tensor and this package together get the right thing, or an
error: placements that both have are one kind, others are refused, and no tensor is wrapped twice.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed.tensor as stock
import vescale_dtensor as vd
from on_mesh import on_mesh
from torch import nn
from torch.distributed.tensor import parallel
from torch.distributed.tensor.experimental import local_map
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import Partial, Replicate, Shard
from vescale_dtensor._layout.placements import StridedShard

PAIRS = [
    (Shard(0), stock.Shard(0)),
    (Shard(1), stock.Shard(1)),
    (Replicate(), stock.Replicate()),
    (Partial(), stock.Partial()),
    (Partial("max"), stock.Partial("max")),
    (Partial("prod"), stock.Partial("product")),
]
OURS_ALONE = [vd.InterleavedShard(0, 2), vd.RaggedShard((0,), (1, 3)), StridedShard(0, 2)]
WHOLE = torch.arange(8.0).reshape(4, 2)


def test_equal_to_torchs_exactly_where_both_mean_the_same():
    for (i, (ours, _)), (j, (own, theirs)) in itertools.product(enumerate(PAIRS), repeat=2):
        assert (ours == theirs) == (theirs == ours) == (ours == own) == (i == j)
        assert (ours != theirs) == (i != j)
        assert isinstance(ours, type(theirs)) == (type(PAIRS[i][1]) is type(theirs))
        if i == j:
            assert hash(ours) == hash(theirs)
    for alone, (ours, theirs) in itertools.product(OURS_ALONE, PAIRS):
        assert alone != ours
        assert alone != theirs


def test_placements_are_values_that_do_not_change():
    for ours, _ in PAIRS:
        assert copy.deepcopy(ours) == ours
        assert type(copy.deepcopy(ours)) is type(ours)
        for name in ("dim", "reduce_op", "other"):
            with pytest.raises(AttributeError):
                setattr(ours, name, 1)
    assert Shard(dim=2) == Shard(2)
    assert Shard(2) is Shard(2)


def test_only_an_even_split_is_a_shard():
    assert Shard(1).is_shard()
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    for placement in (*OURS_ALONE, Replicate(), Partial()):
        assert not placement.is_shard()
        assert not placement.is_shard(0)
    for placement in (*OURS_ALONE, Shard(0)):
        assert placement.is_sharded()
        assert placement.is_sharded(0)
        assert not placement.is_sharded(1)
    assert not Replicate().is_sharded()


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, stock.DTensor) else tensor


def _doubled(mesh, placement):
    run = local_map(
        lambda a: a * 2, out_placements=[placement], in_placements=([placement],), device_mesh=mesh
    )
    return run(stock.distribute_tensor(WHOLE, mesh, [placement]))


def _column(mesh, placement):
    torch.manual_seed(0)
    style = parallel.ColwiseParallel(output_layouts=placement)
    model = parallel.parallelize_module(nn.Sequential(nn.Linear(2, 4)), mesh, {"0": style})
    return model(WHOLE)


FUNCTIONS = {
    "zeros": lambda mesh, p: stock.zeros(4, 2, device_mesh=mesh, placements=[p]),
    "full": lambda mesh, p: stock.full((4, 2), 3.0, device_mesh=mesh, placements=[p]),
    "distribute_tensor": lambda mesh, p: stock.distribute_tensor(WHOLE, mesh, [p]),
    "from_local": lambda mesh, p: stock.DTensor.from_local(WHOLE, mesh, [p]),
    "redistribute": lambda mesh, p: stock.distribute_tensor(
        WHOLE, mesh, [stock.Replicate()]
    ).redistribute(mesh, [p]),
    "local_map": _doubled,
    "a parallel style": _column,
}
PLACED = [(Shard(0), stock.Shard(0)), (Shard(1), stock.Shard(1)), (Replicate(), stock.Replicate())]


@pytest.mark.parametrize("name", FUNCTIONS)
@on_ranks(2, simulated=True)
def test_torchs_functions_take_our_placements_as_their_own(name):
    mesh = device_mesh((2,))
    for ours, theirs in PLACED:
        found, wanted = (FUNCTIONS[name](mesh, p) for p in (ours, theirs))
        assert found.shape == wanted.shape
        assert torch.equal(_local(found), _local(wanted))


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "a parallel style"])
@on_ranks(2, simulated=True)
def test_torchs_functions_refuse_placements_that_torch_lacks(name):
    mesh = device_mesh((2,))
    for placement in OURS_ALONE:
        with pytest.raises(vd.UnsupportedError, match=r"torch\.distributed\.tensor was given"):
            FUNCTIONS[name](mesh, placement)


def _helpers(mesh):
    helper = stock._utils.compute_local_shape_and_global_offset
    for ours, theirs in PLACED:
        assert helper((4, 2), mesh, [ours]) == helper((4, 2), mesh, [theirs])
    for placement in OURS_ALONE:
        with pytest.raises(vd.UnsupportedError, match="would take for Replicate"):
            helper((4, 2), mesh, [placement])


def test_a_helper_of_torchs_that_answers_in_numbers():
    on_mesh((2,), _helpers)


def _wrapped_twice(mesh):
    theirs = stock.distribute_tensor(WHOLE, mesh, [stock.Shard(0)])
    ours = vd.distribute_tensor(WHOLE, mesh, [Shard(0)])
    for call in (
        lambda: vd.DTensor.from_local(theirs, mesh, [Shard(0)]),
        lambda: vd.distribute_tensor(theirs, mesh, [Shard(0)]),
        lambda: vd.DTensor.from_local(ours, mesh, [Shard(0)]),
    ):
        with pytest.raises(vd.LayoutError, match="needs a plain tensor"):
            call()
    for call in (lambda: ours + theirs, lambda: theirs + ours):
        with pytest.raises(RuntimeError, match="mixed"):
            call()


def test_no_tensor_is_wrapped_twice():
    on_mesh((2,), _wrapped_twice)
