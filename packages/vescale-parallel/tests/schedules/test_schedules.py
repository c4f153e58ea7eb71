"""Pipeline schedules: everything is computed once, they end, and they are as good as is known."""

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.distributed.pipelining.schedules as of_torch
import vescale_parallel.schedules as schedules
from vescale_parallel import PlanError
from vescale_parallel._schedules import check as check_module
from vescale_parallel._schedules import timeline as timeline_module
from vescale_parallel.schedules import (
    Action,
    StageTimes,
    check_schedule,
    make_schedule,
    schedule_of,
    simulate_schedule,
)

COUNTS = [(p, m) for p in (1, 2, 3, 4, 7, 8) for m in (1, 2, 3, 4, 8, 9, 14, 16, 24, 40)]
# What a rank does in one of two stages takes half as long.
HALF = StageTimes(0.5, 0.5, 0.5, 0.5, 0.5)


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_every_schedule_computes_everything_once_and_ends(name: str):
    made = 0
    for ranks, microbatches in COUNTS:
        try:
            schedule = make_schedule(name, ranks, microbatches)
        except PlanError:
            assert name == "dualpipev" or (name == "interleaved" and microbatches % ranks)
            continue
        check_schedule(schedule)
        assert len(schedule.ranks) == ranks
        assert schedule.microbatches == microbatches
        assert schedules.from_csv(schedule.to_csv(), name) == schedule
        made += 1
    assert made > 20


def test_chunks_of_interleaved_schedules():
    for chunks in (1, 2, 3, 5):
        schedule = make_schedule("interleaved", 4, 12, chunks=chunks)
        check_schedule(schedule)
        assert schedule.stages == 4 * chunks
    plain = make_schedule("1f1b", 4, 12)
    assert make_schedule("interleaved", 4, 12, chunks=1).stages == plain.stages


# What is known of each, where F, I and W take 1 each for a rank's part of the model.


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 8), (4, 32), (8, 16), (8, 64)])
def test_times_and_memory_are_those_of_the_papers(ranks: int, microbatches: int):
    whole = 3 * microbatches
    found = {
        name: simulate_schedule(
            make_schedule(name, ranks, microbatches),
            HALF if schedules.SCHEDULES[name].chunks != 1 else StageTimes(),
        )
        for name in schedules.SCHEDULES
    }
    assert found["gpipe"].seconds == found["1f1b"].seconds == whole + 3 * (ranks - 1)
    assert found["gpipe"].peak == microbatches
    assert found["1f1b"].peaks == tuple(float(ranks - r) for r in range(ranks))
    assert found["interleaved"].seconds == whole + 3 * (ranks - 1) / 2
    assert found["zb-h1"].seconds == whole + (ranks - 1)
    assert found["zb-h1"].peak == ranks
    assert found["zb-greedy"].peak <= ranks
    # The last one ends when it has passed back: without a bubble in between.
    assert found["zbv"].seconds <= whole + ranks / 2
    assert found["zbv"].peak == ranks
    for timeline in found.values():
        assert timeline.busy == pytest.approx((whole,) * ranks)
        assert timeline.bubble == pytest.approx(1 - whole / timeline.seconds)


class Stage:
    """What torch's schedules ask of a stage."""

    def __init__(self, index: int, ranks: int, stages: int) -> None:
        self.stage_index, self.num_stages, self.group_size = index, stages, ranks
        self.group_rank = min(index % ranks, index)
        self.is_first, self.is_last, self.has_backward = not index, index == stages - 1, False
        self.group = self.device = None
        self.submod = None
        self.dw_builder = None


def actions_of_torch(cls: type, ranks: int, microbatches: int, chunks: int) -> list[list[str]]:
    """The actions of one of torch's schedules, without pauses; overlapped pairs one by one."""
    stages = [Stage(i, ranks, ranks * chunks) for i in range(chunks)]
    takes_one = issubclass(cls, of_torch.PipelineScheduleSingle)
    schedule = cls(stages[0] if takes_one else stages, microbatches, loss_fn=None)
    rows = [schedule.pipeline_order[rank] for rank in range(ranks)]
    return [
        # What follows the last backward is no action of a schedule here: gradients are reduced.
        [text for a in row if a is not None and "REDUCE" not in str(a) for text in words(a)]
        for row in rows
    ]


