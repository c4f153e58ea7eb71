"""Measures what a machine reaches, in seconds, and keeps it in a file for timelines.

Matrix products give flops, a copy gives the bandwidth of memory, one from the host that of its
link, all-gathers of a few sizes give latency and bandwidth of the link by a straight line. Ranks
that are slower decide: all of them get the same numbers, so that what is decided from these is
alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed import ProcessGroup
from vescale_comm import all_gather
from vescale_comm.agreement import gather_numbers

from vescale_parallel._cost import Link, require_rates
from vescale_parallel._errors import GraphError, ParallelError
from vescale_parallel._untrusted import parse_json, read_small

# Rows and columns of the matrices: a size that layers have, and on a device one that takes longer
# than to launch it.
_PRODUCT: Final = {"cpu": 512}
_PRODUCT_ON_DEVICE: Final = 4096
_COPIED: Final = {"cpu": 2**24}  # bytes: more than the caches of most processors
_COPIED_ON_DEVICE: Final = 2**28
_SENT: Final = (2**10, 2**16, 2**20, 2**22)  # bytes of one rank
HOST_LINK: Final = Link(latency=1e-5, bandwidth=2e10)  # where nobody has measured it
_NO_LINK: Final = Link(latency=0.0, bandwidth=1e12)  # of one rank, which sends nothing


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one rank reaches.

    Attributes:
        flops: floating-point operations a second, of matrix products in float32.
        memory_bandwidth: bytes a second that an operation reads and writes.
        link: latency in seconds and bandwidth in bytes a second of a collective's step.
        host: the same of a copy between the device and memory of its host.
    """

    flops: float
    memory_bandwidth: float
    link: Link
    host: Link = HOST_LINK

    def __post_init__(self) -> None:
        """Refuse what is no rate."""
        require_rates(GraphError, flops=self.flops, memory_bandwidth=self.memory_bandwidth)

    def save(self, path: str | Path) -> None:
        """Write the numbers as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read what `save` wrote.

        Raises:
            GraphError: the file holds something else.
        """
        try:
            held = parse_json(read_small(path, 1 << 20))
            links = {name: Link(**held[name]) for name in ("link", "host") if name in held}
            return cls(**(held | links))
        except (TypeError, ValueError, KeyError, OSError, ParallelError) as error:
            raise GraphError(
                f"{path}: not what Machine.save writes ({error}). Measure it again: "
                "graph.calibrate().save(path)"
            ) from error


def calibrate(
    group: ProcessGroup | None = None, *, device: str | None = None, seconds: float = 1.0
) -> Machine:
    """Measure what this machine reaches. Collective over the group.

    Args:
        group: whose link is measured; None: the default group, or no link where there is none.
        device: on which; by default CUDA where it is available.
        seconds: for each of about seven measurements; the best of the repetitions counts.

    Examples:
        machine = graph.calibrate(seconds=0.2)
        machine.save("machine.json")
        print(graph.timeline(step.graph_module, machine=graph.Machine.load("machine.json")))
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = torch.device(device).type
    rows = _PRODUCT.get(kind, _PRODUCT_ON_DEVICE)
    copied = _COPIED.get(kind, _COPIED_ON_DEVICE)
    square = torch.randn(rows, rows, device=device)
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = _best(lambda: square @ square, device, seconds)
    copy = _best(lambda: target.copy_(source), device, seconds)
    pinned = torch.zeros(copied, dtype=torch.uint8, pin_memory=kind != "cpu", device="cpu")
    down = _best(lambda: target.copy_(pinned, non_blocking=True), device, seconds)
    found = [2 * rows**3 / product, 2 * copied / copy, copied / down]
    if not dist.is_initialized():
        host = Link(latency=1e-5, bandwidth=found[2])
        return Machine(flops=found[0], memory_bandwidth=found[1], link=_NO_LINK, host=host)
    group = dist.group.WORLD if group is None else group
    assert group is not None
    took = _gathers(group, device, seconds)
    # As whole nanoseconds and rates: what ranks tell each other are integers.
    told = gather_numbers([*map(int, found), *(int(one * 1e9) for one in took)], group)
    # The slowest rank is the one that the others wait for.
    flops, bandwidth, down = (float(min(row[at] for row in told)) for at in range(3))
    slowest = [max(row[3 + at] for row in told) / 1e9 for at in range(len(_SENT))]
    link = _fitted(slowest, dist.get_world_size(group))
    host = Link(latency=1e-5, bandwidth=down)
    return Machine(flops=flops, memory_bandwidth=bandwidth, link=link, host=host)


def _gathers(group: ProcessGroup, device: str, seconds: float) -> list[float]:
    took = []
    for size in _SENT:
        sent = torch.zeros(size, dtype=torch.uint8, device=device)
        # All ranks repeat it equally often, whatever their clocks say.
        times = 5 + int(seconds / 1e-3 / (1 + size / 2**16))

        def gather(sent: Tensor = sent) -> Tensor:
            return all_gather(sent, group)

        # The least and not the mean: what other programs take of the machine only ever adds.
        took.append(min(_timed(gather, device) for _ in range(min(times, 200))))
    return took


def _fitted(took: list[float], members: int) -> Link:
    """The line `steps * latency + bytes / bandwidth` through what gathers took."""
    if members == 1:
        return _NO_LINK
    # What one rank receives.
    volumes = [size * (members - 1) for size in _SENT]
    # Not below: where noise makes the large message the faster one, a bandwidth would be negative.
    slope = max((took[-1] - took[0]) / (volumes[-1] - volumes[0]), 1e-15)
    link = Link(latency=0.0, bandwidth=1 / slope)
    latency = max(took[0] - volumes[0] * slope, 0.0) / link.steps(members)
    return Link(latency=latency, bandwidth=1 / slope)


def measured_seconds(graph: fx.GraphModule, *inputs: Any, rounds: int = 5) -> dict[str, float]:
    """Run a graph node by node and return how long each took, the fastest of some rounds.

    What a collective sends is counted where it is started, until it has arrived; so there is no
    overlap in these numbers, and none in what `timeline(..., seconds=)` is given. Where the graph
    writes to its inputs, so does each round. Collective if the graph is.

    Args:
        graph: with torch's functional collectives, if any.
        *inputs: of the graph, as `Joint.arguments` gives them.
        rounds: how often it is run.

    Returns:
        Seconds by the name of the node.
    """
    runs = [_Clock(graph) for _ in range(rounds)]
    for one in runs:
        with torch.no_grad():
            one.run(*inputs)
    return {name: min(one.took[name] for one in runs) for name in runs[0].took}


class _Clock(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.took: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        made: list[Any] = []

        def run() -> None:
            made.append(super(_Clock, self).run_node(n))
            if "_c10d_functional" in str(n.target) and isinstance(made[0], Tensor):
                torch.ops._c10d_functional.wait_tensor(made[0])

        given = [one for one in self.env.values() if isinstance(one, Tensor)]
        self.took[n.name] = _timed(run, given[0].device.type if given else "cpu")
        return made[0]


def _best(call: Callable[[], Any], device: str, seconds: float) -> float:
    until, best = time.perf_counter() + seconds, float("inf")
    call()  # allocates, compiles
    while True:
        best = min(best, _timed(call, device))
        if time.perf_counter() > until:
            return best


def _timed(call: Callable[[], Any], device: str) -> float:
    _finish(device)
    begin = time.perf_counter()
    call()
    _finish(device)
    return time.perf_counter() - begin


def _finish(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()
