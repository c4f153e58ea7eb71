"""An asynchronous save is the state as it was when it was called, whatever happens afterwards."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
import vescale_ckpt as ckpt
from emulated_ranks import on_ranks, sharded
from faulty_storage import FaultyStorage, disk_full_once
from vescale_ckpt._coordination.coordinator import SingleProcess
from vescale_ckpt._save.async_save import async_save_with
from vescale_ckpt._save.save import SaveOptions
from vescale_ckpt._storage.local import LocalStorage

testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")


@pytest.fixture(autouse=True)
def threads_wait_for_nobody(monkeypatch):
    """The ranks here are threads, but none waits for its turn."""
    monkeypatch.setattr("vescale_ckpt._save.save.have_own_processes", lambda processes: True)


def states_of(whole, ranks):
    return [{"w": piece, "n": 1} for piece in sharded(whole, ranks, gap=3)]


def save_async_on(states, path, *, storages=None, stagings=None):
    """Each rank's None or exception."""

    def work(coordinator):
        rank = coordinator.rank
        storage = storages[rank] if storages else LocalStorage()
        staging = stagings[rank] if stagings else ckpt.Staging()
        options = SaveOptions(overwrite=True)
        handle = async_save_with(storage, coordinator, path, states[rank], options, staging)
        handle.wait(20)

    return on_ranks(len(states), work)


class SlowStorage(LocalStorage):
    """Writes only when it is told to."""

    def __init__(self):
        self.go = threading.Event()

    def create(self, path):
        assert self.go.wait(20)
        return super().create(path)


def test_what_is_in_flight_is_bounded(path):
    state = {f"w{i}": torch.full((1000,), float(i)) for i in range(40)}
    staging, storage = ckpt.Staging(max_bytes=32_000), SlowStorage()
    threading.Timer(0.1, storage.go.set).start()
    (outcome,) = save_async_on([state], path, storages=[storage], stagings=[staging])
    assert outcome is None
    assert staging.buffers.allocated <= 32_000
    loaded = ckpt.read(path)
    assert all(loaded[name].equal(tensor) for name, tensor in state.items())


def test_a_tensor_larger_than_all_buffers(path):
    whole = torch.randn(100, 100)
    (outcome,) = save_async_on([{"w": whole}], path, stagings=[ckpt.Staging(max_bytes=5000)])
    assert outcome is None
    assert ckpt.read(path)["w"].equal(whole)


