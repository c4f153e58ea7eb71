"""Whatever happens at whichever call of a save, on every kind of storage: the old checkpoint or the
new one loads, what was reported as saved is there, and the next save goes through."""

import itertools
import threading

import faulty_storage
import pytest
import torch
import vescale_ckpt as ckpt
from emulated_ranks import load_on, save_on, sharded
from object_store import ObjectStore
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from vescale_ckpt._coordination.coordinator import SingleProcess
from vescale_ckpt._load.load import LoadOptions, load_with
from vescale_ckpt._save.save import SaveOptions, save_with
from vescale_ckpt._storage.commit_lookup import read_commit
from vescale_ckpt._storage.local import LocalStorage
from vescale_ckpt.dcp import StorageWriter

OLD, NEW, OTHER, NEXT = 1.0, 2.0, 3.0, 4.0
SLOW = pytest.mark.slow


FAULTS = [
    faulty_storage.fails_once,
    faulty_storage.fails_from_then_on,
    faulty_storage.answer_is_lost,
    faulty_storage.dies_before,
    faulty_storage.dies_after,
]


def local(tmp_path):
    return LocalStorage(), str(tmp_path)


def object_store(tmp_path):
    return ObjectStore(), "store://bucket"


def fsspec_memory(tmp_path):
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    from vescale_ckpt._storage.fsspec_storage import FsspecStorage

    return FsspecStorage("memory://"), f"memory:/{tmp_path}"


def fsspec_local(tmp_path):
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    from vescale_ckpt._storage.fsspec_storage import FsspecStorage

    return FsspecStorage("local", fsspec.filesystem("file")), str(tmp_path)


# The first two are the fastest, and what runs on every change.
OTHERS = [pytest.param(fsspec_memory, marks=SLOW), pytest.param(fsspec_local, marks=SLOW)]


def save_value(storage, path, value, *, overwrite, coordinator=None):
    state = {"w": torch.full((100,), value), "value": value}
    options = SaveOptions(overwrite=overwrite)
    save_with(storage, coordinator or SingleProcess(), path, state, options)


def value_at(storage, path):
    """The value of the whole checkpoint at `path`, None if there visibly is none."""
    try:
        found = load_with(storage, SingleProcess(), path, ckpt.WHOLE, LoadOptions())
    except (ckpt.NotFoundError, ckpt.UncommittedError):
        return None
    assert found["w"].unique().tolist() == [found["value"]]
    return found["value"]


def outcome_of(save, *arguments, **options):
    """None, or what was raised, also a death."""
    try:
        save(*arguments, **options)
    except (Exception, faulty_storage.Killed) as error:
        return error
    return None


def goes_on(storage, path, found):
    """The next save goes through: without `overwrite` where no checkpoint is to be seen."""
    save_value(storage, path, NEXT, overwrite=found is not None)
    assert value_at(storage, path) == NEXT


@pytest.mark.parametrize("make", [object_store, local, *OTHERS])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_fault_at_every_call(tmp_path, make, fault, overwrite):
    storage, root = make(tmp_path)
    seen = set()
    for at in itertools.count(1):
        path = f"{root}/{at}/step"
        if overwrite:
            save_value(storage, path, OLD, overwrite=False)
        faulty = faulty_storage.AtCall(storage, at, fault)
        raised = outcome_of(save_value, faulty, path, NEW, overwrite=overwrite)
        found = value_at(storage, path)
        assert found in (OLD if overwrite else None, NEW), faulty.log
        if raised is None:
            assert found == NEW, faulty.log
        goes_on(storage, path, found)
        if len(faulty.log) < at:
            break
        seen.add(found)
    assert at > 12
    if fault is faulty_storage.dies_after:
        assert seen == {OLD if overwrite else None, NEW}


class DyingPeer(SingleProcess):
    """From the n-th exchange on the other ranks are gone."""

    def __init__(self, at):
        super().__init__()
        self.at, self.exchanges = at, 0

    def exchange(self, message):
        self.exchanges += 1
        if self.exchanges >= self.at:
            raise ckpt.CoordinationError("rank 0 lost the other ranks")
        return super().exchange(message)


