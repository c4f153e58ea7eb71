"""What fails on one rank raises on all, and values that differ between ranks are named on all."""

import pytest
import torch
from vescale_comm.testing import Failed, outcomes, run
from vescale_parallel import TrainError
from vescale_parallel._agreement import checksum, require_same
from vescale_parallel.train.all_or_none import all_or_none


def read_something(rank: int, world_size: int, bad_rank: int) -> str:
    def action() -> str:
        if rank == bad_rank:
            raise FileNotFoundError(2, "No such file", "notes.txt")
        return f"rank {rank} read it"

    return all_or_none(action)


def hold_something(rank: int, world_size: int, bad_rank: int) -> None:
    weight = torch.arange(6.0)
    if rank == bad_rank:
        weight[3] = -3.0
    require_same({"same": torch.ones(2), "weight": weight}, "cpu", "the values", "Seed alike.")


def test_everyone_gets_their_result():
    assert run(read_something, 3, -1) == [f"rank {rank} read it" for rank in range(3)]


def test_one_failure_is_everyones():
    results = outcomes(read_something, 3, 1)
    assert all(isinstance(one, Failed) for one in results)
    assert {one.type_name.rpartition(".")[2] for one in results} == {"TrainError"}
    assert all("notes.txt" in one.message for one in results)
    assert "rank 1 reports" in results[0].message


def test_same_values_pass_and_others_are_named_everywhere():
    run(hold_something, 3, -1)
    for one in outcomes(hold_something, 3, 2):
        assert one.type_name.rpartition(".")[2] == "DisagreementError"
        assert "'weight'; rank(s) [2] disagree with rank 0. Seed alike." in one.message
        assert "'same'" not in one.message


def test_alone_nothing_is_exchanged():
    assert all_or_none(lambda: 5) == 5
    with pytest.raises(TrainError, match="broken"):
        all_or_none(fail)
    require_same({"a": torch.ones(1)}, "cpu", "", "")


def fail() -> None:
    raise TrainError("broken")


def hold_another_shape(rank: int, world_size: int) -> None:
    held = {"tokens": torch.ones(rank + 1)}
    require_same(held | ({"more": torch.ones(1)} if rank else {}), "cpu", "the batches", "Alike.")


def test_other_shapes_and_numbers_of_tensors_are_named_everywhere():
    for rank, one in enumerate(outcomes(hold_another_shape, 2)):
        assert one.type_name.rpartition(".")[2] == "DisagreementError"
        assert f"rank {rank} has 'tokens ({rank + 1},) torch.float32'" in one.message


def test_checksums_see_order_and_every_bit():
    x = torch.arange(6, dtype=torch.float32).view(2, 3)
    others = [x.flip(0), -x, x.to(torch.float64)]
    assert len({checksum(one) for one in [x, *others]}) == 4
    assert checksum(x.t().contiguous().t()) == checksum(x)
    assert checksum(torch.ones(3, dtype=torch.bfloat16)) != checksum(torch.zeros(3).bfloat16())