def words(action: object) -> list[str]:
    parts = getattr(action, "sub_actions", None) or (action,)
    return [str(part) for part in parts]


OF_TORCH = [
    ("gpipe", of_torch.ScheduleGPipe, 1),
    ("1f1b", of_torch.Schedule1F1B, 1),
    ("interleaved", of_torch.ScheduleInterleaved1F1B, 2),
    ("interleaved", of_torch.ScheduleInterleaved1F1B, 3),
    ("zbv", of_torch.ScheduleZBVZeroBubble, 2),
    ("dualpipev", of_torch.ScheduleDualPipeV, 2),
]


@pytest.mark.parametrize(("name", "cls", "chunks"), OF_TORCH)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 8), (4, 8), (4, 16), (8, 16)])
def test_actions_are_those_of_torch(
    name: str, cls: type, chunks: int, ranks: int, microbatches: int
):
    ours = make_schedule(name, ranks, microbatches, chunks=chunks)
    theirs = actions_of_torch(cls, ranks, microbatches, chunks)
    if name == "1f1b":
        # torch lists the last rank's forwards as 1 to n, and runs 0 to n - 1 as all others.
        listed = [Action.parse(text) for text in theirs[-1]]
        theirs[-1] = [str(a._replace(microbatch=a[2] - (a.kind == "F"))) for a in listed]
    assert [[str(action) for action in row] for row in ours.ranks] == theirs


