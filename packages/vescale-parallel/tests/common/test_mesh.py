"""Sizes become a named mesh in the documented order, or an error that says what would fit.

Ranks that ask for other meshes before a process group exists are told within seconds, all.

Real processes, as torchrun starts them: no rank waits for groups that others never make, also where
what one rank asks for is an error by itself. Starting them takes longer than all the rest, so that
one start goes through many cases, of which each joins a world of its own.

Which device `mesh()` gives a process, and which it leaves: by what launchers and callers say.
"""

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from vescale_comm import simulate
from vescale_parallel import DisagreementError, MeshError, mesh
from vescale_parallel._common import mesh as module
from vescale_parallel._common.mesh import resolve_sizes

SIZES = [
    ({"tp": 2, "dp": 2}, 4, {"dp": 2, "tp": 2}),
    ({"tp": 2, "pp": 3, "dp": -1}, 12, {"pp": 3, "dp": 2, "tp": 2}),
    ({"tp": 2, "dp": -1}, 2, {"dp": 1, "tp": 2}),
    ({"rows": 2, "dp": 3}, 6, {"rows": 2, "dp": 3}),
    ({"ep": 1, "cp": 1}, 1, {"cp": 1, "ep": 1}),
]


@pytest.mark.parametrize(("sizes", "world", "expected"), SIZES)
def test_sizes_and_order(sizes: dict[str, int], world: int, expected: dict[str, int]):
    assert list(resolve_sizes(sizes, world).items()) == list(expected.items())


def test_a_product_that_does_not_fit():
    with pytest.raises(MeshError) as caught:
        resolve_sizes({"dp": 2, "tp": 3}, 4)
    text = str(caught.value)
    for part in ("dp=2, tp=3", "needs 6", "4 run", "--nproc-per-node 6", "-1"):
        assert part in text


def test_a_rest_that_does_not_divide():
    with pytest.raises(MeshError, match=r"make 3, which does not divide the 4 process"):
        resolve_sizes({"dp": -1, "tp": 3}, 4)


@pytest.mark.parametrize("size", [0, -2, 1.5, "2", True, None])
def test_a_size_that_is_no_size(size: object):
    with pytest.raises(MeshError, match="positive integer"):
        resolve_sizes({"dp": size}, 4)  # type: ignore[dict-item]


def test_two_sizes_cannot_be_open():
    with pytest.raises(MeshError, match="only one size may be -1"):
        resolve_sizes({"dp": -1, "tp": -1}, 4)


HALVES = [
    (None, "1", "WORLD_SIZE is not set and RANK is 1"),
    (None, "0", "WORLD_SIZE is not set and RANK is 0"),
    ("2", None, "WORLD_SIZE is 2 and RANK is not set"),
    ("two", "0", "WORLD_SIZE is two"),
    ("0", "0", "WORLD_SIZE is 0"),
    ("2", "2", "RANK is 2"),
    ("2", "-1", "RANK is -1"),
]


@pytest.mark.parametrize(("size", "rank", "said"), HALVES)
def test_half_of_a_launcher(
    size: str | None, rank: str | None, said: str, monkeypatch: pytest.MonkeyPatch
):
    for name, value in (("WORLD_SIZE", size), ("RANK", rank)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match=said):
        mesh(device_type="cpu")
    assert not dist.is_initialized()


def test_a_world_of_one_needs_no_rank(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    try:
        assert mesh(device_type="cpu").size() == 1
    finally:
        dist.destroy_process_group()


def test_a_mesh_of_one_process_without_a_launcher():
    assert not dist.is_initialized()
    try:
        made = mesh(tp=1, dp=-1, device_type="cpu")
        assert made.mesh_dim_names == ("dp", "tp")
        assert tuple(made.shape) == (1, 1)
        with pytest.raises(MeshError, match="needs 2 process"):
            mesh(dp=2, device_type="cpu")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("ending", "left"), [("", "False"), ("raise OSError", "True")])
