"""A call that some ranks do not make ends on those that wait for them: in time, and named."""

import json
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import vescale_ckpt as ckpt
from vescale_ckpt._coordination import meeting
from vescale_ckpt._coordination.bounded_store import BoundedStore
from vescale_ckpt._coordination.meeting import Call, arrive, refuse

testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")


class Store:
    """As torch's: a dict with counters, atomic, that several threads use."""

    def __init__(self):
        self.values, self.lock = {}, threading.Lock()

    def add(self, key, amount):
        with self.lock:
            self.values[key] = self.values.get(key, 0) + amount
            return self.values[key]

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)

    def compare_set(self, key, expected, desired):
        with self.lock:
            if self.values.get(key, b"") == expected.encode():
                self.values[key] = desired.encode()
            return self.values[key]

    def delete_key(self, key):
        with self.lock:
            return self.values.pop(key, None) is not None


def call(name="save", subject="'a'", timeout=10.0):
    return Call(name, subject, f"train.py:{len(name)}", timeout)


def on_threads(*works):
    """What each of the calls returned or raised, in order."""
    outcomes = [None] * len(works)

    def run(i):
        try:
            outcomes[i] = works[i]()
        except BaseException as error:
            outcomes[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return outcomes


def meet(store, rank, size, what):
    return arrive(store, rank, size, what)()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_all_that_come_go_on_any_number_of_times(size):
    store = Store()

    def work(rank):
        for n in range(20):
            meet(store, rank, size, call(subject=str(n)))

    assert on_threads(*(lambda r=r: work(r) for r in range(size))) == [None] * size
    # What meetings leave does not grow with their number.
    assert len([key for key in store.values if key[0].isdigit()]) <= 2


def test_who_does_not_come_is_named_with_its_last_call():
    store = Store()
    met = on_threads(*(lambda r=r: meet(store, r, 3, call("load")) for r in range(3)))
    assert met == [None] * 3
    # Both are there before the first one gives up.
    waiting = [arrive(store, r, 3, call("save", "'b'", 0.1)) for r in (0, 2)]
    for error in on_threads(*waiting):
        assert isinstance(error, ckpt.CoordinationError)
        assert "save('b') at train.py:4" in str(error)
        assert "rank(s) 0, 2 of 3 have waited" in str(error)
        assert "for rank(s) 1, which have not called it" in str(error)
        assert "rank 1: load('a') at train.py:4" in str(error)


def test_after_a_while_it_is_said_and_waited_for_on(caplog, monkeypatch):
    monkeypatch.setattr(meeting, "NOTICE_SECONDS", 0.1)
    store = Store()

    def late():
        # It comes when the other has said that it is missing.
        while not caplog.records:
            time.sleep(0.01)
        return meet(store, 1, 2, call())

    assert on_threads(lambda: meet(store, 0, 2, call()), late) == [None, None]
    assert "for rank(s) 1, which have not called it" in caplog.text
    assert "rank 1: nothing yet" in caplog.text


def test_a_wait_is_bounded_as_the_collectives_of_its_group_unless_told_otherwise():
    """Who asks for a mesh that gives up after 20 s does not wait for ten minutes here."""
    store = torch.distributed.HashStore()
    for own, given, bound in ((0.05, None, 0.05), (1800, None, 600), (1800, 0.05, 0.05)):
        store.set_timeout(timedelta(seconds=own))
        prefixed = torch.distributed.PrefixStore("any", store)
        joined = meeting._join(prefixed, 0, 2, call(timeout=given), late=False)
        assert joined.patience == bound
    store.set_timeout(timedelta(seconds=0.05))
    (error,) = on_threads(lambda: meet(store, 0, 2, call(timeout=None)))
    assert "have waited 0 s" in str(error)


def test_different_calls_are_told_to_all():
    store = Store()
    works = [lambda: meet(store, 0, 3, call("save")), lambda: meet(store, 1, 3, call("load"))]
    outcomes = on_threads(*works, lambda: meet(store, 2, 3, call("save")))
    assert len({str(error) for error in outcomes}) == 1
    assert "rank(s) 0, 2: save('a') at train.py:4; rank(s) 1: load('a')" in str(outcomes[0])


def test_who_comes_too_late_raises_at_once_and_the_next_call_is_met():
    store = Store()
    (error,) = on_threads(lambda: meet(store, 0, 2, call(timeout=0.05)))
    assert "have waited 0 s" in str(error)
    with pytest.raises(ckpt.CoordinationError, match=r"rank 1 came too late: .*have waited 0 s"):
        meet(store, 1, 2, call(timeout=1000.0))
    outcomes = on_threads(*(lambda r=r: meet(store, r, 2, call(subject="'b'")) for r in (0, 1)))
    assert outcomes == [None, None]


def test_calls_of_one_rank_alone_do_not_disturb_the_ones_of_all():
    store = Store()
    for n in range(3):
        with pytest.raises(ckpt.CoordinationError):
            meet(store, 0, 2, call(subject=str(n), timeout=0.01))
    outcomes = on_threads(*(lambda r=r: meet(store, r, 2, call(subject="'b'")) for r in (0, 1)))
    assert outcomes == [None, None]


def test_a_rank_that_failed_before_is_not_waited_for():
    store = Store()
    refused = [lambda r=r: meet(store, r, 3, call(timeout=1000.0)) for r in (0, 2)]
    outcomes = on_threads(*refused, lambda: refuse(store, 1, 3, call(), ValueError("bad step")))
    assert outcomes[2] is None
    for error in outcomes[:2]:
        assert "rank 1 of 3 failed on its way into save('a')" in str(error)
        assert "ValueError: bad step" in str(error)


def test_it_is_told_also_to_those_who_come_later():
    store = Store()
    refuse(store, 1, 2, call(), ValueError("bad step"))
    with pytest.raises(
        ckpt.CoordinationError, match="came too late: rank 1 of 2 failed on its way"
    ):
        meet(store, 0, 2, call(timeout=1000.0))


def test_an_interrupt_is_told(monkeypatch):
    store, sleep = Store(), time.sleep

    def interrupted(seconds):
        if threading.current_thread().name == "interrupted":
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(meeting.time, "sleep", interrupted)

    def rank_0():
        threading.current_thread().name = "interrupted"
        meet(store, 0, 3, call(timeout=1000.0))

    outcomes = on_threads(rank_0, lambda: meet(store, 1, 3, call(timeout=1000.0)))
    assert isinstance(outcomes[0], KeyboardInterrupt)
    assert "rank 0 of 3 was interrupted in save" in str(outcomes[1])


# Real processes: each of these is called on some ranks only, and the others call something later.
CALLS = {
    "save": lambda path, w: ckpt.save(f"{path}/a", w, timeout=0.2),
    "async_save": lambda path, w: ckpt.async_save(f"{path}/a", w, timeout=0.2).wait(),
    "load": lambda path, w: ckpt.load(f"{path}/good", w, timeout=0.2),
    "manager.save": lambda path, w: manager(path, timeout=0.2).save(2, w),
    "manager.async_save": lambda path, w: manager(path, timeout=0.2).async_save(2, w),
    "manager.restore": lambda path, w: manager(path, timeout=0.2).restore(w),
    "manager.restore a step": lambda path, w: manager(path, timeout=0.2).restore(w, step=1),
}


def manager(path, **how):
    return ckpt.CheckpointManager(f"{path}/run", keep_last=1, **how)


def call_on_some(rank, world_size, path, name, callers):
    found = {}
    ckpt.save(f"{path}/good", {"w": torch.ones(3)})
    manager(path).save(1, {"w": torch.ones(3)})
    if rank in callers:
        try:
            CALLS[name](path, {"w": torch.zeros(3)})
        except ckpt.CheckpointError as error:
            found["error"], found["kind"] = str(error), type(error).__name__
    torch.distributed.barrier()
    found["left"] = sorted(os.listdir(path)) + sorted(os.listdir(f"{path}/run"))
    torch.distributed.barrier()
    # Nothing is left behind in any group: the training's own collectives and later calls work.
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    found["sum"] = total.item()
    ckpt.save(f"{path}/after", {"w": torch.full((3,), 2.0)})
    found["after"] = ckpt.read(f"{path}/after")["w"].tolist()
    with open(f"{path}/found-{rank}", "w") as file:
        json.dump(found, file)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_rank_0_only(tmp_path, name):
    testing.outcomes(call_on_some, 3, str(tmp_path), name, [0], timeout=120)
    for rank in range(3):
        with open(f"{tmp_path}/found-{rank}") as file:
            found = json.load(file)
        assert ("error" in found) == (rank == 0)
        assert found["left"] == ["good", "run", "step-00000001"]
        assert found["sum"] == 3.0
        assert found["after"] == [2.0] * 3
        if rank == 0:
            assert found["kind"] == "CoordinationError"
            assert "for rank(s) 1, 2, which have not called it" in found["error"]
            assert "test_meeting.py:" in found["error"]
            assert "rank 1: CheckpointManager.save(1)" in found["error"]


def different_calls(rank, world_size, path):
    ckpt.save(f"{path}/a", {"w": torch.ones(3)})
    staging = ckpt.Staging()
    calls = [
        lambda: ckpt.save(f"{path}/b", {"w": torch.ones(3)}),
        lambda: ckpt.load(f"{path}/a", {"w": torch.zeros(3)}),
        lambda: ckpt.async_save(f"{path}/b", {"w": torch.ones(3)}, staging=staging),
    ]
    with pytest.raises(
        ckpt.CoordinationError, match=r"different calls.*: save\(.*: load\(.*: async_"
    ):
        calls[rank]()
    assert os.listdir(path) == ["a"]
    # Different subjects of one call, and options that ranks must agree on.
    with pytest.raises(ckpt.CheckpointError, match="different paths"):
        ckpt.save(f"{path}/{rank}", {"w": torch.ones(3)})
    with pytest.raises(ckpt.CheckpointError, match="different paths"):
        ckpt.load(f"{path}/{rank}", {"w": torch.ones(3)})
    with pytest.raises(ckpt.CheckpointError, match="disagree about `strict`"):
        ckpt.load(f"{path}/a", {"w": torch.ones(3), "v": torch.ones(1)}, strict=rank == 1)
    with pytest.raises(ckpt.CheckpointError, match="restore different steps"):
        ckpt.CheckpointManager(path).restore({"w": torch.ones(3)}, step=None if rank else 3)
    torch.distributed.barrier()
    assert os.listdir(path) == ["a"]


def test_different_calls_in_processes(tmp_path):
    testing.outcomes(different_calls, 3, str(tmp_path), timeout=120)


def bad_argument(rank, world_size, path, late):
    run = ckpt.CheckpointManager(path)
    time.sleep(0.5 if rank == late else 0)  # the others have raised by then
    with pytest.raises(ValueError if rank == 1 else ckpt.CoordinationError, match="at least 0"):
        run.save(-1 if rank == 1 else 0, {"w": torch.ones(3)})
    # A rank that fails twice before the others have heard of the first tells them the second only.
    torch.distributed.barrier()
    with pytest.raises(
        TypeError if rank == 1 else ckpt.CoordinationError, match=r"rank 1|expected str"
    ):
        ckpt.save(3 if rank == 1 else f"{path}/a", {"w": torch.ones(3)})
    torch.distributed.barrier()
    run.save(0, {"w": torch.ones(3)})
    assert run.steps() == [0]


@pytest.mark.parametrize("late", [None, 0, 1])
def test_an_argument_that_one_rank_cannot_take_ends_the_call_for_all(tmp_path, late):
    testing.outcomes(bad_argument, 3, str(tmp_path / "run"), late, timeout=120)


def test_a_store_that_is_cut_off_is_an_error():
    silent, store = threading.Event(), Store()
    store.add = lambda key, amount: silent.wait(60)
    bounded = BoundedStore(store, seconds=0.1)
    bounded.set("x", "1")
    assert (bounded.get("x"), bounded.check(["x", "y"]), bounded.delete_key("x")) == (
        b"1",
        False,
        True,
    )
    with pytest.raises(KeyError):  # an error of the store's own
        bounded.get("x")
    for words in ("has not answered for 0.1 s", "did not answer before"):
        with pytest.raises(RuntimeError, match=words.replace(".", r"\.")):
            arrive(bounded, 0, 2, call())
    silent.set()