@pytest.mark.parametrize("name", schedules.SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_torch_accepts_them_and_finds_that_they_end(name: str, ranks: int, microbatches: int):
    schedule = make_schedule(name, ranks, microbatches)
    # Its halves of backwards only come in pairs, and whole ones beside them: as ours.
    rows = {
        rank: [of_torch._Action.from_str(str(action)) for action in row]
        for rank, row in enumerate(schedule.ranks)
    }
    of_torch._validate_schedule(rows, ranks, schedule.stages, microbatches)
    places = schedule.stage_ranks
    sent = of_torch._add_send_recv(rows, lambda stage: places[stage], schedule.stages)
    # Raises where ranks wait for each other.
    of_torch._simulate_comms_compute(sent, lambda stage: places[stage], schedule.stages)


OF_SEVERAL = [
    of_torch.ScheduleInterleaved1F1B,
    of_torch.ScheduleLoopedBFS,
    of_torch.ScheduleInterleavedZeroBubble,
    of_torch.ScheduleZBVZeroBubble,
    of_torch.ScheduleDualPipeV,
]


@pytest.mark.parametrize("is_lowered", [False, True])
@pytest.mark.parametrize("cls", OF_SEVERAL)
def test_what_torch_writes_is_read(cls: type, is_lowered: bool):
    """Also with what it adds for its runtime: messages, pairs, and what FSDP does."""
    made = cls([Stage(i, 4, 8) for i in range(2)], 8, loss_fn=None)
    rows = made.pipeline_order_with_comms if is_lowered else made.pipeline_order
    text = "\n".join(",".join("" if a is None else str(a) for a in rows[r]) for r in range(4))
    assert ("SEND_F" in text) == is_lowered
    read = schedules.from_csv(text + "\n\n")
    check_schedule(read)
    theirs = actions_of_torch(cls, 4, 8, 2)
    assert [[str(action) for action in row] for row in read.ranks] == theirs


def test_waits_that_a_later_torch_writes_are_left_out():
    text = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0WAIT_SEND_F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n"
    read = schedules.from_csv(text + "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0")
    assert read.to_csv() == "0F0,0B0\n1F0,1B0\n"


def test_split_backwards_are_no_slower_than_torchs():
    for ranks, microbatches in ((2, 4), (4, 8), (4, 16), (8, 16)):
        theirs = actions_of_torch(of_torch.ScheduleInterleavedZeroBubble, ranks, microbatches, 2)
        other = schedule_of("torch", [[Action.parse(text) for text in row] for row in theirs])
        ours = simulate_schedule(make_schedule("zbv", ranks, microbatches), HALF)
        assert ours.seconds <= simulate_schedule(other, HALF).seconds
        assert ours.peak <= simulate_schedule(other, HALF).peak


# Simulation.


def by_brute_force(schedule: schedules.Schedule, times: list[StageTimes], send: float) -> float:
    """When all has ended: repeat until nothing changes."""
    last = schedule.stages - 1
    end: dict[tuple[str, int, int], float] = {}
    while len(end) < sum(map(len, schedule.ranks)):
        for row in schedule.ranks:
            free = 0.0
            for action in row:
                kind, stage, microbatch = action
                needs = []
                if kind == "F" and stage:
                    needs.append(("F", stage - 1))
                if kind in "BI":
                    needs.append(("F", stage))
                    if stage < last:
                        after = ("B" if ("B", stage + 1, microbatch) in end else "I", stage + 1)
                        needs.append(after)
                if kind == "W":
                    needs.append(("I", stage))
                if any((*need, microbatch) not in end for need in needs):
                    break
                places = schedule.stage_ranks
                ready = [
                    end[k, s, microbatch] + send * (places[s] != places[stage]) for k, s in needs
                ]
                free = end[action] = max([free, *ready]) + times[stage].of(action)
    return max(end.values())


def test_times_are_those_of_a_plain_simulation():
    draw = random.Random(0)
    for _ in range(60):
        name = draw.choice([*schedules.SCHEDULES])
        ranks = draw.choice([1, 2, 3, 4])
        schedule = make_schedule(name, ranks, ranks * draw.randint(2, 4))
        times = [
            StageTimes(*(draw.uniform(0.1, 2) for _ in range(3))) for _ in range(schedule.stages)
        ]
        send = draw.choice([0.0, 0.3])
        found = simulate_schedule(schedule, times, send=send)
        assert found.seconds == pytest.approx(by_brute_force(schedule, times, send))
        assert max(found.busy) <= found.seconds


def test_the_best_that_fits_is_taken():
    assert schedules.best_schedule(8, 32, memory=8.0).bubble < 0.04
    plain = schedules.best_schedule(4, 2)
    assert plain.seconds == min(
        t.seconds
        for t in schedules.compare_schedules(4, 2).values()
        if isinstance(t, schedules.Timeline)
    )
    # Whatever the unit of times.
    for unit in (1e-12, 1e12):
        found = schedules.best_schedule(4, 8, times=StageTimes(unit, unit, unit)).schedule
        assert found == schedules.best_schedule(4, 8).schedule
    tight = schedules.best_schedule(
        4, 16, times=StageTimes(kept=2.0, kept_for_weights=2.0), memory=8.0
    )
    assert tight.peak <= 8.0
    with pytest.raises(PlanError, match=r"keeps at most 0\.5"):
        schedules.best_schedule(4, 16, memory=0.5)


def test_schedules_of_many_ranks_are_made_and_checked():
    for name in schedules.SCHEDULES:
        chunks = schedules.SCHEDULES[name].chunks
        schedule = make_schedule(name, 64 if chunks == 1 else 32, 128)
        check_schedule(schedule)
        assert simulate_schedule(schedule).bubble < 0.5


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_what_an_action_costs_on_paper_does_not_grow(name: str):
    def lines(ranks: int, microbatches: int) -> float:
        schedule = make_schedule(name, ranks, microbatches)
        return lines_run(lambda: (check_schedule(schedule), simulate_schedule(schedule))) / sum(
            map(len, schedule.ranks)
        )

    small, large = lines(4, 16), lines(8, 64)
    assert large <= small


def test_of_many_ranks_no_table_of_all_is_made_for_each(monkeypatch: pytest.MonkeyPatch):
    """Thousands of ranks take what their actions take: arrays are made for all ranks at once."""
    made = 0
    for module in (check_module, timeline_module):
        for name in ("array", "where", "bincount", "zeros"):
            plain = getattr(np, name)

            def counted(*given: Any, plain: Any = plain, **more: Any) -> Any:
                nonlocal made
                made += 1
                return plain(*given, **more)

            monkeypatch.setattr(module.np, name, counted)

    def arrays(ranks: int) -> int:
        nonlocal made
        schedule = make_schedule("1f1b", ranks, 4)
        made = 0
        check_schedule(schedule, buffers=ranks)
        simulate_schedule(schedule)
        return made

    assert arrays(64) == arrays(2)


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python a call runs."""
    count = 0

    def traced(frame: object, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


# What is shown.


def test_tables_pictures_and_traces():
    found = schedules.compare_schedules(4, 4)
    table = schedules.as_table(found)
    assert [line.split()[0] for line in table.splitlines()[1:]] == [*schedules.SCHEDULES]
    assert "it needs at least 8" in table
    told = json.loads(schedules.as_json(found))
    assert told["1f1b"]["kept"] == [4, 3, 2, 1]
    assert "error" in told["dualpipev"]
    timeline = simulate_schedule(make_schedule("zb-h1", 3, 4))
    assert schedules.as_svg(timeline).count("<rect") == 1 + sum(map(len, timeline.spans))
    events = json.loads(schedules.as_trace(timeline))["traceEvents"]
    assert {event["tid"] for event in events} == {0, 1, 2}
    assert sum(event["dur"] for event in events) == pytest.approx(3 * 12 * 1e6)


def test_letters_tell_who_does_what_and_who_waits():
    timeline = simulate_schedule(make_schedule("1f1b", 3, 3))
    assert schedules.as_text(timeline) == (
        "1f1b: time 15, bubble 40.0%\n"
        "rank 0 FFF....BB.BB.BB\n"
        "rank 1 .FF..BBFBB.BB..\n"
        "rank 2 ..FBBFBBFBB...."
    )
    # Two stages of a rank: a letter is each action, in order, where there is room.
    folded = simulate_schedule(make_schedule("zbv", 2, 4), HALF)
    for line, row in zip(
        schedules.as_text(folded).splitlines()[1:], folded.schedule.ranks, strict=True
    ):
        letters = "".join(a.kind.lower() if a.stage > 1 else a.kind for a in row)
        assert line.split()[2].replace(".", "") == letters
    narrow = schedules.as_text(folded, 17).splitlines()
    assert narrow[0].endswith("a letter for 1.25")
    assert [len(line) for line in narrow[1:]] == [17, 17]
    assert schedules.as_text(
        simulate_schedule(make_schedule("gpipe", 1, 1), StageTimes(0, 0, 0)), 10
    )


# What is refused.

TWO = [[Action("F", 0, 0), Action("B", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]]


NEVER_ENDS = [
    ([["0F0", "0B0"], ["1B0", "1F0"]], "rank 1 at 1B0 waits for 1F0"),
    ([["0F0", "0B0"], ["1F0"]], "stage 1 has F for microbatch 0"),
    ([["0F0", "0B0", "0F0"], ["1F0", "1B0"]], "stage 0 has F, B, F for microbatch 0"),
    ([["0F0", "0B0", "0W0"], ["1F0", "1B0"]], "stage 0 has F, B, W"),
    ([["0F0", "0I0"], ["1F0", "1B0"]], "stage 0 has F, I for"),
    ([["0F0", "0B0", "0F2", "0B2"], ["1F0", "1B0"]], "stage 0 has nothing for microbatch 1"),
]


@pytest.mark.parametrize(("rows", "words"), NEVER_ENDS)
def test_what_is_left_out_or_never_ends_is_refused(rows: list[list[str]], words: str):
    schedule = schedule_of("mine", [[Action.parse(text) for text in row] for row in rows])
    with pytest.raises(PlanError, match=words):
        check_schedule(schedule)


NO_ACTIONS = [
    ([[("X", 0, 0)]], r"\('X', 0, 0\) is no action"),
    ([[("F", 0.5, 0), ("B", 0.5, 0)]], "0.5, 0. is no action"),
    ([[("F", -1, 0), ("B", -1, 0)]], "-1, 0. is no action"),
    ([[("F", "0", "0")]], "is no action"),
    ([[("F", 0)]], "is no action"),
    ([[7]], "7 is no action"),
    ([["0F0", "\u0663B0"]], "is no action"),
]


@pytest.mark.parametrize(("rows", "words"), NO_ACTIONS)
def test_what_is_no_action_is_refused(rows: list[list[Any]], words: str):
    with pytest.raises(PlanError, match=words):
        schedule_of("mine", rows)
    # Nor in one that was put together by hand.
    with pytest.raises(PlanError, match=r"no action|no `Action`s|no such stage"):
        check_schedule(schedules.Schedule("mine", tuple(map(tuple, rows)), (0,), 1))


def test_actions_are_given_as_texts_and_triples_and_none_is_a_pause():
    rows = [["0F0", None, ("B", np.int64(0), 0)], [None, Action("F", 1, 0), "1B0"]]
    assert schedule_of("mine", rows) == schedule_of("mine", TWO)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="make it by schedule_of"):
        check_schedule(schedules.Schedule("mine", (("0F0", "0B0"),), (0,), 1))  # type: ignore[arg-type]


def test_one_wrong_number_makes_no_table_of_its_size():
    for number in ("99999999999", "9" * 30):
        with pytest.raises(PlanError, match=f"it has microbatch {number}, and 6 actions"):
            schedules.from_csv(f"0F0,0B0,0F{number},0B{number}\n1F0,1B0")
    with pytest.raises(PlanError, match="stage 0 has nothing for microbatch 1;"):
        check_schedule(schedules.from_csv("0F0,0B0,0F5,0B5\n1F0,1B0"))
    with pytest.raises(PlanError, match="stage 0 has nothing for microbatch 1;"):
        simulate_schedule(schedules.from_csv("0F0,0B0,0F5,0B5\n1F0,1B0"))


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_stages_with_too_few_buffers_are_named(name: str):
    schedule = make_schedule(name, 3, 7 if name != "interleaved" else 6)
    # Of each stage, by a plain count.
    most = dict.fromkeys(range(schedule.stages), 0)
    for row in schedule.ranks:
        kept = dict.fromkeys(range(schedule.stages), 0)
        for kind, stage, _ in row:
            kept[stage] += {"F": 1, "I": 0}.get(kind, -1)
            most[stage] = max(most[stage], kept[stage])
    needed = max(most.values())
    check_schedule(schedule, buffers=needed)
    with pytest.raises(PlanError, match=rf"keeps {needed} .* has buffers for {needed - 1}: \dF"):
        check_schedule(schedule, buffers=needed - 1)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_times_that_nothing_takes_are_refused(value: float):
    """A simulation of them would be wrong, and one by a rule never end."""
    for what in vars(StageTimes()):
        with pytest.raises(PlanError, match=f"{what} is {value:g}"):
            StageTimes(**{what: value})
    with pytest.raises(PlanError, match=f"send is {value:g}"):
        simulate_schedule(make_schedule("1f1b", 2, 2), send=value)
    with pytest.raises(PlanError, match=f"send is {value:g}"):
        schedules.compare_schedules(2, 2, send=value)


def test_stages_side_by_side_on_a_rank_are_told_apart():
    rows = [["0F0", "1F0", "1B0", "0B0"], ["2F0", "3F0", "3B0", "2B0"]]
    found = simulate_schedule(schedule_of("mine", rows))  # type: ignore[arg-type]
    letters = [
        line.split()[2].replace(".", "") for line in schedules.as_text(found).splitlines()[1:]
    ]
    assert letters == ["FfbbBB"] * 2
    assert schedules.as_svg(found).count('stroke="#333"') == 4


def test_what_is_no_schedule_is_refused():
    for text, words in (
        ("0F0,0X0", "'0X0' is no action"),
        ("0F0\n0B0", "stage 0 is on ranks 0 and 1"),
        ("1F0,1B0", "no rank has stage 0"),
        ("0F0,0B0,1000000000F0,1000000000B0", "no rank has stage 1"),
        (f"0F{'9' * 5000}", "is no action"),
        ("", "no rank has stage 0"),
        ("0F0\r0B0", "schedule csv: it is no CSV: new-line"),
        (f'"{"x" * 200_000}"', "schedule csv: it is no CSV: field larger"),
    ):
        with pytest.raises(PlanError, match=words):
            schedules.from_csv(text)
    for name, ranks, microbatches, words in (
        ("2f2b", 2, 2, "no schedule '2f2b'; there are: gpipe"),
        ("gpipe", 0, 2, "ranks is 0"),
        ("1f1b", 2, 0, "microbatches is 0"),
        ("interleaved", 4, 9, "9 microbatches do not make 2 equal groups"),
        ("dualpipev", 4, 7, "it needs at least 8"),
    ):
        with pytest.raises(PlanError, match=words):
            make_schedule(name, ranks, microbatches)
    with pytest.raises(PlanError, match="3 times for 2 stages"):
        simulate_schedule(schedule_of("mine", TWO), [StageTimes()] * 3)
    with pytest.raises(PlanError, match="3 times for 2 ranks"):
        schedules.compare_schedules(2, 4, times=[StageTimes()] * 3)
