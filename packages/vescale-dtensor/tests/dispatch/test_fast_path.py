"""A call that took the long road once is answered alike by the short one, also when watched."""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from vescale_comm.testing import device_mesh, on_ranks, run
from vescale_dtensor import Partial, Replicate, Shard
from vescale_dtensor._fast_path import lookup


def a_plain_operand_before_a_sharded_one(rank, world_size):
    mesh = device_mesh((4,))
    index, table = torch.tensor([[0, 5, 2], [6, 6, 1]]), torch.randn(7, 3)
    wanted = F.embedding(index, table)
    cut = vd.distribute_tensor(table, mesh, [Shard(0)])
    for _ in range(5):  # a plain operand is compared at first; then the call is remembered
        assert torch.equal(F.embedding(index, cut).full_tensor(), wanted)


def twice(x):
    """A partial sum that is used by itself after its total was needed."""
    total = x.relu()
    return total + x * 2


def what_is_observed_is_what_runs(rank, world_size):
    mesh = device_mesh((4,))
    leaf = torch.ones(3, requires_grad=True)

    def partial():
        return vd.DTensor.from_local(leaf * 1, mesh, [Partial()])

    plain = [twice(partial()) for _ in range(3)][-1]
    with vd.explain() as report:
        seen = twice(partial())
    assert seen.placements == plain.placements == (Replicate(),)
    assert [bool(record.bytes) for record in report.records if record.op != "redistribute"] == [
        True,
        False,
        False,
    ]


def a_plain_tensor_that_is_indexed_and_a_tuple_of_one(rank, world_size):
    mesh = device_mesh((4,))
    table, index = torch.randn(7, 3), torch.tensor([6, 0, 2, 6, 1])
    cut = vd.distribute_tensor(index, mesh, [Shard(0)])
    row = vd.distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    for _ in range(5):
        assert torch.equal(table[cut].full_tensor(), table[index])
        # What is moved first, and comes back as a tuple of one.
        (slope,) = torch.gradient(row, spacing=0.5)
        assert torch.equal(slope.full_tensor(), torch.full((6,), 2.0))


def a_plain_tensor_whose_size_is_that_of_a_mesh(rank, world_size):
    mesh = device_mesh((4,))
    table = torch.arange(15.0).reshape(5, 3)
    count = vd.distribute_tensor(torch.tensor(2), mesh, [Replicate()])
    for _ in range(3):
        assert torch.equal(table.narrow(0, count, 2), table.narrow(0, 2, 2))
        assert len(torch.tensor_split(table, count)) == 2
        with vd.explain():
            assert torch.equal(torch.narrow(table, 0, count, 2), table[2:4])


FOUR_RANKS = (
    a_plain_operand_before_a_sharded_one,
    what_is_observed_is_what_runs,
    a_plain_tensor_that_is_indexed_and_a_tuple_of_one,
    a_plain_tensor_whose_size_is_that_of_a_mesh,
)


@pytest.mark.parametrize("program", FOUR_RANKS)
def test_four_ranks(program):
    run(program, 4)


@on_ranks(1)
def test_a_layer_without_bias_is_looked_up_without_grad():
    mesh = device_mesh((1,))
    weight = vd.distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
    x, other = (vd.distribute_tensor(torch.randn(n, 4), mesh, [Replicate()]) for n in (3, 2))
    walked = []
    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        for _ in range(3):
            expected = F.linear(x, weight, None)
        patched.setattr(lookup, "_general_call", lambda func, *_: walked.append(func))
        found = F.linear(x, weight, None)
        assert walked == []
        F.linear(other, weight, None)
        assert walked == [F.linear]
    assert torch.equal(found.to_local(), expected.to_local())
