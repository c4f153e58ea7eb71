"""What each rank tells is heard by every rank, and what differs is named on every rank."""

import os
import random

import pytest
import torch
import torch.distributed as dist
from vescale_comm import agreement, group_of, recv, send, simulate, trace, unwaited
from vescale_comm._watchdog.comparison import Comparison
from vescale_comm.testing import WorkerError, device_mesh, outcomes, run

# Nothing, what goes along with its length, what does not, what is not ASCII, and the name of a file
# that is no UTF-8, as Python has it.
TEXTS = ["", "short", "caf\udce9", "".join(map(chr, range(0x100, 0x900))), "x" * 100_000]
LONG = [random.Random(rank).randbytes(2000).hex() for rank in range(3)]


def exchanged(rank, world_size):
    with trace() as sent:
        numbers = agreement.gather_numbers([rank, -(2**62), 2**63 - 1 - rank])
        texts = [agreement.gather_texts(text if rank else "") for text in TEXTS]
        long = agreement.gather_texts(LONG[rank])
        heard = [agreement.broadcast_text(f"{rank}" * size, 1) for size in (0, 1, 5000)]
        assert agreement.broadcast_text(TEXTS[2], 1) == TEXTS[2]
        assert agreement.digest(TEXTS[2]) == agreement.digest("caf\udce9")
    return numbers, texts, long, heard, sent.counts()


def expected(world_size):
    numbers = [(rank, -(2**62), 2**63 - 1 - rank) for rank in range(world_size)]
    texts = [["", *[text] * (world_size - 1)] for text in TEXTS]
    return numbers, texts, LONG[:world_size], ["", "1", "1" * 5000], {}


def test_every_rank_hears_every_rank():
    assert run(exchanged, 3) == [expected(3)] * 3


def test_in_simulated_worlds_too():
    assert simulate(3).run(exchanged) == [expected(3)] * 3


def counted(rank, world_size):
    calls = []
    original = dist.all_gather
    dist.all_gather = lambda out, own, group=None: (
        calls.append(own.numel() * own.element_size()),
        original(out, own, group=group),
    )
    try:
        agreement.gather_texts("")
        agreement.gather_texts("fits")
        agreement.gather_texts(LONG[rank])
    finally:
        dist.all_gather = original
    return calls


def test_what_is_short_takes_one_collective():
    first, second, third, fourth = run(counted, 2)[0]
    assert (first, second, third) == (512, 512, 512)
    assert fourth > 512


def started(rank, world_size):
    # In the order in which they were started, however they are waited for; on rank 1 at once.
    if rank == 1:
        return [agreement.gather_numbers([rank, number]) for number in range(3)]
    handles = [agreement.gather_numbers([rank, number], async_op=True) for number in range(3)]
    between = unwaited()
    found = [one.wait() for one in reversed(handles)][::-1]
    assert len(between) == 3
    assert not unwaited()
    return found


def test_numbers_may_be_waited_for_later():
    rows = [[(rank, number) for rank in range(3)] for number in range(3)]
    assert run(started, 3) == [rows] * 3
    assert simulate(3).run(started) == [rows] * 3
    assert agreement.gather_numbers([3, 4], async_op=True).wait() == [(3, 4)]


def begun_before_a_message(rank, world_size):
    """Rank 1 begins once it has heard of rank 0, which has begun and goes on."""
    met = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comparison, "meet", lambda *_: met.append("waited until all had come"))
        if rank == 1:
            recv(torch.empty(1), source=0)
        handle = agreement.gather_numbers([rank], async_op=True)
        if rank == 0:
            send(torch.ones(1), target=1)
        return handle.wait(), met


def test_numbers_are_begun_before_the_others_come():
    assert run(begun_before_a_message, 2) == [([(0,), (1,)], [])] * 2


def ends_before(rank, world_size):
    if rank == 1:
        os._exit(0)
    agreement.gather_numbers([rank], async_op=True).wait()


def test_who_waits_later_hears_of_a_member_that_ended():
    with pytest.raises(WorkerError, match=r"RankFailedError: all_gather of torch\.int64"):
        run(ends_before, 2, timeout=60)


def failures(rank, world_size, bad):
    failure = FileNotFoundError(2, "No such file", "notes.txt") if rank in bad else None
    agreement.require_success(failure)


def test_one_failure_is_everyones():
    run(failures, 3, ())
    own, others, _ = outcomes(failures, 3, (0, 2))
    assert own.type_name.endswith("FileNotFoundError")
    words = "FileNotFoundError: [Errno 2] No such file: 'notes.txt'"
    assert others.type_name.endswith("CommError")
    assert others.message.endswith(f"ranks 0, 2: {words}")


def in_groups(rank, world_size):
    mesh = device_mesh((2, 2), ("a", "b"))
    return [agreement.gather_numbers([rank], group_of(mesh, axis)) for axis in ("a", "b")]


def test_a_group_hears_its_members_only():
    assert run(in_groups, 4)[1] == [[(1,), (3,)], [(0,), (1,)]]
    assert run(in_groups, 4)[2] == [[(0,), (2,)], [(2,), (3,)]]


