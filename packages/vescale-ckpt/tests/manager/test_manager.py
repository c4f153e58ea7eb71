"""The manager finds the newest committed checkpoint and never removes the only one."""

import gc
import json
import math
import os
import subprocess
import sys

import pytest
import torch
import vescale_ckpt as ckpt
from faulty_storage import AtCall, FaultyStorage, disk_full_once
from object_store import ObjectStore
from vescale_ckpt import save
from vescale_ckpt._manager.provenance import by_age
from vescale_ckpt._storage import directory_lock
from vescale_ckpt._storage.local import LocalStorage, lock_directory


def state(step):
    return {"w": torch.full((3,), float(step)), "step": step}


def restored(manager, **options):
    return manager.restore(into=state(0), **options)["step"]


def test_keeps_the_last_ones(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path / "run", keep_last=2)
    assert manager.latest() is None
    for step in (1, 5, 10, 20):
        manager.save(step, state(step))
        assert manager.latest() == step
        assert restored(manager) == step
    assert manager.steps() == [10, 20]
    assert sorted(os.listdir(tmp_path / "run")) == ["step-00000010", "step-00000020"]
    assert restored(manager, step=10) == 10


def test_keeps_all_by_default(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path)
    for step in range(5):
        manager.save(step, state(step))
    assert manager.steps() == [0, 1, 2, 3, 4]


def test_the_one_just_saved_stays_even_if_it_is_older(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path, keep_last=1)
    manager.save(100, state(100))
    manager.save(50, state(50))
    assert manager.steps() == [50]
    manager = ckpt.CheckpointManager(tmp_path, keep_last=2)
    manager.save(200, state(200))
    manager.save(10, state(10))
    assert manager.steps() == [10, 200]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_saved_after_going_back_is_the_newest(tmp_path, asynchronous):
    manager = ckpt.CheckpointManager(tmp_path, keep_last=3)
    for step in (50, 100, 110):
        manager.save(step, state(step))
    # Another process goes back, and the steps beyond are left behind.
    manager = ckpt.CheckpointManager(tmp_path, keep_last=3)
    assert restored(manager, step=50) == 50
    save = manager.async_save if asynchronous else manager.save
    for step, kept in ((60, [60, 100, 110]), (70, [60, 70, 110]), (80, [60, 70, 80])):
        save(step, state(step))
        manager.wait()
        assert manager.steps() == kept
        assert manager.latest() == manager.latest_healthy() == step
        # Whoever comes after a crash.
        assert restored(ckpt.CheckpointManager(tmp_path)) == step
    assert manager.latest() == 80


def test_what_is_damaged_pushes_out_nothing_and_stays(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path, keep_last=2)
    for step in (1, 2):
        manager.save(step, state(step))
    (tmp_path / "step-00000002" / "COMMIT").write_text("{}")
    manager = ckpt.CheckpointManager(tmp_path, keep_last=2)
    # It is the newest; asking for it by its step says what is wrong with it.
    assert manager.latest() == restored(manager) == 1
    with pytest.raises(ckpt.FormatError, match="COMMIT"):
        restored(manager, step=2)
    for step, kept in ((3, [1, 2, 3]), (4, [2, 3, 4])):
        manager.save(step, state(step))
        assert manager.steps() == kept
        assert restored(manager) == step


@pytest.mark.parametrize("newest", ["data", "missing", "manifest"])
def test_the_newest_that_verifies_is_restored(tmp_path, newest, caplog):
    manager = ckpt.CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        manager.save(step, state(step))
    damage(tmp_path / "step-00000003", newest)
    damage(tmp_path / "step-00000002", "data")
    manager = ckpt.CheckpointManager(tmp_path)
    assert manager.latest() == (2 if newest == "manifest" else 3)
    into = state(0)
    assert manager.restore(into=into)["step"] == 1
    assert torch.equal(into["w"], torch.ones(3))
    assert [caplog.text.count(f"step-0000000{n} is damaged") for n in (1, 2, 3)] == [0, 1, 1]
    with pytest.raises(ckpt.CorruptError):
        restored(manager, step=2)
    damage(tmp_path / "step-00000001", "data")
    # No beginning of a run, for which nothing would be found.
    with pytest.raises(ckpt.CorruptError, match=r"damaged: \[1, 2, 3\]; `into` may hold parts"):
        restored(manager)


