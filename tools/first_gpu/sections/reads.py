"""Finds where a step makes the host wait for the device: each place, with its line.

On every device by a mode that sees operators which tell the host a value, or make a tensor of a
size that only the values tell; on a GPU also by torch's own debug mode, which sees what waits.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tools.first_gpu.cases import Case, CaseResult, holds
from tools.first_gpu.models import TRAININGS, Training, batch, parallelised, step_of
from tools.first_gpu.paths import of_checkout

WARM: Final = 3
"""Steps before the one that is looked at: first ones agree on shapes and orders."""

READING: Final = {
    "_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "bincount",
    "_unique2", "unique_dim", "unique_consecutive", "multinomial", "allclose", "argwhere",
    "nonzero_numpy", "repeat_interleave", "histc",
}  # fmt: skip
"""Operators of which the host has to see a value, or a size."""

STEPS: Final[dict[str, int | None]] = {
    "dp=2": 0,
    "tp=2": 0,
    "dp=2 zero 3": 0,
    "dp=2 zero 1": 0,
    "dp=2 zero 2": 0,
    "tp=2 sequence parallel": 0,
    "pp=2 1f1b": 0,
    "cp=2": 0,
    "dp=2 tp=2 zero 3, sequence parallel": 0,
    "dp=2 zero 3 static": 0,
    "dp=2 checkpoint": 0,
    # A rank has to know how many tokens go where before it can send them.
    "ep=2": None,
}
"""How many places there may be in a step of a rank; None: how many there are is a figure."""

ON_THE_HOST: Final = {"pp=2 1f1b": 7}
"""Where the device is the host: messages of stages tell the loss, which a GPU is not asked for, and
numbers with which memory is filled are tensors of the host anyway."""


def cases(device: torch.device) -> list[Case]:
    """Forward, backward, clipping and the update of each layout."""
    allowed = STEPS if device.type == "cuda" else {**STEPS, **ON_THE_HOST}
    return [
        Case(f"a step of {name}", partial(_step, TRAININGS[name], most))
        for name, most in allowed.items()
    ] + [
        Case("a step of a fused Adam", partial(_step, TRAININGS["dp=2 zero 3"], 0, fused=True)),
        Case("a step of a batch that is local", _local),
    ]


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that read, by line."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: Counter[str] = Counter()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._reads(func, args, kwargs):
            self.places[f"{func.overloadpacket.__name__} at {line_of(sys._getframe(1))}"] += 1
        return func(*args, **kwargs)

    def _reads(self, func: Any, args: Any, kwargs: Any) -> bool:
        name = func.overloadpacket.__name__
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        # What lies on the host anyway is no read of a GPU's.
        if tensors and all(one.device.type != self._device.type for one in tensors):
            return False
        if name == "equal" and tensors[0].dtype == torch.uint8 and tensors[0].device.type == "cpu":
            return False  # states of generators, which lie on the host everywhere
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None and len(tensors) > 0
        if name == "_to_copy" and self._device.type != "cpu":
            target = kwargs.get("device")
            return target is not None and torch.device(target).type == "cpu"
        if name == "copy_" and self._device.type != "cpu":
            waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            return waits and args[0].device.type == "cpu"
        if name in ("index", "index_put_", "index_put"):
            indices = args[1] if len(args) > 1 else ()
            return any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in indices)
        return name in READING


def line_of(frame: FrameType | None) -> str:
    """The innermost line of a package, and that of the program which has led there."""
    ours = program = innermost = ""
    while frame is not None and not program:
        file = frame.f_code.co_filename
        here = f"{frame.f_lineno} in {frame.f_code.co_name}"
        innermost = innermost or f"{Path(file).name}:{here}"
        if path := of_checkout(file):
            if path.parts[0] == "packages":
                ours = ours or f"{path}:{here}"
            else:
                program = f"{path}:{here}"
        frame = frame.f_back
    return ", from ".join(one for one in (ours, program) if one) or innermost


@contextmanager
def waits_are_told(device: torch.device) -> Iterator[None]:
    """Have torch warn of what waits for a GPU: in the whole process, so for all ranks at once."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # Of steps that are not looked at.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextmanager
def waits_noted(places: Counter[str]) -> Iterator[None]:
    """Count what torch warns of in this rank, by line."""

    def shown(message: Any, category: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):
            places[f"a wait at {line_of(sys._getframe(1))}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = shown
        yield


def _step(of: Training, most: int | None, device: torch.device, fused: bool = False) -> CaseResult:
    from vescale_comm import simulate

    def body(rank: int, world_size: int) -> Counter[str]:
        model = parallelised(of, device)
        return _counted(model, step_of(of), device, fused)

    with waits_are_told(device):
        found = simulate(of.ranks)(body)
    return _said(found, most)


def _counted(
    model: nn.Module, step: Callable[..., Any], device: torch.device, fused: bool = False,
    rows: slice = slice(None),
) -> Counter[str]:  # fmt: skip
    """The places of one step, behind some that find out."""
    parameters = list(model.parameters())
    optimizer: Any = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    if fused:
        optimizer = torch.optim.AdamW(parameters, 0.01, fused=True)
    given = [one[rows] for one in batch(0, device)]

    def one() -> None:
        optimizer.zero_grad()
        step(model, *given)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    for _ in range(WARM):
        one()
    reads = Reads(device)
    with waits_noted(reads.places), reads:
        one()
    # Under a mode nothing is replayed: of a step without it, torch alone tells.
    replayed: Counter[str] = Counter()
    with waits_noted(replayed):
        one()
    return reads.places | replayed


def _said(found: list[Counter[str]], most: int | None) -> CaseResult:
    """As bad as the worst rank."""
    places = max(found, key=lambda one: one.total())
    lines = [f"{count} x {place}" for place, count in places.most_common()]
    got = f"{places.total()} of a rank" + (f": {lines[0]}" if lines else "")
    if len(lines) > 1:
        got += f" (and {len(lines) - 1} other places)"
    if most is None:
        return CaseResult("a figure", got, None, "\n".join(lines))
    expected = "nothing that waits" if not most else f"{most} places that wait at most"
    return holds(expected, places.total() <= most, got, "\n".join(lines))


def _local(device: torch.device) -> CaseResult:
    """Each rank passes its own rows: how many those are, others have to learn."""
    from vescale_comm import simulate

    of = Training({"dp": 2}, {"batch": "dp:0", "batch_is": "local"})

    def body(rank: int, world_size: int) -> Counter[str]:
        rows = slice(4 * rank, 4 * rank + 4)
        return _counted(parallelised(of, device), step_of(of), device, rows=rows)

    with waits_are_told(device):
        found = simulate(2)(body)
    return _said(found, None)