def test_alone_nothing_is_sent():
    assert not agreement.several_ranks()
    assert agreement.gather_numbers([3, 4]) == [(3, 4)]
    assert agreement.gather_texts("mine") == ["mine"]
    assert agreement.broadcast_text("mine", 0) == "mine"
    agreement.require_success(None)
    with pytest.raises(ValueError, match="no"):
        agreement.require_success(ValueError("no"))
    compare({"a": "1"})
    with pytest.raises(ValueError, match="mine"):
        compare({}, problem=ValueError("mine"))


def device(rank, world_size):
    return agreement.several_ranks(), agreement.message_device()


def test_numbers_are_sent_from_the_host_where_they_can():
    assert run(device, 2) == [(True, "cpu")] * 2


def compare(section, peers=(), problem=None):
    advice = {"value of": "Seed alike."}
    facts = agreement.Facts({"value of": section}, "Differ:", advice)
    agreement.require_same(facts, peers=peers, problem=problem)


def hold_something(rank, world_size, bad_rank):
    compare({"same": "1", "weight": "3" if rank == bad_rank else "2"})


def test_same_values_pass_and_others_are_named_everywhere():
    run(hold_something, 3, -1)
    for one in outcomes(hold_something, 3, 2):
        assert one.type_name.endswith("CommMismatchError")
        said = "Differ:\n  - value of 'weight': 2 on ranks 0, 1; 3 on rank 2\nSeed alike."
        assert one.message.endswith(said)


def hold_other_names(rank, world_size):
    compare({f"tensor {index}": str(rank) for index in range(rank + 1)})


def test_lists_of_other_lengths_are_named_everywhere_and_messages_end():
    for one in simulate(6).outcomes(hold_other_names):
        assert one.type_name.endswith("CommMismatchError")
        for part in (
            "value of 'tensor 0': 0 on rank 0; 1 on rank 1; 2 on rank 2; 3 on rank 3",
            "value of 'tensor 3': not there on ranks 0-2; 3 on rank 3",
            "value of: ranks 4, 5 not told",
        ):
            assert part in one.message


def hold_another_order(rank, world_size):
    compare(dict.fromkeys(["a", "b"] if rank else ["b", "a"], "1"))


def test_the_order_of_names_counts():
    for one in simulate(3).outcomes(hold_another_order):
        assert "value of: another order on rank 0" in one.message


def peers_side_by_side(rank, world_size, bad_rank):
    """Two teams of two, each of which holds something of its own."""
    team = rank // 2
    held = "wrong" if rank == bad_rank else str(team)
    compare({"x": held}, peers=[2 * team, 2 * team + 1])


def test_only_peers_must_agree_but_all_raise():
    simulate(4)(peers_side_by_side, -1)
    for one in simulate(4).outcomes(peers_side_by_side, 3):
        assert "value of 'x': 1 on rank 2; wrong on rank 3" in one.message


def with_a_problem(rank, world_size, bad):
    compare({"x": "y" * 300}, problem=ValueError("no such thing") if rank in bad else None)


def test_a_problem_of_one_rank_is_told_and_that_of_all_is_raised():
    for one in simulate(3).outcomes(with_a_problem, {1}):
        assert "ValueError': not there on ranks 0, 2; no such thing on rank 1" in one.message
        assert one.message.endswith("Mend that, on all ranks alike.")
    assert {one.type_name for one in simulate(3).outcomes(with_a_problem, {0, 1, 2})} == {
        "ValueError"
    }


def begun(rank, world_size, bad_rank):
    facts = agreement.Facts({"x": {"y": str(rank == bad_rank)}}, "Differ:", "Mend it.")
    return agreement.start_same(facts, told=rank)()


def told(rank, world_size, bad_rank):
    """What all have told each other by themselves."""
    held = [{"x": {"y": "z" * 300 + str(one == bad_rank)}} for one in range(world_size)]
    agreement.require_alike(agreement.Facts(held[rank], "Differ:", "Mend it."), held)


def test_what_is_begun_or_was_told_is_compared_alike():
    assert run(begun, 3, -1) == [[0, 1, 2]] * 3
    assert "y': False on ranks 0, 2; True on rank 1" in simulate(3).outcomes(begun, 1)[0].message
    simulate(3)(told, -1)
    (said,) = {one.message for one in simulate(3).outcomes(told, 1)}
    assert "z… (305 characters, digest" in said
    assert "on ranks 0, 2; " in said


def test_who_says_what():
    assert agreement.by_ranks(["a", "b", "a", "a"], [3, 1, 2, 4]) == "ranks 2-4: a; rank 1: b"
    assert agreement.named([7]) == "rank 7"
    assert agreement.named([0, 1, 2, 3, 5, 7, 8]) == "ranks 0-3, 5, 7, 8"
    assert agreement.named(range(0, 1000, 2)).endswith(", 28, 30 and 484 more")


def test_a_digest_is_the_same_in_every_process():
    assert agreement.digest("ü" * 1000) == 0xF35FDD71A9B33B
    assert 0 <= agreement.digest("") < 2**56
