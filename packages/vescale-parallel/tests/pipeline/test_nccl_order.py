"""No schedule waits for ever by NCCL's rules, by which a rank's messages come one after another.

NCCL itself needs GPUs. Here each rank queues what `Runner` and `Inbox` let it send, receive and
wait for, and the queues are carried out by these rules:

- A message starts when the one before it on its communicator has ended on this rank, and what the
  rank had to compute before it is done. It ends when its other side has started as well: a message
  of some size is not kept in between.
- What is computed waits for the messages that it is told to wait for.
- With `one_queue`, nothing starts before all that was queued before it has started: so do streams
  that share a queue of the GPU, of which there are eight, or one where CUDA_DEVICE_MAX_CONNECTIONS
  says so.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vescale_parallel._pipeline.finish.step_end import note_of
from vescale_parallel._pipeline.plan.model_walk import TrainedParameters
from vescale_parallel._pipeline.run import messages
from vescale_parallel._pipeline.run.measurements import Stopwatch
from vescale_parallel._pipeline.run.messages import Inbox, Lines, Message, lanes_of
from vescale_parallel._pipeline.run.runner import Runner, first_microbatches, forwards_only
from vescale_parallel._pipeline.trace.loss_dependence import ReturnedGradients
from vescale_parallel.schedules import SCHEDULES, Action, Schedule, make_schedule

Lane = Callable[[int, int], object]
"""The communicator of a sender and a receiver."""


class Op(NamedTuple):
    """What a rank queues.

    Attributes:
        stream: a communicator, or "compute".
        after: operations of this rank that have to be done, by number.
        message: its sender, its receiver and its number among those between both; None: none.
    """

    stream: object
    after: tuple[int, ...] = ()
    message: tuple[object, int, int, int] | None = None


class Queued:
    """Connections of one rank that queue operations."""

    def __init__(self, rank: int, lane: Lane) -> None:
        self.rank, self.device, self.ops = rank, "meta", list[Op]()
        self._lane, self._counts, self._computed = lane, Counter[tuple[int, int]](), ()

    def compute(self, *after: int) -> None:
        self.ops.append(Op("compute", after))
        self._computed = (len(self.ops) - 1,)

    def _start(self, source: int, target: int) -> Any:
        lane, at = self._lane(source, target), len(self.ops)
        number = self._counts[source, target]
        self._counts[source, target] += 1
        self.ops.append(Op(lane, self._computed, (lane, source, target, number)))
        return SimpleNamespace(wait=lambda: self.compute(at))

    def send(self, tensors: Any, target: int) -> list[Any]:
        return [self._start(self.rank, target) for _ in tensors]

    def start_recv(self, specs: Any, source: int) -> Any:
        starts = [self._start(source, self.rank) for _ in specs]

        def wait() -> list[Any]:
            return [one.wait() for one in starts]

        return SimpleNamespace(wait=wait, drop=wait)


SPEC = SimpleNamespace(shape=(), dtype=torch.float32)


def queued(
    schedule: Schedule,
    rank: int,
    lane: Lane,
    fails_at: int | None = None,
    without: frozenset[int] = frozenset(),
) -> list[Op]:
    """What a rank queues in a step, in which its action of that number raises.

    Args:
        schedule: of the step.
        rank: it.
        lane: by which communicator messages go.
        fails_at: the number of the action; None: none raises.
        without: stages to which no gradients come back.
    """
    lines = Queued(rank, lane)
    runner: Any = Runner.__new__(Runner)
    runner._scene, runner._schedule = SimpleNamespace(rank=rank, held=None), schedule
    runner._lines, runner._watch, runner._is_still = lines, None, False
    runner._sent, runner._given, runner._held_back = {}, set(), None
    runner._kept, runner._forwards, runner._halves = {}, {}, {}
    runner._returned, runner._microbatches = ReturnedGradients(), ()

    def specs(message: Message) -> Any:
        is_empty = message.way == "backward" and message.stage in without
        return () if is_empty else (SPEC,)

    runner._specs = specs
    runner._inbox = Inbox(lines, schedule, runner._specs)  # type: ignore[arg-type]

    def act(action: Any, *, syncs: bool) -> None:
        needs, gives = runner._inbox.passes[action]
        if needs is not None:
            runner._take(needs)
        if fails_at is not None and action == schedule.ranks[rank][fails_at]:
            raise ValueError("not today")
        lines.compute()
        if gives is not None:
            runner._send(gives, specs(gives))

    runner._act = act
    around: Any = SimpleNamespace(enter_context=lambda held: None)
    assert (runner._run(around, None) is None) == (fails_at is None)
    return lines.ops


def is_stuck(ranks: Sequence[Sequence[Op]], *, one_queue: bool) -> bool:
    """Whether queued operations of all ranks never end."""
    streams: list[dict[object, deque[int]]] = [defaultdict(deque) for _ in ranks]
    for mine, ops in zip(streams, ranks, strict=True):
        for at, op in enumerate(ops):
            mine[op.stream].append(at)
    started = [set[int]() for _ in ranks]
    done = [set[int]() for _ in ranks]
    first = [0] * len(ranks)  # that has not started
    sides: dict[object, list[tuple[int, int]]] = defaultdict(list)
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(ranks):
            for stream in streams[rank].values():
                while stream and (at := stream[0]) not in started[rank]:
                    if not done[rank].issuperset(ops[at].after) or (
                        one_queue and at != first[rank]
                    ):
                        break
                    moved = True
                    started[rank].add(at)
                    while first[rank] in started[rank]:
                        first[rank] += 1
                    message = ops[at].message
                    sides[message or (rank, at)].append((rank, at))
                    if message is None or len(sides[message]) == 2:
                        for there, which in sides[message or (rank, at)]:
                            done[there].add(which)
                            streams[there][ranks[there][which].stream].popleft()
    return any(map(any, (mine.values() for mine in streams)))


def own_lanes(schedule: Schedule) -> Lane:
    numbers = lanes_of(schedule.stage_ranks)
    return lambda source, target: numbers[source, target]


def by_direction(schedule: Schedule) -> Lane:
    return lambda source, target: source < target


def schedules(name: str) -> list[Schedule]:
    return [
        make_schedule(name, ranks, count, chunks=chunks)
        for ranks in range(2, 9)
        # DualPipeV has no fewer than twice as many microbatches as ranks.
        for count in ([] if name == "dualpipev" else [ranks, ranks + 1])
        + [2 * ranks, 2 * ranks + 3]
        for chunks in ((2, 3) if name == "interleaved" else (2,))
        if name != "interleaved" or count % ranks == 0
    ]


def short(schedule: Schedule) -> list[Schedule]:
    """Of batches of fewer rows than it has microbatches."""
    most = schedule.microbatches
    counts = {1, 2, 3, most // 2, most - 1} & {*range(1, most)}
    return [first_microbatches(schedule, count) for count in sorted(counts)]


def steps(name: str) -> list[Schedule]:
    every = [one for each in schedules(name) for one in (each, *short(each))]
    return [one for each in every for one in (each, forwards_only(each))]


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_step_waits_for_ever(name: str, one_queue: bool):
    for each in steps(name):
        lane = own_lanes(each)
        ranks = [queued(each, rank, lane) for rank in range(len(each.ranks))]
        assert not is_stuck(ranks, one_queue=one_queue), (len(each.ranks), each.microbatches)


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_nor_does_one_in_which_some_gradients_do_not_come_back(name: str, one_queue: bool):
    draw = random.Random(name)
    for each in schedules(name):
        size, lane = len(each.ranks), own_lanes(each)
        for _ in range(3):
            without = frozenset(at for at in range(each.stages) if draw.random() < 0.5)
            ranks = [queued(each, rank, lane, without=without) for rank in range(size)]
            assert not is_stuck(ranks, one_queue=one_queue), (size, each.microbatches, without)


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_nor_does_one_in_which_a_rank_fails(name: str, one_queue: bool):
    for each in schedules(name):
        size = len(each.ranks)
        if size > 4:
            continue
        lane = own_lanes(each)
        well = [queued(each, rank, lane) for rank in range(size)]
        for rank, row in enumerate(each.ranks):
            for at in range(len(row)):
                ranks = [*well]
                ranks[rank] = queued(each, rank, lane, fails_at=at)
                assert not is_stuck(ranks, one_queue=one_queue), (size, rank, at)


@pytest.mark.parametrize(
    ("name", "lane"), [("1f1b", lambda schedule: lambda source, target: 0), ("zbv", by_direction)]
)
def test_these_rules_find_what_waits_for_ever(name: str, lane: Callable[[Schedule], Lane]):
    each = make_schedule(name, 4, 8)
    assert is_stuck([queued(each, rank, lane(each)) for rank in range(4)], one_queue=False)


@pytest.mark.parametrize("ranks", range(1, 10))
def test_in_a_lane_a_rank_sends_or_receives_with_one_other(ranks: int):
    once = tuple(range(ranks))
    for stage_ranks, most in ((once, 4), (once * 2, 6), (once + once[::-1], 4)):
        lanes = lanes_of(stage_ranks)
        for lane in set(lanes.values()):
            members = [rank for pair, at in lanes.items() if at == lane for rank in pair]
            assert len(members) == len(set(members))
        assert len(set(lanes.values())) <= (2 if ranks == 2 else most)
        assert {(b, a) for a, b in lanes} == set(lanes)


def test_every_rank_opens_every_lane_in_one_order(monkeypatch: pytest.MonkeyPatch):
    # Before any message: on NCCL the first call of a group makes its communicator, and waits.
    opened: list[tuple[int, Any]] = []
    monkeypatch.setattr(
        messages,
        "broadcast",
        lambda x, group, *, source: opened.append((group.rank, (group.lane, source))),
    )
    for rank in range(3):
        lanes: Any = [SimpleNamespace(rank=rank, size=3, ranks=(0, 1, 2), lane=i) for i in range(6)]
        Lines(lanes, lanes_of((0, 1, 2, 0, 1, 2)), "cpu")
    for rank in range(3):
        assert [one for at, one in opened if at == rank] == [(lane, 0) for lane in range(6)]


def test_a_measured_action_does_not_wait_for_messages(monkeypatch: pytest.MonkeyPatch):
    # They are on streams of their own; the whole device ends when other ranks have done more than
    # they can before this rank goes on.
    waited: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append("device"))
    watch = Stopwatch("cuda")
    with watch.action(Action("F", 0, 0)), watch.pause():
        pass
    assert waited == ["stream"] * 4


def test_a_loss_on_a_device_is_not_read():
    # It would wait there for all of the step. Nothing of a meta tensor can be read.
    assert len(note_of(torch.zeros((), device="meta"), TrainedParameters([], []), whole=True)) == 8
