"""Property: ranks whose generators differ are named, on every rank; others pass in silence."""

import pytest
import torch
import torch.distributed as dist
from vescale_rng import StateError, check_in_step


def test_one_process_agrees_with_itself():
    check_in_step()
    check_in_step(torch.Generator().manual_seed(3))


def refusal(generator=None, group=None):
    try:
        check_in_step(generator, group)
    except StateError as error:
        return str(error)
    return None


def compare(rank, world_size):
    found = []
    torch.manual_seed(5)
    found.append(refusal())
    torch.manual_seed(5 + (rank == 2))
    found.append(refusal())
    pair = dist.new_group([0, 1])
    if rank < 2:
        found.append(refusal(group=pair))
    torch.manual_seed(5)
    torch.rand(10 * (rank == 1))
    found.append(refusal())
    own = torch.Generator().manual_seed(1)
    torch.empty(1 + (rank == 0), dtype=torch.float32).normal_(generator=own)
    found.append(refusal(own))
    return found


def test_ranks_that_differ_are_named_on_every_rank():
    testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")
    answers = testing.run(compare, 3)
    for rank, found in enumerate(answers):
        same, seeds, *inside, places, cached = found
        assert same is None
        assert inside == ([None] if rank < 2 else [])
        assert "differ in their seed" in seeds
        assert "ranks 0, 1: seed 5" in seeds
        assert "rank 2: seed 6" in seeds
        assert "differ in their place" in places
        assert "rank 1: seed 5, word 10" in places
        assert "differ in their cached normal" in cached
        assert "ranks 1, 2" in cached
