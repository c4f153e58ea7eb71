"""A report names the first event that is not the same on all ranks, and the calls that made it."""

from vescale_comm._watchdog.drift_report import Entry, drift_report, first_difference


def window(*values, what=None, before=None):
    """Events with these values; the digest of each is that of all before it."""
    return [
        Entry(
            number,
            hash(values[:number]),
            value,
            what or f"call {value}",
            f"at a.py:{value}",
            tuple((before or {}).get(number, ())),
        )
        for number, value in enumerate(values, 1)
    ]


def test_the_first_difference_is_named_the_few_first():
    said = drift_report((0, 1, 2), {0: window(1, 2, 3), 1: window(1, 5, 3), 2: window(1, 2, 3)})
    _, one, rest, _ = said.split("\n")
    assert "ranks 0-2" in said
    assert "differ from event 2 on" in said
    assert one == "  rank 1: call 5, at a.py:5"
    assert rest == "  ranks 0, 2: call 2, at a.py:2"


def test_a_rank_that_is_behind_differs_in_nothing():
    assert first_difference({0: window(1, 2, 3), 1: window(1, 2)}) is None
    said = drift_report((0, 1, 2), {0: window(1, 2), 1: window(1), 2: window(1, 3)})
    assert "rank 1: has not come so far" in said


def test_an_event_that_is_one_and_the_same_is_told_by_the_calls_that_made_it():
    calls = {2: ["add", "neg", "mul"]}
    log = {2: ["add", "neg", "mul"], 1: ["for a log"]}
    windows = {
        0: window(1, 2, what="sum", before=log),
        1: window(1, 3, what="sum", before={2: ["add", "mul"]}),
        2: window(1, 2, what="sum", before=calls),
    }
    said = drift_report((0, 1, 2), windows)
    assert "  rank 1: sum, at a.py:3, made by add, mul\n" in said
    assert "  ranks 0, 2: sum, at a.py:2, made by add, neg, mul\n" in said


def test_other_data_is_told_apart_too():
    said = drift_report((0, 1), {0: window(1, what="sum"), 1: window(2, what="sum")})
    assert "rank 0: sum, at a.py:1, made of other data" in said
    assert "rank 1: sum, at a.py:2, made of other data" in said


def test_what_lies_too_far_back_is_said_to():
    windows = {0: window(1, 2, 3)[1:], 1: window(5, 2, 3)[1:]}
    said = drift_report((0, 1), windows)
    assert "earlier than what is remembered" in said
    assert "rank 1 is at event 3: call 3, at a.py:3" in said


def test_numbers_between_equal_events_are_told_with_the_event_that_followed():
    same, other = (
        [Entry(1, 7, 1, "sum", "at a.py:1"), Entry(2, digest, 2, "mean", "at a.py:2", (rate,))]
        for digest, rate in ((8, "lr=0.1"), (9, "lr=0.2"))
    )
    said = drift_report((0, 1, 2), {0: same, 1: other, 2: same})
    assert "differ from event 2 on" in said
    assert "  rank 1: mean, at a.py:2, made by lr=0.2\n" in said
    assert "  ranks 0, 2: mean, at a.py:2, made by lr=0.1\n" in said


def test_who_has_ended_lacks_what_the_others_have_done():
    windows = {0: window(1, 2), 1: window(1)}
    assert first_difference(windows, ended={0}) is None
    said = drift_report((0, 1), windows, ended={1})
    assert "differ from event 2 on" in said
    assert "  rank 1: has ended without it\n" in said
