"""Axes that cross hosts are ordinary groups: two network namespaces with two ranks each.

The namespaces have a cable between them and nothing else in common, as two machines have. Where the
system does not let one make them, the test is skipped and says what the system said.
"""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PROGRAM = """
import os
import socket
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from vescale_comm import (
    Emulator, all_gather, all_reduce, all_reduce_hierarchical, checked, group_of, trace,
)

dist.init_process_group("gloo")
rank, host = dist.get_rank(), int(os.environ["GROUP_RANK"])
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local"))
inside, across = group_of(mesh, "local"), group_of(mesh, "host")
xs = [torch.randn(3000, generator=torch.Generator().manual_seed(r)) for r in range(4)]
with checked(timeout=30), trace() as t:
    total = all_reduce_hierarchical(xs[rank], inside, across, order="rank")
    hosts = all_gather(torch.full((1 + host,), host), across, sizes=[1, 2])
    flat = all_reduce(xs[rank], group_of(mesh, ("host", "local")), order="tree")
rows = [Emulator(2).all_reduce(xs[2 * i:2 * i + 2], order="rank")[0] for i in (0, 1)]
assert torch.equal(total, Emulator(2).all_reduce(rows, order="rank")[0])
assert torch.equal(flat, Emulator(4).all_reduce(xs, order="tree")[0])
assert hosts.tolist() == [0, 1, 1]
names = [None] * 4
dist.all_gather_object(names, [name for _, name in socket.if_nameindex()])
axes, same = sorted(t.bytes_by_axis()), names[0] == names[2]
line = f"rank {rank} host {host} {t.counts()} {axes} {same}\\n"
os.write(1, line.encode())  # at once, lest the lines of two ranks mix
dist.destroy_process_group()
"""


def ip(*args):
    done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(args)}: {done.stderr.strip() or done.returncode}")


@contextmanager
def two_hosts():
    """Names of two namespaces and of the ends of their cable, 10.99.7.1 and 10.99.7.2."""
    if shutil.which("ip") is None:
        pytest.skip("the command ip (iproute2) is not installed")
    names = [f"vescale-{os.getpid()}-{side}" for side in "ab"]
    cable = [f"vc{os.getpid() % 100000}{side}" for side in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
            for index, (name, end) in enumerate(zip(names, cable, strict=True), 1):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "addr", "add", f"10.99.7.{index}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"this system does not let us make two network namespaces: {error}")
        yield list(zip(names, cable, strict=True))
    finally:
        for name in names:
            with suppress(OSError):
                ip("netns", "del", name)  # its end of the cable goes with it
        with suppress(OSError):
            ip("link", "del", cable[0])


# Starts the ranks of a host as torchrun does; they share what one process has imported.
FORKED = """
import os
import sys

import vescale_comm

host, program = int(sys.argv[1]), compile(open(sys.argv[2]).read(), sys.argv[2], "exec")
os.environ |= {"MASTER_ADDR": "10.99.7.1", "MASTER_PORT": "29517", "WORLD_SIZE": "4"}
ranks = []
for local in (0, 1):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ |= {"GROUP_RANK": str(host), "RANK": str(2 * host + local)}
        exec(program, {"__name__": "__main__"})
        sys.exit()
sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def forked(script, host):
    return [sys.executable, "-c", FORKED, str(host), str(script)]


def by_torchrun(script, host):
    where = ["--nnodes=2", f"--node-rank={host}", "--master-addr=10.99.7.1", "--master-port=29517"]
    return [*TORCHRUN, *where, "--nproc-per-node=2", str(script)]


def start(command, name, end):
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *command],
        env=os.environ | {"GLOO_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


COMMANDS = [forked, pytest.param(by_torchrun, marks=pytest.mark.slow)]


@pytest.mark.parametrize("command", COMMANDS, ids=["forked", "torchrun"])
def test_two_hosts_are_two_axes(tmp_path, command):
    script = Path(tmp_path, "program.py")
    script.write_text(PROGRAM)
    with two_hosts() as hosts:
        runs = [start(command(script, index), *host) for index, host in enumerate(hosts)]
        try:
            printed = [each.communicate(timeout=150)[0] for each in runs]
        finally:
            for each in runs:
                each.kill()
    counts = "{'reduce_scatter': 1, 'all_reduce': 4, 'all_gather': 2}"
    for host, (each, text) in enumerate(zip(runs, printed, strict=True)):
        assert each.returncode == 0, text
        for rank in (2 * host, 2 * host + 1):
            # The two hosts see interfaces of different names: they are two.
            axes = "['host', 'host*local', 'local']"
            assert f"rank {rank} host {host} {counts} {axes} False" in text
