"""A rank's part of a pipeline, and what a forward of one of its stages has to do with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._common.gradient_dtypes import gradient_dtype
from vescale_parallel._common.optimizer_hooks import Watcher
from vescale_parallel._pipeline.plan.split import Split
from vescale_parallel._pipeline.run.optimizer_watch import StepWatcher
from vescale_parallel._pipeline.run.stage_parameters import HeldParameters
from vescale_parallel._pipeline.trace.foreign_values import ForeignValues
from vescale_parallel._pipeline.trace.microbatch_kinds import Entry
from vescale_parallel._pipeline.trace.streams import Streams


class Unit(Protocol):
    """What takes the place of a unit's forward.

    Attributes:
        name: of the unit.
        module: it.
        forward: what it computes by.
        before: not None while it is a hook that says that the unit is called.
        leaves: whether no hook says that it has returned.
    """

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    before: Any
    leaves: bool

    def listen(self) -> None:
        """Look whether there are hooks before which it has to be called."""


@dataclass
class RankStages:
    """A rank's part of a pipeline.

    Attributes:
        model: the whole model; parameters of other stages have no elements.
        split: its stages.
        mesh: the ranks of a stage.
        rank: this rank's coordinate on the axis of stages.
        held: parameters of this rank's stages.
        streams: this rank's random streams.
        absent: names of units outside of the blocks whose parameters are not here.
        recomputing: stages of this rank that compute parts of their forward again in backward.
        kept: bytes that a forward of a stage of this rank keeps, where they were counted.
        running: the forward that runs, if any.
        call: what a stage runs, where it is not the model with its hooks.
        collects: whether hooks on modules within blocks are called on every stage.
        foreign_to: by stage, the units that it has to stand in for.
        behind: with `zero`, parameters that every stage holds, which the model swaps in forward
            only: what is computed again in backward looks for them as well.
        units: what takes the place of forwards of blocks, and of modules outside of them.
        is_compiled: whether a compiler runs code of the model, in this step.
        stepped: hears of steps of the model's optimizers.
        watcher: hears of them as well, and is held here, for as long as the model lives.
        is_told: whether a warning has said that it is given nothing to compile.
    """

    model: nn.Module
    split: Split
    mesh: DeviceMesh
    rank: int
    held: HeldParameters | nullcontext[None]
    streams: Streams
    absent: frozenset[str]
    running: Any = None  # a `StageForward`, which is made of this
    call: Callable[..., Any] | None = None
    collects: bool = False
    behind: HeldParameters | nullcontext[None] = field(default_factory=nullcontext)
    watcher: Watcher | None = None
    recomputing: set[int] = field(default_factory=set)
    kept: dict[int, int] = field(default_factory=dict)
    units: list[Unit] = field(default_factory=list)
    is_compiled: bool = False
    is_told: bool = False

    def __post_init__(self) -> None:
        """Number the blocks."""
        self.stepped = StepWatcher(self.model)
        self.block_numbers = {name: at for at, name in enumerate(self.split.blocks)}
        ends = [0]
        for stage in self.split.stages:
            ends.append(ends[-1] + len(stage))
        # One more than there are stages: behind the last block the loss begins.
        self.starts = ends
        # Of parameters of other stages, by the `id` of the leaf.
        self._nothings: dict[int, tuple[Tensor, Tensor]] = {}
        # Asked at each call of a unit, several times.
        self.foreign_to = [
            self.absent.union(*(s for other, s in enumerate(self.split.stages) if other != stage))
            for stage in range(len(self.split.stages))
        ]

    def nothing_like(self, leaf: Tensor) -> Tensor:
        """A gradient of zeros; of what has no elements the same one in each step."""
        dtype = gradient_dtype(leaf)
        if leaf.numel():
            return torch.zeros_like(leaf, dtype=dtype)
        known, found = self._nothings.get(id(leaf), (None, None))
        # By the leaf as well: an `id` may be that of a later one, of another dtype.
        if found is None or known is not leaf or found.dtype is not dtype:
            found = torch.zeros_like(leaf, dtype=dtype)
            self._nothings[id(leaf)] = leaf, found
        return found

    def elsewhere(self) -> dict[int, tuple[str, Tensor]]:
        """Parameters of which this rank holds no elements, by `id`, with their names."""
        owners = self.split.owners
        pairs = self.model.named_parameters()
        return {id(p): (name, p) for name, p in pairs if owners.get(name) not in (None, self.rank)}

    @property
    def own_blocks(self) -> list[str]:
        """The blocks of this rank's stages."""
        pairs = zip(self.split.stages, self.split.ranks, strict=True)
        return [name for stage, rank in pairs if rank == self.rank for name in stage]


class Neighbours(Protocol):
    """Who gives to a stage, and takes from it."""

    def ask(self, stage: int, paths: list[str]) -> tuple[Entry, list[Tensor]]:
        """Return what the stage receives, as local tensors."""

    def give(self, stage: int, call: Mapping[str, Tensor], foreign: ForeignValues) -> list[Tensor]:
        """Hand over to the stage after this one; returns the local tensors with their history."""


class StageEnded(Exception):
    """The forward of a stage has come to the first block of the next one; no error.

    Hooks that run also after an error (those of `zero`) run after no other kind of exception.
    """
