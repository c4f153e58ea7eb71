"""Ranks that ask for other meshes before a process group exists are told within seconds, all.

Real processes, as torchrun starts them: no rank waits for groups that others never make, also where
what one rank asks for is an error by itself. Starting them takes longer than all the rest, so that
one start goes through many cases, of which each joins a world of its own.
"""

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

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
