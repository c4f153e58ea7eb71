"""A world that is destroyed and made again, with other ranks or fewer, is another one, for all that
is kept from one save to the next."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from vescale_ckpt import CheckpointManager, RankLocal, Staging, async_save, load, read, save
from vescale_ckpt._coordination.torch_groups import timeout_of

testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")


def enter(path, number, rank, world_size):
    store = dist.FileStore(f"{path}/store-{number}", world_size)
    wait = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=wait)


def save_everywhere(path, number, rank, staging, manager):
    """Save by all that keeps a group; what comes back is each rank's own."""
    place, state = f"{path}/world-{number}", {"own": RankLocal(rank), "w": torch.full((4,), 1.0)}
    # The second goes by the plan of the first, which holds in this world only.
    for _ in range(2):
        async_save(place, state, staging=staging, overwrite=True).wait(30)
    found = [read(place)["own"].values]
    save(place, state, overwrite=True)
    found.append(read(place)["own"].values)
    # The handle is waited for, but not the manager: what is left to do is of this world.
    manager.async_save(number, state).wait(30)
    assert manager.latest() == number
    found.append(read(manager.path(number))["own"].values)
    own = load(place, {"own": RankLocal(None), "w": torch.zeros(4)})["own"]
    assert own.value == rank
    return found


def in_several_worlds(rank, world_size, path):
    staging, manager = Staging(), CheckpointManager(f"{path}/run", keep_last=1)
    found = save_everywhere(path, 0, rank, staging, manager)
    dist.destroy_process_group()
    enter(path, 1, 2 - rank, 3)
    # The store that was passed has another one.
    assert timeout_of(dist.group.WORLD, torch.device("cpu")) == 30
    if rank == 0:  # as a process that has come new
        staging, manager = Staging(), CheckpointManager(f"{path}/run", keep_last=1)
    found += save_everywhere(path, 1, 2 - rank, staging, manager)
    group = dist.new_group([0, 1])
    if rank > 0:
        async_save(f"{path}/pair", {"own": RankLocal(rank)}, group=group, staging=staging).wait(30)
    dist.destroy_process_group()
    if rank == 0:
        return found
    enter(path, 2, rank - 1, 2)
    found += save_everywhere(path, 2, rank - 1, staging, manager)
    group = dist.new_group([0, 1])
    async_save(f"{path}/again", {"own": RankLocal(-rank)}, group=group, staging=staging).wait(30)
    found.append(read(f"{path}/again")["own"].values)
    dist.destroy_process_group()
    if rank == 1:
        return found
    enter(path, 3, 0, 1)
    found += save_everywhere(path, 3, 0, staging, manager)
    dist.destroy_process_group()
    found += save_everywhere(path, 4, 0, staging, manager)
    # Of the worlds that are gone nothing is kept: their groups have threads and connections.
    assert len(staging._channels) == 1
    manager.wait()
    assert manager.steps() == [4]
    return found


def test_worlds_that_are_made_again(tmp_path):
    three, two = [(0, 1, 2)] * 6, [(0, 1)] * 3 + [(-1, -2)]
    first, second, third = testing.run(in_several_worlds, 3, str(tmp_path))
    assert first == three
    assert second == three + two
    assert third == three + two + [(0,)] * 6
