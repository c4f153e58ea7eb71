"""Trains a model for 20 steps on one device and on a mesh, and says by how much they differ.

All ranks are simulated in this process. `LAYOUTS` are the columns of the consistency table,
`FEATURES` its rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from consistency_models import Model, Options, batch_of, plan_of
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_dtensor import DTensor
from vescale_parallel import deferred, no_sync, parallelize
from vescale_parallel import mesh as make_mesh

STEPS, ROWS, SEED = 20, 8, 3
LOSS_BOUND, PARAMETER_BOUND = 1e-5, 1e-5
"""Relative, of each loss; of each element of a parameter at the end, where a step is 3e-3 long."""


@dataclass(frozen=True)
class Feature:
    """A row of the table.

    Attributes:
        options: of the model.
        rows: of the batches, repeated.
        parts: backwards before each step of the optimizer.
        initialised: whether parameters are drawn again after they were laid out.
    """

    options: Options = field(default_factory=Options)
    rows: tuple[int, ...] = (ROWS,)
    parts: int = 1
    initialised: bool = False


FEATURES: dict[str, Feature] = {
    "init": Feature(initialised=True),
    "dropout": Feature(Options(dropout=0.1)),
    "attention dropout": Feature(Options(attention_dropout=0.1)),
    "checkpoint recompute": Feature(Options(dropout=0.1, attention_dropout=0.1, recomputed=True)),
    # 3 rows over 4 ranks: one has none.
    "uneven batch": Feature(Options(dropout=0.1), rows=(7, 5, 3)),
    "tied weights": Feature(Options(dropout=0.1, tied=True)),
    "unused parameters": Feature(Options(dropout=0.1, spare=True)),
    "accumulation": Feature(Options(dropout=0.1), parts=2),
}


@dataclass(frozen=True)
class Layout:
    """A column of the table.

    Attributes:
        sizes: of the mesh, by axis.
        zero: level of the plan.
        static: whether units are captured.
    """

    sizes: dict[str, int]
    zero: int = 0
    static: bool = False


LAYOUTS: dict[str, Layout] = {
    "dp4": Layout({"dp": 4}),
    "tp4": Layout({"tp": 4}),
    "dp2·tp2": Layout({"dp": 2, "tp": 2}),
    "zero1": Layout({"dp": 4}, 1),
    "zero2": Layout({"dp": 4}, 2),
    "zero3": Layout({"dp": 4}, 3),
    "zero3·tp2": Layout({"dp": 2, "tp": 2}, 3),
    "HSDP": Layout({"replica": 2, "dp": 2}, 3),
    "static": Layout({"dp": 2, "tp": 2}, 3, static=True),
}


@dataclass
class Trained:
    """What a training left.

    Attributes:
        first: parameters before the first step.
        masks: for each watched step and each dropout in it, which elements it dropped.
        losses: of each step; with several parts, their sum.
        last: parameters after the last step.
        generator: state of the random generator at the end.
    """

    first: dict[str, Tensor]
    masks: list[list[Tensor]]
    losses: list[float]
    last: dict[str, Tensor]
    generator: Tensor


@dataclass(frozen=True)
class Compared:
    """A training on a mesh, beside one device.

    Attributes:
        init: whether all initial parameters have the same bits.
        masks: the share of dropped elements that are dropped there too; 1.0 where nothing drops.
        generator: whether the random generator ends in the same state on all ranks.
        loss: the largest relative difference of a loss.
        parameter: the largest difference of an element of a parameter at the end.
    """

    init: bool
    masks: float
    generator: bool
    loss: float
    parameter: float

    @property
    def is_bitwise(self) -> bool:
        """Whether what is random is that of one device."""
        return self.init and self.masks == 1.0 and self.generator


def whole(tensor: Tensor) -> Tensor:
    """The global value, as a plain tensor that nobody writes to."""
    value = tensor.detach()
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(one) for name, one in model.named_parameters()}


class Watched:
    """Notes which elements each dropout drops, while entered."""

    def __init__(self, model: nn.Module, gather: Callable[[Tensor], Tensor] = whole) -> None:
        self.model, self.gather = model, gather
        self.masks: list[Tensor] = []
        self._handles: list[Any] = []

    def _note(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        with torch.no_grad():
            self.masks.append(self.gather((output == 0) & (inputs[0] != 0)))

    def __enter__(self) -> Watched:
        for module in self.model.modules():
            if isinstance(module, nn.Dropout) and module.p:
                self._handles.append(module.register_forward_hook(self._note))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Where a gradient is nothing but rounding, AdamW would take the rounding's sign for a step.
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, weight_decay=0.1)


def batches(kind: str, feature: Feature, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of a step."""
    rows = feature.rows[step % len(feature.rows)]
    for part in range(feature.parts):
        yield batch_of(kind, step * feature.parts + part, rows)


