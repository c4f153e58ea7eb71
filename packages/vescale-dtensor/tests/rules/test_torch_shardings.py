"""Rules written for torch's DTensor serve ours, and are refused where they do not fit."""

import pytest
import torch
import vescale_dtensor as vd
from taught_rules import COLUMNS, ROWS, gate, gate_backward, on_two_ranks, twice, unfaked
from torch.distributed import tensor as torch_dtensor
from vescale_dtensor import Replicate, Shard
from vescale_dtensor.rules import RuleError, check_rule, register_sharding


def test_rules_that_were_written_for_torch_are_taken():
    @register_sharding([gate_backward])
    def shardings(g, x, w):
        assert g.ndim == 2
        rows = torch_dtensor.Shard(0), torch_dtensor.Replicate(), torch_dtensor.Partial()
        return [
            ([rows[0], rows[2]], [rows[0], rows[0], rows[1]]),
            ([Shard(-1), Shard(0)], [Shard(1), Shard(1), Shard(-1)]),
        ]

    g = torch.linspace(-1, 1, 20).reshape(5, 4)
    report = check_rule(gate_backward, [(g, ROWS, COLUMNS)], gradients=False, most=8)
    assert report.fallbacks == 0
    assert report.sharded > 12


@pytest.mark.parametrize("rows", [5, 8])
def test_shardings_of_dims_with_different_extents_serve_where_shards_correspond(rows):
    @register_sharding(twice)
    def shardings(x):
        return [([Shard(0)], [Shard(0)]), ([Shard(1)], [Shard(1)])]

    x = torch.linspace(0, 1, rows * 4).reshape(rows, 4)
    report = check_rule(twice, [x], gradients=False)
    by_rows = [
        outcome.sharded
        for outcome in report.outcomes
        if all(p == Shard(0) for p in outcome.trial.placements[0])
    ]
    assert by_rows == [rows == 8] * 2


LISTS = {
    "no pairs": ([[Shard(0)]], "expected pairs"),
    "too few": ([([Shard(0)], [Shard(0)])], "has placements for 1 and 1"),
    "no such dim": ([([Shard(5)], [Replicate(), Replicate()])], r"Shard\(dim=5\)|Shard\(5\)"),
    "another placement": ([([vd.InterleavedShard(0, 2)], [Replicate()] * 2)], "is not one of"),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_shardings_that_do_not_fit_are_refused(name):
    listed, words = LISTS[name]
    register_sharding(gate)(lambda x, w: listed)
    with pytest.raises(Exception, match=words) as caught:
        on_two_ranks(lambda x: gate(x, COLUMNS))
    assert isinstance(caught.value.__cause__, RuleError)


def test_an_operator_without_a_fake_says_that_it_needs_one():
    register_sharding(unfaked)(lambda x: [([Shard(0)], [Shard(0)])])
    with pytest.raises(Exception, match="register_fake"):
        on_two_ranks(unfaked)
