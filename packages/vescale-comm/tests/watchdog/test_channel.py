"""Ranks read what others wrote, know who is gone, and a world without processes has no watchdog."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist
from vescale_comm import CommArgumentError, as_group, bound_waits, simulate
from vescale_comm._watchdog.channel import Answer, Channel, Ending
from vescale_comm._watchdog.crash import CrashNote
from vescale_comm._watchdog.current_watcher import current
from vescale_comm._watchdog.log_store import LogStore
from vescale_comm._watchdog.places import main_thread
from vescale_comm._watchdog.watcher import Watcher
from vescale_comm.testing import run

ANSWER = Answer("waiting in barrier", "barrier", (0, 1))


@pytest.fixture
def channels(tmp_path):
    return [Channel(dist.FileStore(str(tmp_path / "store"), 3), rank, 3) for rank in range(3)]


def test_a_question_is_answered_by_rank(channels):
    assert channels[0].asked() == 0
    assert channels[2].ask() == 1
    assert channels[0].asked() == 1
    assert [channels[0].ask(1), channels[1].ask(1)] == [2, 2]  # at the same time: one question
    assert channels[2].asked() == 2
    channels[0].answer(1, ANSWER)
    channels[1].answer(1, Answer("at train.py:3 in step"))
    assert channels[2].answers(1) == {0: ANSWER, 1: Answer("at train.py:3 in step")}
    assert channels[2].answers(2) == {}


def test_endings_are_there_when_they_are_counted(channels):
    ending = Ending("all_reduce timed out", op="all_reduce", ranks=(0, 2))
    channels[1].end(ending)
    assert channels[0].ended() == 1
    assert channels[0].endings() == {1: ending}


def test_a_process_of_this_host_that_is_gone_is_known_to_be(channels, monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(60)
    channels[0].introduce()
    monkeypatch.setattr("os.getpid", lambda: child.pid)
    channels[1].introduce()
    assert [*channels[2].gone(range(3))] == [1]  # rank 2 has said nothing, so nothing is known
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert channels[2].gone(range(3)) == {}


def test_a_process_that_crashed_is_known_with_its_line(channels, tmp_path, monkeypatch):
    note = tmp_path / "note"
    code = f"import faulthandler, os; faulthandler.enable(open({str(note)!r}, 'w')); os.abort()"
    script = tmp_path / "train.py"
    script.write_text(code)
    child = subprocess.Popen([sys.executable, script])
    child.wait(60)
    monkeypatch.setattr("os.getpid", lambda: child.pid)
    channels[1].introduce(note)
    (fate,) = channels[2].gone([1]).values()
    assert f"crashed in C++: Aborted, at {script}:1 in <module>; gloo aborts where" in fate


def test_a_note_is_there_while_its_process_is_and_old_ones_go(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("faulthandler.is_enabled", lambda: False)
    enabled = []
    monkeypatch.setattr("faulthandler.enable", enabled.append)
    monkeypatch.setattr("faulthandler.disable", enabled.clear)
    old, new = (tmp_path / f"vescale-comm-{name}.crash" for name in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    note = CrashNote()
    note.open()
    assert {*tmp_path.iterdir()} == {new, note.path}
    assert len(enabled) == 1
    note.close()
    assert [*tmp_path.iterdir()] == [new]
    assert enabled == []


def test_without_a_place_for_a_note_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr("faulthandler.is_enabled", lambda: False)
    note = CrashNote()
    note.open()
    assert note.path is None
    note.close()


def test_one_question_serves_all_that_wait(channels, monkeypatch, caplog):
    """Without its thread: a watcher looks when it is told to."""
    watchers = [Watcher(channel, server=None) for channel in channels]
    stuck = {1: 0.0}
    for watcher in watchers[1:]:
        monkeypatch.setattr(watcher._tracker, "update", lambda now: stuck)
        monkeypatch.setattr(watcher, "here", lambda: Answer("waiting in x", "x", (0, 1, 2)))
    monkeypatch.setattr(watchers[0], "here", lambda: Answer("at train.py:3 in step"))
    for now in (29.0, 31.0, 36.0, 41.0, 46.0, 51.0):
        for watcher in watchers:
            watcher.look(now)
    assert channels[0].asked() == 1
    assert len(caplog.messages) == 3  # each rank, once
    for message in caplog.messages:
        assert message.startswith("a collective does not complete (rank ")
        assert message.endswith(
            "\n  rank 0: at train.py:3 in step\n  ranks 1, 2: waiting in x; missing: rank 0"
        )


def test_an_error_of_another_rank_is_logged_at_the_next_look_and_its_consequences_are_not(
    channels, caplog
):
    channels[1].end(Ending("raised ValueError: boom"))
    channels[2].end(Ending("raised RankFailedError: x", consequence=True))
    watcher = Watcher(channels[0], server=None)
    watcher.look(0.0)
    watcher.look(5.0)
    assert caplog.messages == ["rank 1: raised ValueError: boom"]


def watched(rank, world_size):
    as_group()
    found = current()
    bound_waits(timeout=1800, report_after=60)
    changed = found.report_after, found.interval
    bound_waits(timeout=1800)
    return found is current(), changed, found.report_after, found.interval


def test_a_world_has_one_watchdog_that_reports_after_half_a_minute():
    assert run(watched, 2) == [(True, (60, 5.0), 30.0, 5.0)] * 2


def unwatched(rank, world_size):
    as_group()
    bound_waits()
    return current()


def test_a_simulated_world_has_none_since_its_deadlocks_are_found_at_once():
    assert simulate(2)(unwatched) == [None] * 2


@pytest.mark.parametrize("times", [{"timeout": 0}, {"report_after": -1}, {"timeout": float("nan")}])
def test_times_are_positive(times):
    with pytest.raises(CommArgumentError, match="has to be positive"):
        bound_waits(**times)


def test_an_infinite_timeout_is_refused():
    with pytest.raises(CommArgumentError, match="timeout is a finite number"):
        bound_waits(timeout=float("inf"))


def test_worlds_of_several_sizes_share_a_store():
    store, seen = dist.HashStore(), set()
    for size in (3, 2, 2, 4, 3, 1):
        worlds = {LogStore(store, rank, size)._world for rank in range(size)}
        assert len(worlds) == 1, "the ranks of a world meet"
        assert not worlds & seen, "and read nothing of earlier ones"
        seen |= worlds


FORKED = """
import os, signal
from vescale_comm._watchdog.crash import CrashNote
note = CrashNote()
note.open()
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGSEGV)
os.waitpid(child, 0)
print(repr(note.path.read_text()))
note.close()
"""


def test_the_crash_of_a_forked_process_is_its_own():
    env = {name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"}
    command = [sys.executable, "-c", FORKED]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "''"


def test_without_a_store_a_wait_for_a_group_still_ends(channels, monkeypatch):
    watcher, ended = Watcher(channels[0], server=None), []
    watcher.timeout, watcher.gone = 10.0, True
    monkeypatch.setattr(watcher._tracker, "update", lambda now: {main_thread(): 0.0})
    monkeypatch.setattr("vescale_comm._watchdog.watcher.makes_a_group", lambda frame: True)
    monkeypatch.setattr("vescale_comm._watchdog.watcher.end_process", ended.append)
    watcher.look(12.0)
    assert not ended
    watcher.look(40.0)
    assert "timed out after 10 s" in ended[0]
