"""Data parallelism, and the ZeRO level that a device's memory asks for."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from vescale_parallel._plan.fields import Zero

_STATES_BYTES = 8
"""Of an element: Adam's two moments in float32, what most people train with."""
_SHARE = 0.6
"""Of a device's memory, for parameters, gradients and states; activations need the rest."""


def data_parallel(
    model: nn.Module, sizes: Mapping[str, int], memory: float | None
) -> dict[str, Any]:
    """Return the fields of the plan, see `Plan.data_parallel`."""
    axes = tuple(sizes)
    # The longest axis where none is called so: it shards most.
    over = "dp" if "dp" in sizes else max(sizes, key=sizes.__getitem__, default="dp")
    # All axes: ranks of one that the batch does not use would repeat each other.
    batch = ", ".join(f"{axis}:0" for axis in axes) or None
    level = zero_level(model, sizes.get(over, 1), memory)
    return {"batch": batch, "axes": axes, "zero": Zero(level, over=over)}


def zero_level(model: nn.Module, ranks: int, memory: float | None) -> int:
    """Return the lowest level whose bytes between steps fit into their share; else 3."""
    if memory is None or ranks == 1:
        return 0
    # Frozen ones have neither gradients nor states.
    trained = [one for one in model.parameters() if one.requires_grad]
    held = sum(one.numel() * one.element_size() for one in model.parameters())
    gradients = sum(one.numel() * one.element_size() for one in trained)
    states = sum(one.numel() for one in trained) * _STATES_BYTES
    needed = (
        held + gradients + states,
        held + gradients + math.ceil(states / ranks),
        held + math.ceil((gradients + states) / ranks),
    )
    return next((level for level, size in enumerate(needed) if size <= _SHARE * memory), 3)


def device_memory(device_type: str) -> float | None:
    """Return bytes of a device of the mesh; None on the CPU, whose memory all its ranks share."""
    if device_type != "cuda":
        return None
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