@pytest.mark.parametrize("make", [object_store, local, fsspec_memory])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_rank_that_dies_at_every_meeting(tmp_path, make, overwrite):
    storage, root = make(tmp_path)
    seen = []
    for at in itertools.count(1):
        path = f"{root}/{at}/step"
        if overwrite:
            save_value(storage, path, OLD, overwrite=False)
        peer = DyingPeer(at)
        raised = outcome_of(save_value, storage, path, NEW, overwrite=overwrite, coordinator=peer)
        found = value_at(storage, path)
        assert found in (OLD if overwrite else None, NEW)
        goes_on(storage, path, found)
        if raised is None:
            break
        assert isinstance(raised, ckpt.CoordinationError)
        assert (found == NEW) == ("while the save was committed" in str(raised))
        seen.append(found)
    assert seen == [OLD if overwrite else None] * 2 + [NEW]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("overwrite", [False, True])
def test_one_of_two_ranks_dies_at_every_call(tmp_path, victim, overwrite):
    def states_of(value):
        return [{"w": piece, "n": value} for piece in sharded(torch.full((40,), value), 2)]

    def loaded(path):
        into = torch.zeros(40)
        (found,) = load_on([{"w": into, "n": 0}], path, storages=[store])
        if isinstance(found, (ckpt.NotFoundError, ckpt.UncommittedError)):
            return None
        assert into.unique().tolist() == [found["n"]]
        return found["n"]

    store = ObjectStore()
    for at in itertools.count(1):
        path = f"store://bucket/{at}"
        if overwrite:
            assert save_on(states_of(OLD), path, storages=[store] * 2) == [None] * 2
        storages = [store, store]
        storages[victim] = faulty_storage.AtCall(store, at, faulty_storage.dies_before)
        outcomes = save_on(states_of(NEW), path, storages=storages, overwrite=overwrite)
        found = loaded(path)
        assert found in (OLD if overwrite else None, NEW)
        # The next one, where it may have to wait for nothing and nobody.
        again = save_on(states_of(NEXT), path, storages=[store] * 2, overwrite=found is not None)
        assert again == [None] * 2
        assert loaded(path) == NEXT
        if outcomes == [None] * 2:
            break
    assert at > (10 if victim == 0 else 3)


@pytest.mark.parametrize("make", [object_store, pytest.param(local, marks=SLOW), *OTHERS])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_writer_at_every_call(tmp_path, make, overwrite):
    storage, root = make(tmp_path)
    told = set()
    for at in itertools.count(1):
        path, others = f"{root}/{at}/step", []
        if overwrite:
            save_value(storage, path, OLD, overwrite=False)

        def other_saves(path=path, others=others):
            others.append(outcome_of(save_value, storage, path, OTHER, overwrite=overwrite))

        # It goes all the way, or (rightly) waits for the lock of the first.
        thread = threading.Thread(target=other_saves)

        def stands_still(faulty, call, thread=thread):
            if faulty_storage.is_first(faulty):
                thread.start()
                thread.join(0.2)
            return call()

        faulty = faulty_storage.AtCall(storage, at, stands_still)
        mine = outcome_of(save_value, faulty, path, NEW, overwrite=overwrite)
        if len(faulty.log) < at:
            break
        thread.join()
        outcomes = {NEW: mine, OTHER: others[0]}
        saved = [value for value, raised in outcomes.items() if raised is None]
        found = value_at(storage, path)
        assert found in saved, (faulty.log, outcomes)
        if overwrite:
            assert saved == [NEW, OTHER], (faulty.log, outcomes)
        else:
            refused = [raised for raised in outcomes.values() if raised is not None]
            assert all(isinstance(raised, ckpt.ExistsError) for raised in refused), outcomes
            # A store without locks has a moment between the last look and the put.
            late = faulty.log[at - 1 :]
            moment = not storage.renames and "put COMMIT" in late and len(late) < 12
            assert len(refused) == 1 or moment, faulty.log
        told.add(len(saved))
        goes_on(storage, path, found)
    assert at > 12
    assert (2 if overwrite else 1) in told


