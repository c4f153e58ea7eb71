"""What fails on one rank raises on all, and values that differ between ranks are named on all."""

import pytest
import torch
from vescale_comm.testing import Failed, outcomes, run
from vescale_parallel import DisagreementError, TrainError
from vescale_parallel._agree import checksum, require_same, together


def read_something(rank: int, world_size: int, bad_rank: int) -> str:
    def action() -> str:
        if rank == bad_rank:
            raise FileNotFoundError(2, "No such file", "notes.txt")
        return f"rank {rank} read it"

    return together(action)


def hold_something(rank: int, world_size: int, bad_rank: int) -> None:
    weight = torch.arange(6.0)
    if rank == bad_rank:
        weight[3] = -3.0
    require_same({"same": torch.ones(2), "weight": weight}, "the values", "Seed alike.")


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
    assert together(lambda: 5) == 5
    with pytest.raises(TrainError, match="broken"):
        together(fail)
    require_same({"a": torch.ones(1)}, "", "")
    assert issubclass(DisagreementError, Exception)


def fail() -> None:
    raise TrainError("broken")


def test_checksums_see_dtype_shape_order_and_every_bit():
    x = torch.arange(6, dtype=torch.float32).view(2, 3)
    others = [x.view(3, 2), x.to(torch.float64), x.clone().view(-1).flip(0).view(2, 3), -x]
    assert len({checksum(one) for one in [x, *others]}) == 5
    assert checksum(x.t().contiguous().t()) == checksum(x)
    assert checksum(torch.empty(0)) != checksum(torch.empty(0, 2))
    checksum(torch.ones(3, dtype=torch.bfloat16))