def test_buffers_are_reused(tmp_path):
    staging, weight = ckpt.Staging(), torch.zeros(1000)
    for step in range(5):
        weight.fill_(step)
        ckpt.async_save(tmp_path / str(step), {"w": weight}, staging=staging)
    staging.wait()
    assert staging.buffers.allocated == 4000
    assert [ckpt.read(tmp_path / str(s))["w"][0].item() for s in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bad", [0, 1])
def test_what_fails_in_the_background_fails_on_all_ranks(path, bad):
    whole = torch.arange(200.0).reshape(20, 10)
    ckpt.save(path, {"w": torch.zeros(20, 10)})
    for at in (1, 3, 5, 8):
        storages = [FaultyStorage(at if r == bad else None, disk_full_once) for r in range(2)]
        outcomes = save_async_on(states_of(whole, 2), path, storages=storages)
        if len(storages[bad].log) >= at and any(outcomes):
            assert [type(o) for o in outcomes] == [ckpt.StorageError] * 2
            assert len({str(o) for o in outcomes}) == 1
            assert f"rank {bad} of 2" in str(outcomes[0])
            assert ckpt.read(path)["w"].unique().tolist() == [0]
            assert os.listdir(os.path.dirname(path)) == ["step-1"]


def test_an_error_comes_with_the_next_save_and_only_once(tmp_path):
    staging = ckpt.Staging()
    storage = FaultyStorage(6, disk_full_once)
    options = SaveOptions()

    state = {"w": torch.ones(3)}
    async_save_with(storage, SingleProcess(), tmp_path / "a", state, options, staging)
    with pytest.raises(ckpt.StorageError, match="No space left"):
        ckpt.async_save(tmp_path / "b", state, staging=staging)
    ckpt.async_save(tmp_path / "b", state, staging=staging).wait()
    assert os.listdir(tmp_path) == ["b"]


def fail_in_the_background(path, **options):
    storage, state = FaultyStorage(6, disk_full_once), {"w": torch.ones(3)}
    options = SaveOptions(**options)
    return async_save_with(storage, SingleProcess(), path, state, options, ckpt.Staging())


def test_a_failure_that_nobody_waits_for_is_told(path, caplog):
    handle = fail_in_the_background(path)
    handle._ended.wait(20)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"the asynchronous save of {path} failed" in caplog.text
    assert "No space left" in caplog.text
    del handle
    gc.collect()
    assert "nothing has waited for it" in caplog.text


def test_a_failure_that_was_raised_is_not_told_again(path, caplog):
    handle = fail_in_the_background(path)
    with pytest.raises(ckpt.StorageError, match="No space left"):
        handle.wait(20)
    del handle
    gc.collect()
    assert "nothing has waited for it" not in caplog.text


def test_a_log_that_raises_ends_the_save(path, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vescale_ckpt"), "warning", pytest.fail)
    handle = fail_in_the_background(path)
    with pytest.raises(ckpt.StorageError, match="No space left"):
        handle.wait(20)


def test_a_thread_that_ends_itself_ends_the_save(path):
    def progress(done, total):
        sys.exit("enough")

    options, state = SaveOptions(progress=progress), {"w": torch.ones(3)}
    storage, one = LocalStorage(), SingleProcess()
    handle = async_save_with(storage, one, path, state, options, ckpt.Staging())
    with pytest.raises(ckpt.CheckpointError, match="SystemExit: enough"):
        handle.wait(20)
    assert not os.path.exists(path)


def in_a_fork(work):
    """What `work` returns in a forked process, as text; a fork that hangs is killed."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            signal.alarm(20)
            os.write(theirs, str(work()).encode())
        except BaseException as error:
            os.write(theirs, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    return told


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_saves_with_its_parents_staging(tmp_path):
    staging, state, storage = ckpt.Staging(), {"w": torch.ones(3)}, SlowStorage()
    manager = ckpt.CheckpointManager(tmp_path / "run", keep_last=1)
    manager.async_save(1, state)
    ckpt.async_save(tmp_path / "a", state, staging=staging).wait(20)
    options = SaveOptions()
    parents = async_save_with(storage, SingleProcess(), tmp_path / "b", state, options, staging)

    def child():
        ckpt.async_save(tmp_path / "c", state, staging=staging).wait(10)
        manager.async_save(2, state)
        manager.wait()
        return manager.steps()

    assert in_a_fork(child) == "[2]"
    for look in (parents.wait, parents.done):
        assert "of which this one is a fork: wait for it there" in in_a_fork(look)
    storage.go.set()
    parents.wait(20)
    names = ["a", "b", "c", "run"]
    assert sorted(os.listdir(tmp_path)) == names
    assert [ckpt.read(tmp_path / name)["w"].tolist() for name in "abc"] == [[1, 1, 1]] * 3


def test_what_is_refused_is_refused_at_once(tmp_path):
    with pytest.raises(ckpt.StateError, match="at 'x'"):
        ckpt.async_save(tmp_path / "a", {"x": object()})
    ckpt.save(tmp_path / "b", {"x": 1})
    with pytest.raises(ckpt.ExistsError):
        ckpt.async_save(tmp_path / "b", {"x": 2})
    assert os.listdir(tmp_path) == ["b"]


def test_a_copy_that_fails_commits_nothing(path, monkeypatch):
    def broken(self, source):
        raise RuntimeError("device lost")

    monkeypatch.setattr("vescale_ckpt._save.staging_queue.StagingQueue._copy", broken)
    handle = ckpt.async_save(path, {"w": torch.ones(3)})
    with pytest.raises(ckpt.CheckpointError, match="copying the state failed: device lost"):
        handle.wait(20)
    assert not os.path.exists(path)


def test_the_handle_tells(path):
    storage, staging = SlowStorage(), ckpt.Staging()

    state = {"w": torch.ones(1000)}
    handle = async_save_with(storage, SingleProcess(), path, state, SaveOptions(), staging)
    assert not handle.done()
    with pytest.raises(TimeoutError):
        handle.wait(0.01)
    storage.go.set()
    handle.wait(20)
    assert handle.done()
    assert handle.staged_bytes == 4000
    assert handle.blocked_seconds > 0
    assert handle.path == path


def train_and_save(rank, world_size, path):
    staging, weight = ckpt.Staging(), torch.zeros(1000)
    for step in range(3):
        weight += 1
        handle = ckpt.async_save(f"{path}-{step}", {"w": weight}, staging=staging)
        # Training goes on, and talks meanwhile.
        for _ in range(20):
            dist.all_reduce(torch.ones(10))
    handle.wait()
    return [ckpt.read(f"{path}-{step}")["w"][0].item() for step in range(3)]


def test_collectives_of_the_training_do_not_get_mixed_up(path):
    assert testing.run(train_and_save, 3, path) == [[1, 2, 3]] * 3


def save_in_two_groups(rank, world_size, path):
    # Of one group rank 0 is a member and rank 1 is not.
    _, pair, everyone = dist.new_group([0]), dist.new_group([0, 1]), dist.group.WORLD
    staging = ckpt.Staging()
    for step, group in enumerate((pair, None, pair, everyone)):
        if group is not pair or rank < 2:
            state = {"own": ckpt.RankLocal(rank)}
            ckpt.async_save(f"{path}-{step}", state, group=group, staging=staging).wait(30)
    # Torch names groups by how many a process has made: the program's own still get one name.
    later, total = dist.new_group([0, 1, 2]), torch.ones(1)
    dist.all_reduce(total, group=later)
    assert total.item() == 3.0
    return [ckpt.read(f"{path}-{step}")["own"].values for step in range(4)]


def test_one_staging_in_several_groups(path):
    expected = [(0, 1), (0, 1, 2), (0, 1), (0, 1, 2)]
    assert testing.run(save_in_two_groups, 3, path) == [expected] * 3


def save_simulated(rank, world_size, path):
    weight = torch.ones(3)
    handle = ckpt.async_save(path, {"w": weight, "own": ckpt.RankLocal(rank)})
    weight.zero_()
    assert handle.done()


def test_simulated_ranks_that_take_turns_have_saved_when_it_returns(path, monkeypatch):
    monkeypatch.undo()
    pytest.importorskip("vescale_comm").simulate(3)(save_simulated, path)
    found = ckpt.read(path)
    assert found["w"].equal(torch.ones(3))
    assert found["own"] == ckpt.PerRank((0, 1, 2))


_PROGRAM = """
import os, signal, sys
import torch, vescale_ckpt
path, end = sys.argv[1:]
vescale_ckpt.save(path + "-before", {"w": torch.ones(2)})
vescale_ckpt.async_save(path, {"w": torch.ones(3_000_000)})
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
# Held until the end, as a manager holds its own.
staging = vescale_ckpt.Staging()
def appear(done, total):
    os.makedirs(path + "-lost/mine", exist_ok=True)
vescale_ckpt.async_save(path + "-lost", {"w": torch.ones(3)}, staging=staging, progress=appear)
"""


@pytest.mark.parametrize("end", ["regularly", "killed"])
def test_when_the_program_ends(path, end):
    command = [sys.executable, "-c", _PROGRAM, path, end]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    status = ended.returncode
    assert ckpt.read(f"{path}-before")["w"].equal(torch.ones(2))
    if end == "regularly":
        assert status == 0
        assert f"{path}-lost failed: {path}-lost exists and is not a checkpoint" in ended.stderr
        assert ended.stderr.count("nothing has waited for it") == 1
        assert ckpt.read(path)["w"].equal(torch.ones(3_000_000))
    else:
        assert status == -signal.SIGKILL
        # The renaming is the last thing; it has hardly come to that.
        try:
            assert ckpt.read(path)["w"].equal(torch.ones(3_000_000))
        except ckpt.NotFoundError:
            assert not os.path.exists(path)