def test_a_script_that_ends_leaves_no_group_of_ours(ending, left):
    """Else gloo's threads abort it now and then; after an error nobody is waited for."""
    script = f"""
import atexit
import torch.distributed as dist
atexit.register(lambda: print(dist.is_initialized()))  # runs after what is registered later
from vescale_parallel import mesh
mesh(tp=1, device_type="cpu")
{ending}
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout.strip() == left, ran.stderr


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "10", True])
def test_a_timeout_that_is_no_time(timeout: object):
    with pytest.raises(MeshError, match="seconds above 0"):
        mesh(device_type="cpu", timeout=timeout)  # type: ignore[arg-type]
    assert not dist.is_initialized()


TIMES = """
from datetime import timedelta
import torch.distributed as dist
from vescale_parallel import mesh
for mine, its in ((None, None), (50, None), (50, 70), (None, 70)):
    if its:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1,
                                timeout=timedelta(seconds=its))
    made = mesh(dp=1, tp=1, device_type="cpu", timeout=mine)
    for group in (dist.group.WORLD, made.get_group("tp")):
        backend = group._get_backend(dist.torch.device("cpu"))
        print(backend.options._timeout.total_seconds(), end=" ")
    dist.destroy_process_group()
    print()
"""


def test_who_makes_the_process_group_sets_its_timeout():
    command = [sys.executable, "-c", TIMES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    found = [line.split() for line in done.stdout.splitlines()]
    assert found[:3] == [["600.0"] * 2, ["50.0"] * 2, ["50.0"] * 2], done.stderr
    assert found[3][0] == "70.0"


def other_calls(rank: int, world_size: int) -> list[str]:
    told = []
    for asked in ({"dp": 4}, {"tp": 2, "rows": 2}, {"dp": 3}, {"tp": 2, "dp": 0}):
        with pytest.raises(DisagreementError) as caught:
            mesh(device_type="cpu", **(asked if rank == 2 else {"dp": 2, "tp": 2}))
        told.append(str(caught.value))
    with pytest.raises(MeshError, match="dp=3"):
        mesh(device_type="cpu", dp=3)
    # Nobody waits, and all can go on together.
    assert mesh(device_type="cpu", dp=2, tp=2).shape == (2, 2)
    return told


def test_ranks_that_ask_for_other_meshes_are_named_on_every_rank():
    told = simulate(4)(other_calls)
    assert all(one == told[0] for one in told)
    sizes, names, product, none = told[0]
    assert "mesh 'sizes': dp=2, tp=2 on ranks 0, 1, 3; dp=4 on rank 2" in sizes
    assert "tp=2, rows=2 on rank 2" in names
    assert "mesh(dp=3) needs 3 process(es) and 4 run(s)" in product
    assert "positive integer" in none


# What rank 1 asks for is another mesh, or none.
_DIFFERENT = {
    "vd, sizes": "vd.init_device_mesh('cpu', (2, 1) if odd else (2,))",
    "vd, order": "vd.init_device_mesh('cpu', (1, 2) if odd else (2, 1))",
    "vd, names": "vd.init_device_mesh('cpu', (2,), mesh_dim_names=('tp',) if odd else ('dp',))",
    "vd, no names": "vd.init_device_mesh('cpu', (2,), mesh_dim_names=None if odd else ('dp',))",
    "vd, device": "vd.init_device_mesh('cuda' if odd else 'cpu', (2,))",
    "vd, index of device": "vd.init_device_mesh('cpu:0' if odd else 'cpu', (2,))",
    "vd, too large": "vd.init_device_mesh('cpu', (8,) if odd else (2,))",
    "vd, too many names": "vd.init_device_mesh('cpu', (2,), mesh_dim_names=('a', 'b')[: 1 + odd])",
    "vd, backends": (
        "vd.init_device_mesh('cpu', (2,), backend_override={0: 'fake' if odd else 'gloo'})"
    ),
    "mesh, sizes": "mesh(device_type='cpu', **({'dp': 2, 'tp': 1} if odd else {'dp': 2}))",
    "mesh, names": "mesh(device_type='cpu', **{'tp' if odd else 'dp': 2})",
    "mesh, does not fit": "mesh(device_type='cpu', dp=3 if odd else 2)",
    "mesh, no size": "mesh(device_type='cpu', dp='2' if odd else 2)",
    "mesh, no time": "mesh(device_type='cpu', dp=2, timeout=-1 if odd else 500)",
    "mesh, device": "mesh(device_type='cuda' if odd else 'cpu', dp=2)",
}
_EACH = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
import vescale_dtensor as vd
from vescale_parallel import mesh
odd = os.environ["RANK"] == "1"
os.environ["LOCAL_RANK"] = "1000" if odd else "0"  # a device that no machine has
calls = sys.argv[1:]
for place, call in enumerate(calls):
    os.environ["MASTER_PORT"] = os.environ["PORTS"].split()[place]
    try:
        eval(call)
    except Exception as error:
        print(place, type(error).__name__, str(error).replace("\\n", " "), flush=True)
    else:
        print(place, "made", flush=True)
    # The store goes with rank 0's world: not before all have been told.
    folder = Path(os.environ["FOLDER"])
    (folder / f"{place} {os.environ['RANK']}").touch()
    while len(list(folder.glob(f"{place} *"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)
    dist.destroy_process_group()
"""


