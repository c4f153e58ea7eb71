"""What fails on one rank raises on all; checksums see what ranks may differ in."""

import pytest
import torch
from vescale_comm.testing import Failed, outcomes, run
from vescale_parallel import TrainError
from vescale_parallel._common.checksums import checksum
from vescale_parallel.train.all_or_none import all_or_none


def read_something(rank: int, world_size: int, bad_rank: int) -> str:
    def action() -> str:
        if rank == bad_rank:
            raise FileNotFoundError(2, "No such file", "notes.txt")
        return f"rank {rank} read it"

    return all_or_none(action)


def test_everyone_gets_their_result():
    assert run(read_something, 3, -1) == [f"rank {rank} read it" for rank in range(3)]


def test_one_failure_is_everyones():
    results = outcomes(read_something, 3, 1)
    assert all(isinstance(one, Failed) for one in results)
    assert {one.type_name.rpartition(".")[2] for one in results} == {"TrainError"}
    assert all("notes.txt" in one.message for one in results)
    assert "rank 1: " in results[0].message


def test_alone_nothing_is_exchanged():
    assert all_or_none(lambda: 5) == 5
    with pytest.raises(TrainError, match="broken"):
        all_or_none(fail)


def fail() -> None:
    raise TrainError("broken")


def test_checksums_see_order_and_every_bit():
    x = torch.arange(6, dtype=torch.float32).view(2, 3)
    others = [x.flip(0), -x, x.to(torch.float64)]
    assert len({checksum(one) for one in [x, *others]}) == 4
    assert checksum(x.t().contiguous().t()) == checksum(x)
    assert checksum(x.to_sparse()) == checksum(x)
    assert checksum(torch.tensor([1 + 2j]).conj()) == checksum(torch.tensor([1 - 2j]))
    assert checksum(torch.ones(0)) == checksum(torch.ones(0, 3))
    assert checksum(torch.ones(2)[::2]) == checksum(torch.ones(1))
    assert checksum(torch.ones(3, dtype=torch.bfloat16)) != checksum(torch.zeros(3).bfloat16())
