"""Alpha-beta links, clusters of them, and the time of a collective."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final

from vescale_parallel._common.messages import did_you_mean, listed
from vescale_parallel._errors import ParallelError, PlanError


def is_number(value: object) -> bool:
    """Return whether a value is a real number, of Python or numpy; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def require_rates(error: type[ParallelError], **rates: Any) -> None:
    """Raise the error where a rate is no number above 0, as NaN; what is infinite costs nothing."""
    for name, value in rates.items():
        if not is_number(value) or not value > 0:
            raise error(f"{name}={value!r}: rates are numbers above 0")


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one rank sends over: `latency + bytes / bandwidth` seconds for each step.

    Attributes:
        latency: seconds of one step of a collective (alpha).
        bandwidth: bytes per second of one rank, as reached by large collectives (1 / beta).
        logarithmic: whether a collective among n takes log2(n) steps (trees, recursive doubling)
            or n - 1 (rings).
    """

    latency: float
    bandwidth: float
    logarithmic: bool = True

    def __post_init__(self) -> None:
        """Refuse what is no time, or no rate."""
        require_rates(PlanError, bandwidth=self.bandwidth)
        if not is_number(self.latency) or not 0 <= self.latency < math.inf:
            raise PlanError(f"latency={self.latency!r}: seconds are a number from 0 up")

    def steps(self, members: int) -> int:
        """Steps of one all-gather or reduce-scatter."""
        return math.ceil(math.log2(members)) if self.logarithmic else members - 1


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices in nodes, links inside of a node and between nodes.

    Attributes:
        per_node: devices of a node. Ranks fill nodes in order, the last mesh axis innermost.
        inside, between: links of one device to others of its node, and of other nodes.
        flops: peak floating-point operations per second of a device in the compute dtype.
        efficiency: the part of them that matrix products of the model reach.
        memory: bytes of a device.
        memory_bandwidth: bytes per second that an optimizer's update reads and writes.
        overlap: the part of the computation behind which gathers and reductions over data-parallel
            axes can hide; 0 where collectives are waited for one by one.
        host: the link between a device and the memory of its host.
        host_bandwidth: bytes per second of that memory in which the update of one device's shards
            reads and writes.
    """

    name: str
    per_node: int
    inside: Link
    between: Link
    flops: float
    efficiency: float
    memory: float
    memory_bandwidth: float
    overlap: float
    host: Link = Link(latency=1e-5, bandwidth=20e9)
    host_bandwidth: float = 20e9

    def __post_init__(self) -> None:
        """Refuse what is no number of devices or bytes, or no rate."""
        names = ("per_node", "flops", "efficiency", "memory", "memory_bandwidth", "host_bandwidth")
        require_rates(PlanError, **{name: getattr(self, name) for name in names})

    def link(self, stride: int, members: int) -> Link:
        """Return the link of a group of ranks that are `stride` apart.

        A group with several members in each node sends to the next node over the network cards of
        all of these at once, up to what the link inside carries.
        """
        # Of a stride beyond a node's devices every member is in a node of its own.
        neighbours = min(members, max(1, self.per_node // stride))
        if members <= neighbours:
            return self.inside
        shared = min(self.inside.bandwidth, self.between.bandwidth * neighbours)
        between = self.between
        return Link(latency=between.latency, bandwidth=shared, logarithmic=between.logarithmic)


def collective_seconds(kind: str, size: float, members: int, link: Link) -> float:
    """Return the seconds of a collective of the whole tensor's `size` bytes among `members`.

    An all-gather or a reduce-scatter sends `(n - 1) / n` of the tensor from each rank; an
    all-reduce is one of each. A "send" is a message of this size to one other.
    """
    if members == 1:
        return 0.0
    if kind == "send":
        return link.latency + size / link.bandwidth
    rounds = 2 if kind == "all_reduce" else 1
    volume = size * (members - 1) / members
    return rounds * (link.steps(members) * link.latency + volume / link.bandwidth)


# Peaks are the vendors' (dense bf16; H100 SXM and A100 data sheets: NVLink 450 and 300 GB/s each
# way, one network card a device of 400 and 200 Gbit/s). Links and efficiency are what large
# collectives and matrix products commonly reach of them: assumptions, to be replaced by
# measurements of the cluster at hand. So are those of the host: PCIe 5 and 4 with 16 lanes (64 and
# 32 GB/s on paper) for each device, and an eighth of what two processors' memory carries.
CLUSTERS: Final = {
    "h100": Cluster(
        name="h100",
        per_node=8,
        inside=Link(latency=5e-6, bandwidth=360e9),
        between=Link(latency=15e-6, bandwidth=42e9),
        flops=989e12,
        efficiency=0.6,
        memory=80e9,
        memory_bandwidth=2.5e12,
        overlap=0.8,
        host=Link(latency=1e-5, bandwidth=50e9),
        host_bandwidth=50e9,
    ),
    "a100": Cluster(
        name="a100",
        per_node=8,
        inside=Link(latency=5e-6, bandwidth=240e9),
        between=Link(latency=15e-6, bandwidth=21e9),
        flops=312e12,
        efficiency=0.65,
        memory=80e9,
        memory_bandwidth=1.5e12,
        overlap=0.8,
        host=Link(latency=1e-5, bandwidth=24e9),
        host_bandwidth=35e9,
    ),
}


def named_cluster(cluster: str | Cluster) -> Cluster:
    """Return the cluster of that name, or the one that is given.

    Raises:
        PlanError: there is none of that name.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if cluster not in CLUSTERS:
        near = did_you_mean(cluster, CLUSTERS)
        raise PlanError(f"no cluster '{cluster}'.{near} There are {listed(CLUSTERS)}.")
    return CLUSTERS[cluster]
