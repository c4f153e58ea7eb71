"""A process that dies at any operation of a save leaves the old checkpoint or the new one, whole.

What dies or fails on other storages, in managers and beside other writers: `test_fault_sweep`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulated_ranks import piece_of, save_on
from faulty_storage import FaultyStorage, Killed, die
from vescale_ckpt import NotFoundError, read, verify

OLD, NEW = 1.0, 2.0


def value_at(path):
    """The value of the whole and verified checkpoint at `path`, None if there visibly is none."""
    try:
        verify(path)
    except NotFoundError:
        return None
    loaded = read(path)
    assert loaded["w"].unique().tolist() == [loaded["value"]]
    return loaded["value"]


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
