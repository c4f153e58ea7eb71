"""Measures what the cost model takes for granted: links, and the speed of products and updates.

On the ranks of the run that it predicts, at the same time on all of them: on shared cores each rank
has a part of the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from vescale_parallel.cost import Cluster, Link

SMALL, LARGE = 256, 2**20
"""Elements of the two all-reduces from which latency and bandwidth follow."""


def seconds(call: Callable[[], object], repeat: int = 9) -> float:
    """The median on this rank, all ranks beginning together; the first call warms up."""
    found = []
    for turn in range(repeat + 1):
        dist.barrier()
        start = time.perf_counter()
        call()
        if turn:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def link_of(mesh: DeviceMesh, axis: str) -> Link:
    """Latency and bandwidth of the groups of one axis, from a small and a large all-reduce."""
    group, n = mesh[axis].get_group(), mesh[axis].size()
    if n == 1:
        return Link(latency=0.0, bandwidth=float("inf"))
    tensors = torch.ones(SMALL), torch.ones(LARGE)
    small, large = (seconds(partial(dist.all_reduce, one, group=group)) for one in tensors)
    rounds = 2 * (n - 1)
    sent = 4 * rounds / n * (LARGE - SMALL)
    # A machine that others use may take longer for the small one.
    return Link(
        latency=small / rounds, bandwidth=sent / max(large - small, 1e-9), logarithmic=False
    )


def product_rate(tokens: int, width: int, wide: int) -> float:
    """Floating-point operations per second of a matrix product of these extents."""
    x, w = torch.randn(tokens, width), torch.randn(width, wide)
    return 2 * tokens * width * wide / seconds(lambda: x @ w)


def update_rate(elements: int = 2**20) -> float:
    """Bytes per second that a fused AdamW reads and writes, as the model counts them."""
    parameter = torch.nn.Parameter(torch.ones(elements))
    parameter.grad = torch.ones(elements)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    # States and parameters both ways, gradients once.
    return 4 * elements * (2 * 2 + 2 + 1) / seconds(optimizer.step)


def cluster_of(mesh: DeviceMesh, tokens: int, width: int, wide: int) -> Cluster:
    """This run as a cluster of one node, whose collectives are waited for one by one."""
    links = [link_of(mesh, axis) for axis in mesh.mesh_dim_names or ()]
    slowest = max(links, key=lambda one: one.latency)
    return Cluster(
        name="gloo",
        per_node=dist.get_world_size(),
        inside=slowest,
        between=slowest,
        flops=product_rate(tokens, width, wide),
        efficiency=1.0,
        memory=float("inf"),
        memory_bandwidth=update_rate(),
        overlap=0.0,
    )
