"""A thread waits where it makes no progress inside of a collective, and nowhere else."""

import threading
import time
import types
from collections import deque
from queue import SimpleQueue

import pytest
import torch
from vescale_comm._torch.ranks import compact
from vescale_comm._watchdog import places

# Functions that block, as modules of torch and of this package would have them.
CODE = """
def all_reduce(x, group, gate, entered):
    entered.set()
    gate.get()
    return x
"""


def module(name):
    made = types.ModuleType(name)
    exec(compile(CODE, torch.__file__, "exec"), made.__dict__)
    return made


class Blocked:
    """A thread in `all_reduce` of a module, until `go_on` lets it call that again, or end."""

    def __init__(self, name):
        self.gate, self.entered = SimpleQueue(), threading.Event()
        self.call = module(name).all_reduce
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        assert self.entered.wait(30)

    def run(self):
        x = torch.ones(2, 3)
        self.call(x, None, self.gate, self.entered)
        self.call(x.sum(), None, self.gate, self.entered)

    def go_on(self):
        self.entered.clear()
        self.gate.put(None)
        assert self.entered.wait(30)

    def end(self):
        self.gate.put(None)
        self.gate.put(None)
        self.thread.join(30)


@pytest.fixture
def blocked():
    made = []

    def _make(name):
        made.append(Blocked(name))
        return made[-1]

    yield _make
    for each in made:
        each.end()


@pytest.mark.parametrize("name", ["torch.distributed.distributed_c10d", "vescale_comm._engine.x"])
def test_a_wait_begins_where_it_was_first_seen_and_lasts_without_progress(blocked, name):
    thread, tracker = blocked(name), places.Tracker()
    known = thread.thread.ident
    assert tracker.update(10.0)[known] == 10.0
    assert tracker.update(15.0)[known] == 10.0
    thread.go_on()  # another line of the program: not the wait of before
    assert tracker.update(20.0)[known] == 20.0
    thread.end()
    assert known not in tracker.update(25.0)


@pytest.mark.parametrize(
    ("name", "users"),
    [("train", True), ("__main__", True), ("functools", False), ("vescale_dtensor._ops", False)],
)
def test_the_users_line_is_not_one_of_a_package_that_calls_for_him(name, users):
    made = types.ModuleType(name)
    exec(compile("import sys\ndef f():\n    return sys._getframe()", "f.py", "exec"), made.__dict__)
    assert places.is_users(made.f()) == users


@pytest.mark.parametrize("name", ["numpy.linalg", "vescale_comm.testing._worker", "train"])
def test_who_waits_for_something_else_does_not_wait_for_ranks(blocked, name):
    thread = blocked(name).thread.ident
    assert not places.communicates(places.frame_of(thread))
    assert thread not in places.Tracker().update(0.0)


POLLS = """
def wait(store, stopped):
    while not stopped:
        store.append(len(store))
"""


def test_who_looks_at_a_store_again_and_again_waits():
    """A checkpoint that one rank saves alone: it runs all the time, and comes to nothing."""
    made = types.ModuleType("vescale_ckpt._coordination.meeting")
    exec(compile(POLLS, "meeting.py", "exec"), made.__dict__)
    stopped, store = [], deque(maxlen=8)
    thread = threading.Thread(target=lambda: made.wait(store, stopped), daemon=True)
    thread.start()
    try:
        tracker, known = places.Tracker(), thread.ident
        while not store:
            time.sleep(0.01)
        assert tracker.update(10.0)[known] == 10.0
        for now in range(11, 30):
            time.sleep(0.01)
            assert tracker.update(float(now))[known] == 10.0
        wait = places.wait_of(places.frame_of(known))
        assert (wait.op, wait.site.rpartition(" in ")[2]) == ("wait", "<lambda>")
    finally:
        stopped.append(True)
        thread.join(30)


def test_a_thread_that_serves_who_looks_does_not_wait():
    made = types.ModuleType("vescale_ckpt._coordination.bounded_store")
    exec(compile(POLLS, "bounded.py", "exec"), made.__dict__)
    stopped, store = [], deque(maxlen=8)
    thread = threading.Thread(target=made.wait, args=(store, stopped), daemon=True)
    thread.start()
    try:
        while not store:
            time.sleep(0.01)
        assert thread.ident not in places.Tracker().update(0.0)
    finally:
        stopped.append(True)
        thread.join(30)


def test_a_wait_says_the_op_the_shape_and_the_users_line(blocked):
    frame = places.frame_of(blocked("vescale_comm._engine.fast_path").thread.ident)
    wait = places.wait_of(frame)
    assert (wait.op, wait.shape, wait.ranks) == ("all_reduce", "torch.float32 (2, 3)", ())
    assert wait.site == places.site_of(frame)
    assert wait.site.partition(":")[0] == __file__
    assert wait.site.endswith(" in run")


def test_ranks_are_written_as_ranges():
    assert compact((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7, 8"
    assert compact((3,)) == "3"
    assert compact((2, 1, 0)) == "2, 1, 0"
    assert compact(()) == ""


MEETS = """
def meet(log, count, gate, entered):
    entered.set()
    gate.get()
"""
# What the program calls: first the comparison, then the collective itself.
CALLED = """
def all_reduce(group, count, meet, collective, gate, entered):
    meet(None, count, gate, entered)
    collective(None, None, gate, entered)
"""


def test_a_comparison_ahead_of_a_collective_is_part_of_its_wait(monkeypatch):
    """The same event in the same call; another event at the same line is progress."""
    compares, gate, entered = types.ModuleType(places._COMPARES), SimpleQueue(), threading.Event()
    exec(compile(MEETS, "comparison.py", "exec"), compares.__dict__)
    called, collective = types.ModuleType("vescale_comm.x"), module("torch.distributed.x")
    exec(compile(CALLED, "x.py", "exec"), called.__dict__)

    def program():
        for count in (1, 2):
            called.all_reduce(None, count, compares.meet, collective.all_reduce, gate, entered)

    def seen(now):
        assert entered.wait(30)
        entered.clear()
        time.sleep(0.01)
        found = tracker.update(now)[thread.ident]
        assert places.communicates(places.frame_of(thread.ident))
        gate.put(None)
        return found

    tracker, thread = places.Tracker(), threading.Thread(target=program, daemon=True)
    thread.start()
    assert [seen(now) for now in (10.0, 15.0, 20.0, 25.0)] == [10.0, 10.0, 20.0, 20.0]
    thread.join(30)
