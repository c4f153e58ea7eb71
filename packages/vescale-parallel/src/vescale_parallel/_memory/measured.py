"""Bytes that a call takes from torch's allocator, counted by the allocator."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


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
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        return Measured(result, torch.cuda.max_memory_allocated(device) - before, 0)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    sizes = [
        one["args"]["Bytes"]
        for one in sorted(events, key=lambda one: one.get("ts", 0))
        if one["name"] == "[memory]"
    ]
    live = peak = 0
    for size in sizes:
        live += size
        peak = max(peak, live)
    return Measured(result, peak, sum(size > 0 for size in sizes))