@pytest.mark.parametrize("what", ["data", "manifest"])
def test_the_run_goes_on_over_what_was_passed_over(tmp_path, what):
    manager = ckpt.CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, state(step))
    damage(tmp_path / "step-00000002", what)
    manager = ckpt.CheckpointManager(tmp_path)
    with pytest.raises(ckpt.ExistsError):  # nobody has found it damaged
        manager.save(2, state(2))
    assert restored(manager) == 1
    manager.save(2, state(2))
    assert restored(ckpt.CheckpointManager(tmp_path)) == 2
    with pytest.raises(ckpt.ExistsError):
        manager.save(2, state(2))


def damage(checkpoint, what):
    (data,) = checkpoint.rglob("*.safetensors")
    if what == "missing":
        data.unlink()
        return
    path = data if what == "data" else next(iter(checkpoint.rglob("manifest.json")))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


OTHER_RUN = """
import sys, torch, vescale_ckpt as ckpt
ckpt._storage.directory_lock._PATIENCE = 0.1
manager = ckpt.CheckpointManager(sys.argv[1])
try:
    manager.save(9, {"w": torch.ones(3), "step": 9})
except ckpt.StorageError as error:
    print(error)
print(manager.restore(into={"w": torch.zeros(3), "step": 0})["step"], manager.steps())
"""


