"""Count the Python calls and files of vescale-dtensor that an operation passes through.

`python -m tools.walks` prints a table: for each operation its first, second and tenth call, on rank
0 of two. Calls of other packages are not counted. These numbers do not
depend on the machine, so that they can be compared between commits:

    PYTHONPATH=OTHER_CHECKOUT/packages/vescale-dtensor/src:... python -m tools.walks
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

CALLS = (1, 2, 10)


@dataclass(frozen=True)
class Walk:
    """What one call of an operation passed through.

    Attributes:
        files: the file of each Python call, in order, relative to the package's sources.
    """

    files: tuple[str, ...]

    @property
    def calls(self) -> int:
        """How many Python functions were called."""
        return len(self.files)

    @property
    def rooms(self) -> tuple[str, ...]:
        """The subpackages that the files lie in; a file at the top stands for itself."""
        return tuple(dict.fromkeys(file.split("/")[0] for file in self.files))

    def __str__(self) -> str:
        return f"{self.calls} calls, {len({*self.files})} files, {len(self.rooms)} rooms"


def walk(operation: Callable[[], Any]) -> Walk:
    """Run an operation once and return what it passed through, in this thread."""
    import vescale_dtensor

    root = f"{Path(vescale_dtensor.__file__).parent}/"
    files: list[str] = []

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        # `event` is always "call": returning None asks for no events of lines and returns.
        if (name := frame.f_code.co_filename).startswith(root):
            files.append(name.removeprefix(root))

    # Not `sys.setprofile`: a custom autograd.Function on DTensors sets that for itself.
    before, collects = sys.gettrace(), gc.isenabled()
    # When Python collects garbage is chance, and the package has a callback there.
    gc.disable()
    sys.settrace(seen)
    try:
        operation()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return Walk(tuple(files))


def walks() -> dict[str, dict[int, Walk]]:
    """Return each operation's walks by the number of the call, on rank 0 of 2.

    Ranks are processes that serve later calls too: only in a fresh program is a first call one.
    """
    from vescale_comm.testing import run

    found: dict[str, dict[int, Walk]] = run(_walks, 2)[0]
    return found


def _walks(rank: int, world: int) -> dict[str, dict[int, Walk]]:
    found = {}
    for name, operation in _operations(world):
        each = [walk(operation) for _ in range(max(CALLS))]
        found[name] = {number: each[number - 1] for number in CALLS}
    return found


def _operations(world: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each (name, operation); an operation's inputs exist before its first call."""
    import torch
    import torch.nn.functional as F
    import vescale_dtensor as vd
    from vescale_comm.testing import device_mesh
    from vescale_dtensor import Replicate, Shard

    mesh = device_mesh((world,), ("tp",))
    x, y = (vd.distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)]) for _ in "xy")
    weight = vd.distribute_tensor(torch.ones(8, 8), mesh, [Replicate()]).requires_grad_()
    yield "x + y", lambda: x + y
    yield "linear(x, w)", lambda: F.linear(x, weight)
    yield "redistribute S -> R", lambda: x.redistribute(mesh, [Replicate()])
    captured = vd.capture(lambda z: F.gelu(F.linear(z, weight)))
    yield "capture(linear, gelu)", lambda: captured(x)


def main() -> int:
    """Print the table."""
    for name, found in walks().items():
        for number, one in found.items():
            print(f"{name:24s} call {number:2d}: {one}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