def _ended(folder: Path, size: int, seconds: float, calls: list[str]) -> list[list[str]]:
    """Lines that processes print which end within so many seconds, of each rank."""
    with ExitStack() as open_ports:
        bound = [open_ports.enter_context(socket.socket()) for _ in calls]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        ports = " ".join(str(each.getsockname()[1]) for each in bound)
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "PORTS": ports}
    world["FOLDER"] = str(folder)
    said = [folder / f"said by {rank}" for rank in range(size)]
    started = []
    for rank, output in enumerate(said):
        with output.open("w") as file:
            command = [sys.executable, "-c", _EACH, *calls]
            env = {**os.environ, **world, "RANK": str(rank)}
            started.append(subprocess.Popen(command, stdout=file, stderr=file, env=env))
    deadline = time.monotonic() + seconds
    try:
        codes = [each.wait(max(0.1, deadline - time.monotonic())) for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    told = [output.read_text() for output in said]
    assert codes == [0] * size, told
    return [[line for line in text.splitlines() if line[:1].isdigit()] for text in told]


def test_every_rank_is_told_without_a_group(tmp_path: Path):
    for lines in _ended(tmp_path, 2, 300, list(_DIFFERENT.values())):
        assert len(lines) == len(_DIFFERENT), lines
        for name, line in zip(_DIFFERENT, lines, strict=True):
            error = "CommMismatchError" if name.startswith("vd") else "DisagreementError"
            assert error in line, (name, line)
            assert "rank 1" in line, (name, line)


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_that_ask_for_the_same_get_it(tmp_path: Path, size: int):
    calls = [f"vd.init_device_mesh('cpu', ({size},))", "mesh(device_type='cpu')"]
    for lines in _ended(tmp_path, size, 200, calls):
        assert lines == ["0 made", "1 made"]


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
        # A build for CUDA asks the driver, which need not be there.
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
        # As while a graph is captured, so that nobody asks for the states of its generators.
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return chosen

    return make


DEVICES = [
    (8, None, {}, 0),
    (8, None, {"LOCAL_RANK": "3", "RANK": "11"}, 3),
    (8, 5, {"LOCAL_RANK": "3"}, 5),  # the caller's
    (8, 0, {"LOCAL_RANK": "3"}, 3),  # CUDA was asked something, and nobody chose
    (1, None, {"LOCAL_RANK": "3"}, 0),  # each process sees its own only
    (4, None, SLURM, 1),
    (4, None, {**SLURM, "RANK": "6"}, 2),  # the task starts processes of its own
    (4, None, {"RANK": "6"}, 2),
    (4, None, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 0),
]


@pytest.mark.parametrize(("count", "current", "environ", "expected"), DEVICES)
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
