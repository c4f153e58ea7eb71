"""Which device `mesh()` gives a process, and which it leaves: by what launchers and callers say."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from vescale_comm import simulate
from vescale_parallel import MeshError, mesh
from vescale_parallel._common import mesh as module

NAMES = [name for pair in module._LOCAL_RANKS for name in pair if name]
SLURM = {"RANK": "5", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in (*NAMES, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def make(count: int, current: int | None = None, **environ: str) -> list[int]:
        chosen: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current is not None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        # As while a graph is captured, so that nobody asks for the states of its generators.
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return chosen

    return make


@pytest.mark.parametrize(
    ("count", "current", "environ", "expected"),
    [
        (8, None, {}, 0),
        (8, None, {"LOCAL_RANK": "3", "RANK": "11"}, 3),
        (8, 5, {"LOCAL_RANK": "3"}, 5),  # the caller's
        (8, 0, {"LOCAL_RANK": "3"}, 3),  # CUDA was asked something, and nobody chose
        (1, None, {"LOCAL_RANK": "3"}, 0),  # each process sees its own only
        (4, None, SLURM, 1),
        (4, None, {**SLURM, "RANK": "6"}, 2),  # the task starts processes of its own
        (4, None, {"RANK": "6"}, 2),
        (4, None, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 0),
    ],
)
def test_the_device_of_a_process(
    machine: Any, count: int, current: int | None, environ: dict[str, str], expected: int
):
    chosen = machine(count, current, **environ)
    module._check_device("cuda")
    assert module._device_index() == expected
    assert chosen == []


def test_a_process_too_many_is_told(machine: Any):
    machine(2, None, LOCAL_RANK="2")
    with pytest.raises(MeshError, match="process 2 of this machine has no CUDA device"):
        mesh(dp=1)


def test_a_group_bound_to_a_device_says_which(machine: Any):
    chosen = machine(8, 0, LOCAL_RANK="3")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.group.WORLD.bound_device_id = torch.device("cuda", 6)
        assert module._device_index() == 6
        module._ensure_process_group("cuda", 1.0)
        assert chosen == [6]
        dist.group.WORLD.bound_device_id = None
        # A group of gloo alone beside GPUs: its mesh is one of the host.
        assert mesh(dp=1).device_type == "cpu"
    finally:
        dist.destroy_process_group()


def test_simulated_ranks_share_the_current_device(machine: Any):
    machine(4, 2)
    assert simulate(3)(lambda rank, size: module._device_index()) == [2] * 3
    machine(4)
    assert simulate(3)(lambda rank, size: module._device_index()) == [0] * 3