@pytest.mark.parametrize("make", [object_store, pytest.param(local, marks=SLOW)])
@pytest.mark.parametrize(
    "fault", [faulty_storage.answer_is_lost, faulty_storage.dies_before, faulty_storage.dies_after]
)
def test_a_manager_at_every_call(tmp_path, make, fault):
    storage, root = make(tmp_path)
    for at in itertools.count(1):

        def manager_on(one, at=at):
            manager = ckpt.CheckpointManager(f"{tmp_path}/{at}", keep_last=1)
            manager.root, manager._storage = f"{root}/{at}", one
            return manager

        manager = manager_on(storage)
        manager.save(1, {"w": torch.full((100,), OLD), "value": OLD})
        faulty = manager._storage = faulty_storage.AtCall(storage, at, fault)
        outcome_of(manager.save, 2, {"w": torch.full((100,), NEW), "value": NEW})
        survivor = manager_on(storage)
        latest = survivor.latest()
        assert value_at(storage, survivor.path(latest)) == {1: OLD, 2: NEW}[latest], faulty.log
        # A job that was resumed comes to the same step again.
        survivor.save(2, {"w": torch.full((100,), NEXT), "value": NEXT}, overwrite=latest == 2)
        assert storage.names_in(survivor.root) == ["step-00000002"]
        assert len(storage.names_in(survivor.path(2))) == 2
        assert survivor.restore({"w": torch.zeros(100), "value": 0})["value"] == NEXT
        if len(faulty.log) < at:
            break
    assert at > 12


@pytest.mark.parametrize("make", [object_store, local, fsspec_memory, fsspec_local])
def test_a_damaged_commit_can_be_replaced(tmp_path, make):
    storage, root = make(tmp_path)
    path = f"{root}/step"
    for damage in (b"", b"nonsense", b"x" * 5000):
        save_value(storage, path, OLD, overwrite=True)
        storage.remove_file(f"{path}/COMMIT")
        storage.put(f"{path}/COMMIT", damage)
        with pytest.raises(ckpt.ExistsError):
            save_value(storage, path, NEW, overwrite=False)
        goes_on(storage, path, OLD)


@pytest.mark.parametrize("make", [object_store, local, fsspec_memory])
def test_a_commit_that_names_nothing_counts_for_nothing(tmp_path, make):
    storage, root = make(tmp_path)
    manager = ckpt.CheckpointManager(tmp_path, keep_last=2)
    manager.root, manager._storage = root, storage
    for step in (1, 2, 3):
        manager.save(step, {"value": step})
    # As if the generation were gone.
    name = read_commit(storage, manager.path(3)).generation
    for file in storage.names_in(f"{manager.path(3)}/{name}"):
        storage.remove_file(f"{manager.path(3)}/{name}/{file}")
    storage.remove_directory(f"{manager.path(3)}/{name}")
    assert manager.steps() == [2]
    assert (manager.latest(), manager.restore({"value": 0})["value"]) == (2, 2)
    manager.save(4, {"value": 4})
    assert manager.steps() == [2, 4]
    manager.save(3, {"value": 33})
    assert manager.steps() == [3, 4]
    assert manager.restore({"value": 0})["value"] == 33


@pytest.mark.filterwarnings("ignore:.*single process:UserWarning")
@pytest.mark.parametrize(
    "fault",
    [faulty_storage.fails_once, faulty_storage.fails_from_then_on, faulty_storage.answer_is_lost],
)
def test_dcp_save_at_every_call(monkeypatch, fault):
    store = ObjectStore()
    for at in itertools.count(1):
        path = f"store://bucket/{at}"
        save_value(store, path, OLD, overwrite=False)
        faulty = faulty_storage.AtCall(store, at, fault)
        outcomes = []
        for storage, value in ((faulty, NEW), (store, NEXT)):
            monkeypatch.setattr("vescale_ckpt._dcp.writer.storage_of", lambda _, s=storage: s)
            state = {"w": torch.full((100,), value), "value": value}
            try:
                # The second goes the same way, and through.
                dcp.save(state, storage_writer=StorageWriter(path, overwrite=True), no_dist=True)
                outcomes.append(None)
            except CheckpointException as error:
                outcomes.append(error)
            found = value_at(store, path)
            assert found in ((OLD, NEW) if storage is faulty else (NEXT,)), faulty.log
            assert found == value or outcomes[-1] is not None, faulty.log
        assert outcomes[1] is None
        if len(faulty.log) < at:
            break
    assert at > 12