def test_a_second_run_is_refused(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path)
    manager.save(1, state(1))
    again = ckpt.CheckpointManager(tmp_path)  # of this process: the same run
    again.save(2, state(2))

    def other():
        command = [sys.executable, "-c", OTHER_RUN, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout

    said = other()
    assert "another run saves into" in said
    assert said.endswith("2 [1, 2]\n")  # it may read
    del manager, again
    gc.collect()
    assert other() == "9 [1, 2, 9]\n"


def test_a_root_is_held_by_rank_0_and_not_by_what_it_forked(tmp_path, monkeypatch):
    monkeypatch.setattr("vescale_ckpt._storage.directory_lock._PATIENCE", 0.1)
    path, other = str(tmp_path), ckpt.CheckpointManager(tmp_path)
    # As another run sees it: through a file that it has opened itself.
    locked = directory_lock._locked
    asked = (1, False, None, None, None)
    other._options(0, *asked)
    with pytest.raises(ckpt.StorageError):
        locked(path)
    other._options(1, *asked)  # another process is rank 0 now
    descriptor = locked(path)
    os.close(descriptor)
    other._options(0, *asked)
    inherited = os.dup(other._hold._descriptor)  # the same open file, as in a worker
    other._hold._process = -1
    other._hold = None
    with pytest.raises(ckpt.StorageError):  # which ends, and leaves the lock to its parent
        locked(path)
    mine = directory_lock.Hold(inherited)
    inherited = os.dup(inherited)
    del mine
    os.close(locked(path))
    os.close(inherited)


def test_who_is_refused_closes_its_own_file_once(tmp_path, monkeypatch):
    monkeypatch.setattr("vescale_ckpt._storage.directory_lock._PATIENCE", 0.0)
    held = os.open(tmp_path, os.O_RDONLY)
    lock_directory(held, str(tmp_path))
    with pytest.raises(ckpt.StorageError) as refused:
        directory_lock.hold(str(tmp_path))
    again = os.dup(held)  # takes the number that was free
    del refused
    gc.collect()
    os.close(again)
    os.close(held)


def test_what_says_nothing_of_its_order_is_as_new_as_its_clock_says(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path, keep_last=2)
    manager.save(10, state(10))
    save(manager.path(20), state(20))
    assert manager.latest() == restored(manager) == 20
    manager.save(15, state(15))
    assert manager.steps() == [15, 20]


def test_the_order_counts_more_than_the_clock():
    known = {
        # Saved before there were orders, and two of a program that writes none.
        50: {"created": "1"},
        100: {"created": "2"},
        120: {"created": "4"},
        125: {"created": "4"},
        # In order, by clocks that are not.
        60: {"created": "3", "order": 1},
        130: {"created": "8", "order": 2},
        110: {"created": "7", "order": 3},
        # Damaged: where its step is.
        90: None,
    }
    assert by_age(known) == [50, 100, 60, 90, 120, 125, 130, 110]


class WithBadManifests(LocalStorage):
    """Manifests are written with a byte that is wrong; those of steps in `away` cannot be read."""

    bad, away = False, ()

    def put(self, path, content):
        wrong = self.bad and path.endswith("manifest.json")
        super().put(path, content[:-1] + b" " if wrong else content)

    def open(self, path):
        if path.endswith("manifest.json") and any(f"{step:08d}/" in path for step in self.away):
            raise ckpt.StorageError(f"cannot open {path}: 503")
        return super().open(path)


def test_one_that_was_saved_damaged_pushes_out_nothing(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path, keep_last=1)
    manager._storage = storage = WithBadManifests()
    manager.save(1, state(1))
    storage.bad = True
    manager.save(2, state(2))
    assert manager.steps() == [1, 2]
    storage.bad = False
    manager.save(3, state(3))
    # What is damaged stays to be looked at.
    assert manager.steps() == [2, 3]


def test_in_an_outage_no_older_one_is_the_newest(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path)
    for step in (50, 100, 60):
        manager.save(step, state(step))
    manager = ckpt.CheckpointManager(tmp_path, keep_last=1)
    manager._storage = storage = WithBadManifests()
    storage.away = (60,)
    for call in (manager.latest, lambda: restored(manager), lambda: manager.save(70, state(70))):
        with pytest.raises(ckpt.StorageError, match="503"):
            call()
    assert manager.steps() == [50, 60, 100]
    # Removed by another process between two looks: that is no outage.
    steps = manager.steps()
    manager.steps = lambda: [*steps, 200]
    storage.away = ()
    assert manager.latest() == restored(manager) == 60


@pytest.mark.parametrize("storage", [LocalStorage(), ObjectStore()])
def test_where_all_are_kept_a_save_looks_at_no_other(tmp_path, storage):
    counting = AtCall(storage, math.inf, None)
    calls = []
    manager = ckpt.CheckpointManager(tmp_path)
    manager._storage = counting
    for step in range(5):
        manager.save(step, state(step))
        calls.append(len(counting.log))
        counting.log.clear()
    assert calls[1] == calls[-1]


def test_the_newest_is_found_without_looking_at_data_files(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path)
    manager.save(1, state(1))
    manager = ckpt.CheckpointManager(tmp_path)
    manager._storage = counting = AtCall(LocalStorage(), math.inf, None)
    assert manager.latest() == 1
    assert not [call for call in counting.log if "safetensors" in call]


def test_a_save_that_fails_removes_nothing(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, state(1))
    with pytest.raises(Exception, match="object"):
        manager.save(2, {"w": object()})
    with pytest.raises(ckpt.ExistsError):
        manager.save(1, state(9))
    assert restored(manager) == 1
    manager.save(1, state(9), overwrite=True)
    assert restored(manager) == 9


def test_what_is_not_committed_is_not_seen(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path, keep_last=3)
    with pytest.raises(ckpt.NotFoundError, match="no committed checkpoint in"):
        restored(manager)
    manager.save(1, state(1))
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000003").write_text("not a directory")
    (tmp_path / "other").mkdir()
    assert manager.steps() == [1]
    with pytest.raises(ckpt.NotFoundError, match="did you mean"):
        restored(manager, step=7)


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path, keep_last=2)
    for name in (".step-00000009.saving-g-0123456789abcdef", ".step-00000003.removing"):
        (tmp_path / name / "g-0123456789abcdef").mkdir(parents=True)
        (tmp_path / name / "g-0123456789abcdef" / "r00000.safetensors").write_bytes(b"half")
    (tmp_path / ".mine").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    manager.save(1, state(1))
    assert sorted(os.listdir(tmp_path)) == [".mine", "notes.txt", "step-00000001"]


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match="keep_last must be at least 1"):
        ckpt.CheckpointManager(tmp_path, keep_last=0)
    for option in ("keep_last", "keep_every", "keep_best"):
        for wrong in (math.nan, math.inf, 2.5, -1, "3"):
            with pytest.raises(ValueError, match=f"{option} must be at least 1"):
                ckpt.CheckpointManager(tmp_path, **{option: wrong})
    with pytest.raises(ValueError, match="a step is at least 0"):
        ckpt.CheckpointManager(tmp_path).save(-1, state(1))


def test_keeps_every_and_best(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path, keep_last=1, keep_every=10, keep_best=2)
    losses = {5: 3.0, 10: 2.0, 12: 0.5, 15: float("nan"), 20: 0.7, 21: 0.5, 22: 9.0}
    for step, loss in losses.items():
        manager.save(step, state(step), metric=loss)
    # 12 and 21 are the best, 10 and 20 are multiples, 22 is the last.
    assert manager.steps() == [10, 12, 20, 21, 22]
    assert manager.metrics() == {s: losses[s] for s in manager.steps()}
    largest = ckpt.CheckpointManager(tmp_path, keep_best=1, best="max")
    largest.save(23, state(23))
    assert largest.steps() == [22, 23]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("how", [{"metric": NAN}, {"metric": -INF}, {"healthy": False}])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_unhealthy_pushes_out_nothing_that_is_good(tmp_path, how, asynchronous):
    manager = ckpt.CheckpointManager(tmp_path, keep_last=2, keep_every=100, keep_best=1)
    save = manager.async_save if asynchronous else manager.save
    for step in (1, 2, 3):
        save(step, state(step), metric=float(step))
    for step in (4, 5, 100):
        save(step, state(step), **how)
        manager.wait()
        # The last of the bad ones stays to be looked at.
        assert manager.steps() == [1, 2, 3, step]
        assert manager.latest() == step
        assert manager.latest_healthy() == 3
        assert restored(manager) == 3
        assert restored(ckpt.CheckpointManager(tmp_path)) == 3
        assert restored(manager, step=step) == step
    save(101, state(101), metric=9.0)
    manager.wait()
    assert manager.steps() == [1, 3, 101]


