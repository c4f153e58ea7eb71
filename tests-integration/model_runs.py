"""Trains a model on one device and on a mesh, and says by how much they differ."""

from __future__ import annotations

import copy
import fnmatch
import logging
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import vescale_dtensor as vd
from model_zoo import Model
from model_zoo_more import automatic
from model_zoo_wide import ALL
from torch import Tensor, nn
from vescale_comm.testing import device_mesh
from vescale_parallel import Plan, parallelize

LAYOUTS: dict[str, dict[str, int]] = {
    "dp=4": {"dp": 4},
    "tp=4": {"tp": 4},
    "dp=2, tp=2": {"dp": 2, "tp": 2},
}
ROWS = 5  # over two or four ranks: uneven, and one of four has the fewest


@dataclass
class Found:
    """How a training step on a mesh compares with one device.

    Attributes:
        loss: of the mesh minus that of one device.
        output, gradient, parameter: the largest difference of outputs, gradients and parameters
            after the step, each as a share of the largest element of its tensor.
        worst: name of the parameter with the worst gradient.
        native: ops that ran by a rule, forward.
        fallbacks: ops that fell back → how often, forward.
        inside: those of `fallbacks` inside the model's blocks.
        blocks: how many of these ran.
        bytes: sent by rank 0 for `fallbacks`.
        sent: all bytes that rank 0 sent in forward.
    """

    loss: float
    output: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    worst: str = ""
    native: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    inside: dict[str, int] = field(default_factory=dict)
    blocks: int = 0
    bytes: int = 0
    sent: int = 0


def whole(value: Any) -> Any:
    """A plain tensor in place of a DTensor."""
    return value.detach().full_tensor() if isinstance(value, vd.DTensor) else value.detach()


def share(ours: Any, dense: Tensor, floor: float = 1e-6) -> float:
    """The largest difference, as a share of the largest element, which is `floor` at least."""
    found = whole(ours)
    assert found.shape == dense.shape, f"{tuple(found.shape)} is not {tuple(dense.shape)}"
    if not dense.numel():
        return 0.0
    scale = dense.detach().abs().max().clamp(min=floor)
    return float(((found - dense.detach()).abs().max() / scale).item())


class Inside:
    """Counts the fallbacks that happen while one of the named modules runs forward."""

    def __init__(self, model: nn.Module, blocks: str) -> None:
        self.spans: list[tuple[int, int]] = []
        self.report: Any = None
        self._began: list[int] = []
        for name, module in model.named_modules():
            if blocks and fnmatch.fnmatch(name, blocks) and "." not in name[len(blocks) - 1 :]:
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._began.append(len(self.report.records))

    def _leave(self, *_: Any) -> None:
        self.spans.append((self._began.pop(), len(self.report.records)))

    def fallbacks(self) -> Counter[str]:
        records = [r for low, high in self.spans for r in self.report.records[low:high]]
        return Counter(record.op for record in records if record.by == "fallback")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Where a gradient is nothing but rounding, AdamW would take the rounding's sign for a step.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def stepped(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Any, dict[str, Any]]:
    """Outputs and gradients of one step, which clips and updates the parameters."""
    optimizer = optimizer_of(model)
    torch.manual_seed(11)
    out = model(**inputs)
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = {name: grad.clone() for name, grad in gradients.items()}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return out, gradients


def compare(rank: int, world_size: int, name: str, layout: str, rows: int = ROWS) -> Found:
    """Run one step of a model of the zoo in both ways."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(action="ignore"):
        return compared(ALL[name], LAYOUTS[layout], rows)


def compared(model: Model, sizes: dict[str, int], rows: int) -> Found:
    torch.manual_seed(0)
    dense = model.make().train()
    mesh = device_mesh(tuple(sizes.values()), tuple(sizes))
    plan = Plan(batch="dp:0", parameters=model.plan or automatic(dense))
    ours = parallelize(copy.deepcopy(dense), mesh, plan)
    inputs = model.inputs(rows)
    watch = Inside(ours, model.blocks)
    report = forward_only(ours, inputs, watch)
    inside, blocks = watch.fallbacks(), len(watch.spans)
    one, wanted = stepped(dense, inputs)
    other, got = stepped(ours, inputs)
    found = Found(float(other.loss.item() - one.loss.item()))
    found.output = max(share(other[key], one[key]) for key in model.outputs)
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    # Gradients that are nothing but rounding (of the bias of a key) are measured by the others.
    floor = 1e-3 * max(float(grad.abs().max()) for grad in wanted.values())
    scores = {key: share(got[key], wanted[key], floor) for key in wanted}
    found.worst = max(scores, key=scores.__getitem__)
    found.gradient = scores[found.worst]
    pairs = zip(ours.parameters(), dense.parameters(), strict=True)
    # Steps are as long as the learning rate, whatever the parameter.
    found.parameter = max(share(p, q, 1.0) for p, q in pairs)
    found.native = sum(record.by.startswith("rule") for record in report.records)
    found.fallbacks = dict(Counter(record.op for record in report.fallbacks))
    found.inside, found.blocks = dict(inside), blocks
    found.bytes = sum(record.bytes for record in report.fallbacks)
    found.sent = report.bytes
    return found


def forward_only(model: nn.Module, inputs: dict[str, Tensor], watch: Inside) -> Any:
    with vd.explain() as report:
        watch.report = report
        torch.manual_seed(11)
        model(**inputs)
    return report