def train(kind: str, feature: Feature, model: nn.Module, watched: set[int]) -> Trained:
    """Train for 20 steps; dropout is watched in the steps of `watched`."""
    first = values(model)
    optimizer = optimizer_of(model)
    torch.manual_seed(SEED + 1)
    losses: list[float] = []
    masks: list[list[Tensor]] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if step in watched:
            with Watched(model) as watch:
                losses.append(backwards(kind, feature, model, step))
            masks.append(watch.masks)
        else:
            losses.append(backwards(kind, feature, model, step))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return Trained(first, masks, losses, values(model), torch.get_rng_state())


def backwards(kind: str, feature: Feature, model: nn.Module, step: int) -> float:
    """Forward and backward of all parts; the gradients are reduced with the last."""
    total = 0.0
    words = {"skip": step % 3 == 1} if feature.options.spare else {}
    *early, last = batches(kind, feature, step)
    with no_sync(model):
        for part in early:
            total += backward(model(*part, **words), feature.parts)
    return total + backward(model(*last, **words), feature.parts)


def backward(loss: Tensor, parts: int) -> float:
    (loss / parts).backward()  # type: ignore[no-untyped-call]
    return float(loss.item()) / parts


def initialised(kind: str, feature: Feature) -> Model:
    torch.manual_seed(SEED)
    made = Model(kind, feature.options)
    if feature.initialised:
        torch.manual_seed(SEED + 10)
        made.initialise()
    return made


def distributed(kind: str, feature: Feature, layout: Layout) -> nn.Module:
    """The model on a mesh: deferred and then drawn again where its first values are the feature."""
    mesh = make_mesh(device_type="cpu", **layout.sizes)
    batch = "replica:0, dp:0" if "replica" in layout.sizes else "dp:0"
    words: dict[str, Any] = {"batch": batch, "zero": layout.zero, "axes": ("replica", "dp", "tp")}
    plan = plan_of(kind, **words)
    if not feature.initialised:
        return parallelize(initialised(kind, feature), mesh, plan, static=layout.static)
    torch.manual_seed(SEED)
    with deferred():
        made = Model(kind, feature.options)
    model = parallelize(made, mesh, plan, static=layout.static)
    torch.manual_seed(SEED)
    built = Model(kind, feature.options)
    for name, value in values(model).items():
        assert torch.equal(value, built.get_parameter(name)), f"deferred {name}"
    torch.manual_seed(SEED + 10)
    made.initialise()
    return model


def watched_steps(layout: Layout) -> set[int]:
    """Which steps are watched: the first and the last; a unit with hooks is not replayed."""
    return {0} if layout.static else {0, STEPS - 1}


@cache
def one_device(kind: str, name: str) -> Trained:
    """The reference of a row."""
    feature = FEATURES[name]
    return train(kind, feature, initialised(kind, feature), {0, STEPS - 1})


def compare(kind: str, name: str, column: str) -> Compared:
    """Return a cell of the table."""
    feature, layout = FEATURES[name], LAYOUTS[column]

    def program(rank: int, world_size: int) -> Trained:
        return train(kind, feature, distributed(kind, feature, layout), watched_steps(layout))

    with warnings.catch_warnings(action="ignore"):
        wanted = one_device(kind, name)
        ranks = math.prod(layout.sizes.values())
        every = [judged(one, wanted, layout) for one in simulate(ranks).run(program)]
    return replace(
        every[0],
        init=all(one.init for one in every),
        masks=min(one.masks for one in every),
        generator=all(one.generator for one in every),
        loss=max(one.loss for one in every),
    )


def judged(found: Trained, wanted: Trained, layout: Layout | None = None) -> Compared:
    """How a training compares with one device."""
    steps = 1 if layout is not None and layout.static else None
    pairs = [
        pair
        for one, two in zip(found.masks, wanted.masks[:steps], strict=True)
        for pair in zip(one, two, strict=True)
    ]
    dropped = sum(int(b.sum()) for _, b in pairs)
    kept = sum(int((a & b).sum()) for a, b in pairs)
    extra = sum(int(a.sum()) for a, _ in pairs)
    return Compared(
        init=all(torch.equal(found.first[name], one) for name, one in wanted.first.items()),
        masks=kept / max(dropped, extra) if dropped else 1.0,
        generator=torch.equal(found.generator, wanted.generator),
        loss=max(abs(a - b) / abs(b) for a, b in zip(found.losses, wanted.losses, strict=True)),
        parameter=max(float((found.last[n] - one).abs().max()) for n, one in wanted.last.items()),
    )
