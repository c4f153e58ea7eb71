"""A hang is told by one rank that gathers what all say: work grows with the ranks, no faster."""

import random
from collections import Counter

import pytest
from vescale_comm._torch.ranks import ranks_of_runs, runs
from vescale_comm._watchdog import bounded_store
from vescale_comm._watchdog.channel import Answer, Channel, Ending
from vescale_comm._watchdog.report import WorldState, report
from vescale_comm._watchdog.state_message import parsed_state, shortened, state_text
from vescale_comm._watchdog.watcher import Watcher


class Store:
    """As torch's, in this process; counts how often it is used, and bytes that it gives."""

    def __init__(self):
        self.values, self.used, self.given = {}, Counter(), 0

    is_silent = False

    def clone(self):
        return self

    def set_timeout(self, timeout):
        pass

    def ask(self, method, *arguments):
        self.used[method] += 1
        return getattr(self, method)(*arguments)

    def add(self, key, amount):
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]

    def set(self, key, value):
        self.values[key] = [value]

    def append(self, key, value):
        self.values.setdefault(key, []).append(value)

    def get(self, key):
        found = "".join(self.values[key]).encode()
        self.given += len(found)
        return found

    def check(self, keys):
        return all(key in self.values for key in keys)

    def compare_set(self, key, expected, desired):
        if self.values.get(key, [""]) == [expected]:
            self.values[key] = [desired]
        return self.values[key][0].encode()


@pytest.fixture
def store(monkeypatch):
    made = Store()
    monkeypatch.setattr(bounded_store, "_Line", lambda store, seconds: store)
    return made


def hang(store, size, groups):
    """Ranks of a world look, all but one of which wait in groups of several."""
    watchers = []
    for rank in range(size):
        channel = Channel(store, rank, size)
        channel._store.append("host/x", "")
        watchers.append(Watcher(channel, server=None))
        members = tuple(range(rank % groups, size, groups))
        where = Answer(f"waiting in x of group {rank % groups}, at train.py:3", "x", members)
        watchers[-1].here = lambda where=where: where
        watchers[-1]._tracker.update = lambda now: {1: 0.0}
    watchers[1].here = lambda: Answer("at train.py:9 in evaluate")
    for now in (29.0, 31.0, 36.0, 41.0, 46.0, 51.0):
        for watcher in watchers:
            watcher.look(now)


def test_the_work_of_a_report_grows_with_the_ranks(store, caplog):
    counts = []
    for size in (32, 128):
        store.values.clear()
        store.used.clear()
        store.given = 0
        caplog.clear()
        hang(store, size, 4)
        assert len(caplog.messages) == size
        told = {message.partition(":\n")[2] for message in caplog.messages}
        assert len(told) == 1
        assert told.pop().splitlines()[0] == "  rank 1: at train.py:9 in evaluate"
        counts.append((sum(store.used.values()) / size, store.given / size))
    assert counts[1][0] <= counts[0][0] < 40
    assert counts[1][1] < 1.5 * counts[0][1]


@pytest.mark.parametrize("seed", range(20))
def test_a_state_is_heard_as_it_was_told(seed):
    draw = random.Random(seed)
    size = draw.randrange(1, 40)
    ranks = tuple(range(0, size, 2))
    answers = [Answer("waits", "x", ranks), Answer("at f.py:3"), Answer("waits", "y", (0, 1, 5))]
    endings = [Ending("raised", op="x", ranks=ranks), Ending("as well", consequence=True)]
    endings.append(Ending("reached the end", raised=False))
    found = {"answers": {}, "endings": {}, "gone": {}}
    of = {"answers": answers, "endings": endings, "gone": ["process 3", "process 4"]}
    for rank in range(size):
        kind = draw.choice([*of, None])
        if kind:
            found[kind][rank] = draw.choice(of[kind])
    state = WorldState(size, answered=draw.random() < 0.5, **found)
    assert shortened(state) == state
    assert ranks_of_runs(runs(ranks)) == ranks


def test_of_very_many_different_ones_some_are_told():
    answers = {rank: Answer(f"at f.py:{rank}" + 5000 * "x") for rank in range(1000)}
    state = WorldState(1001, answers, {1000: Ending("raised ValueError: boom")})
    told = state_text(state)
    assert len(told) < 200_000
    lines = report(parsed_state(told.encode())).splitlines()
    assert len(lines) == 65
    assert lines[0] == "  rank 1000: raised ValueError: boom"
    assert any("too many others" in line for line in lines)


def test_of_very_many_it_is_told_that_some_wait():
    answers = {rank: Answer(f"at f.py:{rank}") for rank in range(100)}
    state = WorldState(101, {**answers, 100: Answer("waiting in x", "x", (0, 100))})
    assert any(each.waits for each in shortened(state).answers.values())
    assert not any(each.waits for each in shortened(WorldState(100, answers)).answers.values())


def test_who_gathers_does_not_hide_what_only_another_host_knows(store, monkeypatch):
    """The process of rank 2 is gone, on the host of rank 1."""
    monkeypatch.setattr("vescale_comm._watchdog.channel._is_alive", lambda pid: pid != 2)
    channels = [Channel(store, rank, 3) for rank in range(3)]
    question, heard = channels[0].ask(), []
    for rank, host in ((2, "b"), (0, "a"), (1, "b")):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        if rank == 2:
            monkeypatch.setattr("os.getpid", lambda: 2)
            channels[2].introduce()
            continue
        channels[rank].answer(question, Answer("waiting in x", "x", (0, 1, 2)))
        heard.append(Watcher(channels[rank], server=None)._gathered(question, 0.0))
    assert [sorted(each.gone) for each in heard] == [[], [2]]
    assert heard[1].explains()
