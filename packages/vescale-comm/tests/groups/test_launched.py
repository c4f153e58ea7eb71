"""Every start of a launcher has a world of its own in the one store; who does not come is named."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from vescale_comm import CommTimeoutError, init_process_group
from vescale_comm._groups.launched_world import world_store
from vescale_comm._watchdog.current_watcher import says_of_restarts

SIZE = 4


def joined(store, ranks, seconds=20.0):
    """What ranks, as threads, find in the store: a key that each writes, and those of all."""
    found = {}

    def join(rank):
        try:
            own = world_store(store, rank, SIZE, seconds)
        except CommTimeoutError as error:
            found[rank] = str(error)
            return
        fresh = own.add("key", 0) == 0 or own.check(["begun"])
        own.set("begun", "")
        own.add("key", 1)
        found[rank] = fresh and own

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
        time.sleep(0.005)
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_no_start_sees_what_another_one_wrote(seed):
    """Ranks of some starts die after they drew a number, or after they were answered."""
    order, store = random.Random(seed), dist.HashStore()
    for _ in range(4):
        for _ in range(order.randrange(3)):  # they die here
            dist.PrefixStore("vescale_comm/worlds", store).add("drawn", 1)
        ranks = order.sample(range(SIZE), SIZE)
        found = joined(store, ranks)
        assert all(found[rank] for rank in range(SIZE))
        assert {own.add("key", 0) for own in found.values()} == {SIZE}


def test_who_does_not_come_is_named():
    store = dist.HashStore()
    assert "waited 0.3 s for ranks 1, 3: look" in joined(store, [0, 2], 0.3)[0]
    assert joined(store, [2], 0.1)[2].startswith(
        "init_process_group: rank 2 of 4 has waited 0.1 s for rank 0"
    )
    assert all(joined(store, range(SIZE)).values())


def test_a_second_group_is_refused_at_once(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "1")  # and nobody serves a store
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="twice"):
            init_process_group("gloo")
    finally:
        dist.destroy_process_group()


def test_an_address_of_an_earlier_start_is_called_one(monkeypatch):
    error = RuntimeError("Gloo connectFullMesh failed with ... SO_ERROR: Connection refused")
    assert says_of_restarts(error) == ""
    for name, value in (("AGENT_STORE", "True"), ("RESTART_COUNT", "2")):
        monkeypatch.setenv(f"TORCHELASTIC_{name.replace('AGENT', 'USE_AGENT')}", value)
    monkeypatch.setenv("RANK", "0")
    assert "vescale_comm.init_process_group" in says_of_restarts(error)
    assert says_of_restarts(RuntimeError("shapes differ")) == says_of_restarts(None) == ""


PROGRAM = """
import os, signal, torch, vescale_comm
from vescale_comm import as_group, all_reduce
import torch.distributed as dist
start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
vescale_comm.init_process_group("gloo")
if start < 3 and rank == start % 2:
    os.kill(os.getpid(), signal.SIGKILL)
total = all_reduce(torch.ones(2), as_group(None))
print("start", start, "total", int(total[0]), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_restarts_of_torchrun_come_back(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with subprocess.Popen(
        [*command, "--max-restarts=3", str(script)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launched:
        try:
            said, _ = launched.communicate(timeout=300)
        finally:
            if launched.poll() is None:
                os.killpg(launched.pid, signal.SIGKILL)
    assert said.count("start 3 total 2") == 2
