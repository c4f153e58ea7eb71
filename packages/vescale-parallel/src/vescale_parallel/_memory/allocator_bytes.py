"""Bytes that a call takes from torch's allocator, counted by the allocator."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from vescale_parallel._errors import MemoryPlanError

_MARK: Final = "memory of "


@dataclass(frozen=True)
class Measured:
    """What a call took.

    Attributes:
        result: what it returned.
        peak: the most bytes that it held at once, beyond what was there before.
        allocations: how often it asked for memory; 0 on CUDA, where nobody counts.
    """

    result: Any
    peak: int
    allocations: int


def measured(call: Callable[[], Any], device: torch.device | str = "cpu") -> Measured:
    """Call a function and count what it takes of a device's memory.

    On CUDA by the caching allocator's own peak; else by the allocator's events in a profile.
    """
    device = torch.device(device)
    if device.type == "cuda":
        # What was queued before may still free memory while this runs.
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        # Inputs and the model are there already, and are not what the call takes.
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        return Measured(result, torch.cuda.max_memory_allocated(device) - before, 0)
    result, events = _profiled(call)
    sizes = [one["args"]["Bytes"] for one in events if one["name"] == "[memory]"]
    live = peak = 0
    for size in sizes:
        live += size
        peak = max(peak, live)
    return Measured(result, peak, sum(size > 0 for size in sizes))


def _profiled(call: Callable[[], Any]) -> tuple[Any, list[dict[str, Any]]]:
    """What a call returns, and all events of its profile, by time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    # By time: what lives is a running sum of these.
    return result, sorted(events, key=lambda one: float(one.get("ts", 0)))


class _MarkedInterpreter(fx.Interpreter):
    """Runs a graph with a mark in the profile around each node."""

    def run_node(self, n: fx.Node) -> Any:
        with torch.profiler.record_function(_MARK + n.name):
            return super().run_node(n)


def workspaces(graph: fx.GraphModule, *inputs: Any) -> dict[str, int]:
    """Run a graph once and return what each node takes beyond what it makes, in bytes.

    A convolution, for one, may copy its weight into another layout and free the copy before it
    returns. `plan(graph, workspaces=...)` counts it. The run is a real one: what the graph writes
    to its inputs is written.

    Args:
        graph: a graph whose tensors lie on the CPU.
        inputs: as the graph takes them.

    Raises:
        MemoryPlanError: the graph allocates on another device, where events do not tell.
    """

    def run() -> None:
        with torch.no_grad():
            _MarkedInterpreter(graph).run(
                *graph.graph.process_inputs(*inputs), enable_io_processing=False
            )

    found: dict[str, int] = {}
    _, events = _profiled(run)
    marks = [one for one in events if str(one["name"]).startswith(_MARK) and "dur" in one]
    taken = [one for one in events if one["name"] == "[memory]"]
    if any(one["args"].get("Device Type", 0) != 0 for one in taken):
        raise MemoryPlanError(
            "workspaces are counted on the CPU only; this graph uses other devices."
        )
    at = 0
    for mark in marks:
        start, end = float(mark["ts"]), float(mark["ts"]) + float(mark["dur"])
        # Of the interpreter itself, between two nodes.
        while at < len(taken) and float(taken[at]["ts"]) < start:
            at += 1
        live = peak = 0
        while at < len(taken) and float(taken[at]["ts"]) <= end:
            live += taken[at]["args"]["Bytes"]
            peak = max(peak, live)
            at += 1
        # What is left at its end is what it made.
        found[str(mark["name"]).removeprefix(_MARK)] = peak - max(live, 0)
    return {name: size for name, size in found.items() if size}
