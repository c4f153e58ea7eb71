"""What fails on one rank raises on all, and values that differ between ranks are named on all."""

import pytest
import torch
from vescale_comm import simulate
from vescale_comm.testing import Failed, outcomes, run
from vescale_parallel import TrainError
from vescale_parallel._common.agreement import checksum, require_same
from vescale_parallel._common.messages import numbers
from vescale_parallel.train.all_or_none import all_or_none


def read_something(rank: int, world_size: int, bad_rank: int) -> str:
    def action() -> str:
        if rank == bad_rank:
            raise FileNotFoundError(2, "No such file", "notes.txt")
        return f"rank {rank} read it"

    return all_or_none(action)


def hold_something(rank: int, world_size: int, bad_rank: int) -> None:
    held = {"same": "1", "weight": "3" if rank == bad_rank else "2"}
    compare({"value of": held}, world_size)


def compare(facts: dict[str, dict[str, str]], world_size: int) -> None:
    peers = range(world_size)
    require_same(facts, peers=peers, head="Differ:", advice={"value of": "Seed alike."})


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
        said = "Differ:\n  - value of 'weight': 2 on ranks 0, 1; 3 on rank 2\nSeed alike."
        assert one.message.endswith(said)


def test_alone_nothing_is_exchanged():
    assert all_or_none(lambda: 5) == 5
    with pytest.raises(TrainError, match="broken"):
        all_or_none(fail)
    compare({"value of": {"a": "1"}}, 1)


def fail() -> None:
    raise TrainError("broken")


def hold_other_names(rank: int, world_size: int) -> None:
    held = {f"tensor {index}": str(rank) for index in range(rank + 1)}
    compare({"value of": held}, world_size)


def test_lists_of_other_lengths_are_named_everywhere_and_messages_end():
    for one in simulate(6).outcomes(hold_other_names):
        assert one.type_name.rpartition(".")[2] == "DisagreementError"
        for part in (
            "value of 'tensor 0': 0 on rank 0; 1 on rank 1; 2 on rank 2; 3 on rank 3",
            "value of 'tensor 3': not there on ranks 0-2; 3 on rank 3",
            "value of: ranks 4, 5 not told",
        ):
            assert part in one.message


def hold_another_order(rank: int, world_size: int) -> None:
    names = ["a", "b"] if rank else ["b", "a"]
    compare({"value of": dict.fromkeys(names, "1")}, world_size)


def test_the_order_of_names_counts():
    for one in simulate(3).outcomes(hold_another_order):
        assert "value of: another order on rank 0" in one.message


def peers_side_by_side(rank: int, world_size: int, bad_rank: int) -> None:
    """Two teams of two, each of which holds something of its own."""
    team = rank // 2
    held = "wrong" if rank == bad_rank else str(team)
    peers = [2 * team, 2 * team + 1]
    advice = {"value of": "Seed alike."}
    require_same({"value of": {"x": held}}, peers=peers, head="Differ:", advice=advice)


def test_only_peers_must_agree_but_all_raise():
    simulate(4)(peers_side_by_side, -1)
    for one in simulate(4).outcomes(peers_side_by_side, 3):
        assert "value of 'x': 1 on rank 2; wrong on rank 3" in one.message


LISTED = [
    ([], ""),
    ([3], "3"),
    ([0, 1], "0, 1"),
    ([0, 1, 2, 5], "0-2, 5"),
    (list(range(0, 40, 2)), "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
]


@pytest.mark.parametrize(("numbers_", "text"), LISTED)
def test_ranks_are_listed_in_one_line(numbers_: list[int], text: str):
    assert numbers(numbers_) == text


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
