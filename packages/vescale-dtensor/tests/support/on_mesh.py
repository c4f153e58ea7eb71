"""A program of a mesh, on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from vescale_comm import simulate
from vescale_comm.testing import device_mesh


def on_mesh(
    sizes: tuple[int, ...], program: Callable[..., Any], names: tuple[str, ...] | None = None
) -> list[Any]:
    """What each rank's `program(mesh)` returns."""
    return simulate(prod(sizes)).run(lambda rank, world_size: program(device_mesh(sizes, names)))
