"""Trains models in half precision, on one device and on a mesh, and measures both in double.

Two runs in bf16 never agree to the last digit, and no tolerance between them says much. So each is
compared with the same step in float64: a mesh must not be further from it than one device is, but
for a stated factor.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from model_runs import LAYOUTS, ROWS, optimizer_of, whole
from model_zoo_more import EVERY, automatic
from torch import Tensor, nn
from vescale_comm.testing import device_mesh
from vescale_parallel import Plan, parallelize

MODES = ("autocast", "bf16 model")


@dataclass
class Errors:
    """Distances from float64.

    Attributes:
        loss: as a share of the loss.
        output: of the outputs, in the 2-norm, as a share of their norm.
        gradient: of all gradients at once, likewise.
        step: of what a step changed the parameters by, likewise.
    """

    loss: float
    output: float
    gradient: float
    step: float


@dataclass
class Step:
    """What one training step gave, as plain tensors."""

    loss: Tensor
    output: Tensor
    gradients: list[Tensor]
    change: list[Tensor]

    def errors(self, exact: Step) -> Errors:
        """How far this is from what was found in double precision."""
        return Errors(
            apart([self.loss], [exact.loss]),
            apart([self.output], [exact.output]),
            apart(self.gradients, exact.gradients),
            apart(self.change, exact.change),
        )


def apart(found: list[Tensor], exact: list[Tensor]) -> float:
    """The 2-norm of the difference, as a share of the norm."""
    pairs = list(zip(found, exact, strict=True))
    off = sum(float((x.double() - y).square().sum()) for x, y in pairs)
    return float((off / sum(float(y.square().sum()) for y in exact)) ** 0.5)


@contextmanager
def precision(mode: str) -> Iterator[None]:
    """Autocast, where that is the mode."""
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        yield


def trained(model: nn.Module, inputs: dict[str, Any], mode: str, key: str) -> Step:
    """One step, forward and loss in the mode's precision."""
    before = [whole(p).clone() for p in model.parameters()]
    optimizer = optimizer_of(model)
    torch.manual_seed(11)
    with precision(mode):
        out = model(**inputs)
    out.loss.backward()
    gradients = [whole(p.grad) for p in model.parameters() if p.grad is not None]
    for p in model.parameters():
        assert p.grad is None or p.grad.dtype == p.dtype, (p.grad.dtype, p.dtype)
    optimizer.step()
    after = [whole(p) for p in model.parameters()]
    change = [new.double() - old.double() for new, old in zip(after, before, strict=True)]
    return Step(whole(out.loss), whole(out[key]), gradients, change)


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Inputs in another precision, but for whole numbers."""
    return {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def measure(rank: int, world_size: int, name: str, layout: str, mode: str) -> tuple[Errors, Errors]:
    """The errors of a mesh, and those of one device."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(action="ignore"):
        return measured(name, LAYOUTS[layout], mode)


def measured(name: str, sizes: dict[str, int], mode: str) -> tuple[Errors, Errors]:
    model = EVERY[name]
    dtype = torch.float32 if mode == "autocast" else torch.bfloat16
    torch.manual_seed(0)
    # What is rounded once, to begin with, is the same in all three.
    dense = model.make().train().to(dtype)
    mesh = device_mesh(tuple(sizes.values()), tuple(sizes))
    plan = Plan(batch="dp:0", parameters=model.plan or automatic(dense))
    ours = parallelize(copy.deepcopy(dense), mesh, plan)
    inputs = cast(model.inputs(ROWS), dtype)
    (key,) = model.outputs
    exact = trained(
        copy.deepcopy(dense).double(), cast(inputs, torch.float64), "double precision", key
    )
    one = trained(dense, inputs, mode, key)
    found = trained(ours, inputs, mode, key)
    assert found.loss.dtype == one.loss.dtype, (found.loss.dtype, one.loss.dtype)
    assert found.output.dtype == one.output.dtype, (found.output.dtype, one.output.dtype)
    return found.errors(exact), one.errors(exact)
