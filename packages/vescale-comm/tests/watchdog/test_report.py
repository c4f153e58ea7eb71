"""A report names the cause first, and says once what many ranks do."""

from vescale_comm._watchdog.channel import Answer, Ending
from vescale_comm._watchdog.report import WorldState, missing, report

WAITS = Answer("waiting in all_reduce, at train.py:3 in step", "all_reduce", (0, 1, 2, 3))
ELSEWHERE = Answer("at train.py:9 in evaluate")


def test_ranks_that_do_the_same_share_a_line_and_the_missing_one_comes_first():
    state = WorldState(4, {0: ELSEWHERE, 1: WAITS, 2: WAITS, 3: WAITS})
    assert report(state).splitlines() == [
        "  rank 0: at train.py:9 in evaluate",
        "  ranks 1-3: waiting in all_reduce, at train.py:3 in step; missing: rank 0",
    ]
    assert not state.explains()


def test_who_waits_in_another_collective_of_the_group_is_missing():
    other = Answer("waiting in barrier, at train.py:5 in step", "barrier", WAITS.ranks)
    state = WorldState(4, {0: other, 1: other, 2: WAITS, 3: WAITS})
    assert missing(state, WAITS) == [0, 1]
    assert missing(state, other) == [2, 3]


def test_who_gave_up_in_the_same_collective_is_not_missing():
    gave_up = Ending("all_reduce timed out", op=WAITS.op, ranks=WAITS.ranks)
    state = WorldState(
        4, {1: WAITS, 3: ELSEWHERE}, {0: gave_up, 2: Ending("raised ValueError: boom")}
    )
    assert missing(state, WAITS) == [2, 3]


def test_causes_come_before_their_consequences():
    state = WorldState(
        5,
        answers={0: WAITS},
        endings={
            1: Ending("raised RankFailedError: x", consequence=True),
            2: Ending("raised ValueError: boom"),
            4: Ending("reached the end of its program", raised=False),
        },
        gone={2: "process 7 on host", 3: "process 8 on host"},
    )
    assert [line.partition(":")[0] for line in report(state).splitlines()] == [
        "  rank 2",
        "  rank 3",
        "  rank 4",
        "  rank 0",
        "  rank 1",
    ]
    assert "raised ValueError: boom" in report(state)  # and not that its process is gone
    assert "process 8 on host" in report(state)
    assert state.explains()
    assert state.complete()


def test_who_does_not_answer_is_named_only_when_there_was_time_to():
    assert "rank 1: no answer" in report(WorldState(2, {0: WAITS}))
    assert "rank 1" not in report(WorldState(2, {0: ELSEWHERE}, answered=False))


def test_a_rank_does_not_report_itself():
    assert (
        report(WorldState(2, {0: WAITS, 1: ELSEWHERE}), without=0) == "  rank 1: " + ELSEWHERE.text
    )


def test_what_only_followed_from_another_end_explains_nothing():
    ending = Ending("raised RankFailedError: x", consequence=True)
    assert not WorldState(2, endings={0: ending}, gone={0: "process 7 on host"}).explains()
    assert WorldState(2, gone={0: "process 7 on host"}).explains()