def test_one_that_is_kept_beside_one_that_is_unhealthy(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, state(1))
    manager.save(2, state(2), metric=NAN)
    assert manager.steps() == [1, 2]
    manager.save(3, state(3))
    assert manager.steps() == [3]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_unhealthy_replaces_nothing_that_is_good(tmp_path, asynchronous):
    manager = ckpt.CheckpointManager(tmp_path)
    save = manager.async_save if asynchronous else manager.save
    save(1, state(1))
    manager.wait()
    with pytest.raises(
        ckpt.ExistsError, match="is a healthy checkpoint, and the one to replace it"
    ):
        save(1, state(9), metric=NAN, overwrite=True)
    assert restored(manager) == 1
    # A bad one may be replaced, by whatever; and what is said counts more than the metric.
    for how in ({"healthy": False}, {"metric": NAN}, {"healthy": True, "metric": NAN}):
        save(2, state(2), **how, overwrite=True)
    manager.wait()
    assert manager.latest_healthy() == 2


def test_only_unhealthy_ones(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path, keep_last=3)
    manager.save(1, state(1), metric=NAN)
    assert manager.latest_healthy() is None
    with pytest.raises(ckpt.NotFoundError, match=r"by `step` an unhealthy one can be: \[1\]"):
        manager.restore(into=state(0))
    assert restored(manager, step=1) == 1
    assert manager.metrics() == {}


def unhealthy_on_one_rank(rank, world_size, path):
    manager = ckpt.CheckpointManager(path, keep_last=1)
    for step, healthy in ((1, True), (2, rank != 1), (3, rank != 1)):
        # The second goes by the plan of the first.
        manager.async_save(step, state(step), healthy=healthy)
    manager.wait()
    manager.save(4, state(4), metric=NAN if rank == 2 else 1.0)
    return manager.steps(), restored(manager), manager.latest_healthy()


def test_one_rank_that_knows_of_something_bad_is_enough(tmp_path):
    testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")
    assert testing.run(unhealthy_on_one_rank, 3, str(tmp_path)) == [([1, 4], 1, 1)] * 3


def test_the_manifest_is_legal_json(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path)
    manager.save(1, {"loss": NAN, "bound": -INF, "w": torch.tensor([NAN, INF])}, metric=INF)
    found = list(tmp_path.rglob("manifest.json"))
    refuse = pytest.fail
    for path in found:
        json.loads(path.read_text(), parse_constant=lambda name: refuse(f"{name} is not JSON"))
    loaded = ckpt.read(manager.path(1))
    assert repr(loaded["loss"]) == "nan"
    assert loaded["bound"] == -INF
    assert len(found) == 1


def test_the_best_need_not_have_a_metric(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path, keep_best=1)
    for step in (1, 2):
        manager.save(step, state(step))
        assert manager.steps() == [step]


def test_asynchronous_saves_are_pruned_after(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path, keep_last=2)
    value = state(0)
    for step in range(1, 6):
        value["w"].fill_(step)
        value["step"] = step
        assert manager.async_save(step, value).path == manager.path(step)
    value["w"].fill_(0)
    assert restored(manager) == 5
    assert manager.steps() == [4, 5]
    assert manager.restore(into=state(0))["w"].tolist() == [5, 5, 5]


def test_an_asynchronous_failure_comes_with_the_next_call_and_removes_nothing(tmp_path):
    manager = ckpt.CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, state(1))
    manager._storage = FaultyStorage(7, disk_full_once)
    manager.async_save(2, state(2))
    with pytest.raises(ckpt.StorageError, match="No space left"):
        manager.wait()
    assert manager.steps() == [1]
    assert restored(manager) == 1
    assert sorted(os.listdir(tmp_path)) == ["step-00000001"]
