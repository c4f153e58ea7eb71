"""A save that dies at any storage operation leaves the old checkpoint or the new one, whole."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from emulated_ranks import piece_of, save_on, sharded, succeed
from faulty_storage import FaultyStorage, Killed, die
from vescale_ckpt import CheckpointManager, NotFoundError, read, save, verify

OLD, NEW = 1.0, 2.0


def state_of(value):
    return {"w": torch.full((100,), value), "value": value}


def die_at_every_operation(save_into, make_old):
    """Yield (operation number, path after the death) for each operation of a save."""
    at = 0
    while True:
        at += 1
        path = make_old(at)
        storage = FaultyStorage(at, die)
        try:
            save_into(storage, path)
        except Killed:
            yield storage.log[-1], path
            continue
        assert len(storage.log) == at - 1
        assert at > 12
        return


def value_at(path):
    """The value of the whole and verified checkpoint at `path`, None if there visibly is none."""
    try:
        verify(path)
    except NotFoundError:
        return None
    loaded = read(path)
    assert loaded["w"].unique().tolist() == [loaded["value"]]
    return loaded["value"]


def save_alone(storage, path, **options):
    outcome = save_on([state_of(NEW)], path, storages=[storage], **options)[0]
    if isinstance(outcome, BaseException):
        raise outcome


def test_a_first_save_is_absent_or_complete(tmp_path):
    seen = set()
    deaths = die_at_every_operation(save_alone, lambda at: f"{tmp_path}/{at}/run/step")
    for operation, path in deaths:
        value = value_at(path)
        assert value in (None, NEW), operation
        seen.add(value)
    assert seen == {None, NEW}


def test_an_overwrite_is_the_old_or_the_new(tmp_path):
    def make_old(at):
        path = f"{tmp_path}/{at}/step"
        save(path, state_of(OLD))
        return path

    def overwrite(storage, path):
        save_alone(storage, path, overwrite=True)

    seen = []
    for operation, path in die_at_every_operation(overwrite, make_old):
        seen.append(value_at(path))
        assert seen[-1] in (OLD, NEW), operation
        # Whatever is left there does not stand in the way of the next save.
        save(path, state_of(3.0), overwrite=True)
        assert value_at(path) == 3.0
        assert len([n for n in os.listdir(path) if n.startswith("g-")]) == 1
    assert seen == sorted(seen)
    assert set(seen) == {OLD, NEW}


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_dies(tmp_path, victim):
    whole = torch.arange(200.0).reshape(2, 100)
    for at in range(1, 40):
        path = f"{tmp_path}/{victim}-{at}/step"
        storages = [FaultyStorage(at if rank == victim else None, die) for rank in range(2)]
        states = [{"w": piece} for piece in sharded(whole, 2)]
        outcomes = save_on(states, path, storages=storages)
        if not any(isinstance(outcome, Killed) for outcome in outcomes):
            succeed(outcomes)
            break
        # The other rank is told, or finds out; and what is there is whole.
        assert all(isinstance(outcome, BaseException) for outcome in outcomes)
        try:
            assert read(path)["w"].equal(whole)
        except NotFoundError:
            assert not os.path.exists(path)
    else:
        pytest.fail("a save of two ranks should not take 40 operations")
    assert at > 4


def test_manager_keeps_the_last_good_one_whatever_dies(tmp_path):
    at, finished = 0, False
    while not finished:
        at += 1
        storage = FaultyStorage(at, die)
        manager = CheckpointManager(tmp_path / str(at), keep_last=1)
        manager.save(1, state_of(OLD))
        manager._storage = storage
        try:
            manager.save(2, state_of(NEW))
            finished = True
        except Killed:
            pass
        survivor = CheckpointManager(tmp_path / str(at), keep_last=1)
        assert value_at(survivor.path(survivor.latest())) in (OLD, NEW), storage.log[-1]
        survivor.save(3, state_of(3.0))
        assert os.listdir(tmp_path / str(at)) == ["step-00000003"]
    assert at > 15


def test_two_writers_whatever_the_interleaving(tmp_path):
    # While one save stands still before its n-th operation, another goes all the way, or waits.
    at = 0
    while True:
        at += 1
        path = f"{tmp_path}/{at}/step"
        save(path, state_of(OLD))
        other = threading.Thread(target=lambda p=path: save(p, state_of(3.0), overwrite=True))

        def stand_still(storage, at=at, other=other):
            if len(storage.log) == at:
                other.start()
                other.join(0.05)

        storage = FaultyStorage(at, stand_still)
        save_alone(storage, path, overwrite=True)
        if len(storage.log) < at:
            break
        other.join()
        assert value_at(path) in (NEW, 3.0), storage.log[at - 1]
        assert len([n for n in os.listdir(path) if n.startswith("g-")]) == 1
    assert at > 15


# One interpreter that forks for every operation: importing torch is what takes time.
FORKING = """
import json, os, sys, torch
from emulated_ranks import save_on
from faulty_storage import FaultyStorage, die_for_real
from vescale_ckpt import save
torch.set_num_threads(1)
statuses = []
while not statuses or statuses[-1] == 9:
    at = len(statuses) + 1
    path = f"{sys.argv[1]}/{at}/step"
    save(path, {"w": torch.full((100,), 1.0), "value": 1.0})
    pid = os.fork()
    if not pid:
        state = {"w": torch.full((100,), 2.0), "value": 2.0}
        save_on([state], path, storages=[FaultyStorage(at, die_for_real)], overwrite=True)
        os._exit(0)
    statuses.append(os.waitpid(pid, 0)[1])
print(json.dumps(statuses))
"""


def test_kill_minus_nine_at_every_operation(tmp_path):
    here = str(Path(__file__).parent.parent)
    parent = subprocess.run(
        [sys.executable, "-c", FORKING, tmp_path],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([here, *sys.path]),
            "OMP_NUM_THREADS": "1",
        },
        timeout=120,
        check=True,
        capture_output=True,
    )
    statuses = json.loads(parent.stdout)
    assert len(statuses) > 20
    assert statuses[-1] == 0
    values = [value_at(f"{tmp_path}/{at}/step") for at in range(1, len(statuses) + 1)]
    assert values == sorted(values)
    assert set(values) == {OLD, NEW}


def test_leftovers_of_a_dead_save_do_not_count(tmp_path):
    path = f"{tmp_path}/step"
    piece = piece_of(torch.zeros(4), [((0,), (4,))])
    outcome = save_on([{"w": piece}], path, storages=[FaultyStorage(6, die)])[0]
    assert isinstance(outcome, Killed)
    assert [name.startswith(".step.saving-") for name in os.listdir(tmp_path)] == [True]
    with pytest.raises(NotFoundError, match="begun and never completed"):
        read(path)
