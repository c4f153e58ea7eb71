"""A model in stages: where its parameters are stored, and what is installed on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import group_of
from vescale_dtensor import Placement, RaggedShard

from vescale_parallel._apply.placements import placements
from vescale_parallel._apply.zero_install import (
    StoredPlacements,
    cast_buffers,
    held_of,
    install_zero,
)
from vescale_parallel._check.report import Report
from vescale_parallel._common.mesh import mesh_sizes
from vescale_parallel._common.mesh_axes import with_axes
from vescale_parallel._common.optimizer_hooks import Watcher, watch_steps
from vescale_parallel._notation.batch import dim_of_rows
from vescale_parallel._notation.rows import ParameterRow
from vescale_parallel._pipeline.microbatches import MicrobatchStep
from vescale_parallel._pipeline.plan.rules import AXIS
from vescale_parallel._pipeline.plan.split import Split
from vescale_parallel._pipeline.run.local_steps import LocalSteps
from vescale_parallel._pipeline.run.messages import Lines, lanes_of
from vescale_parallel._pipeline.run.rank_stages import RankStages
from vescale_parallel._pipeline.run.stage_parameters import HeldParameters, is_plain
from vescale_parallel._pipeline.step import StagedStep
from vescale_parallel._pipeline.trace.streams import Streams
from vescale_parallel._pipeline.units import install_units
from vescale_parallel._static.units import (
    finish_static_blocks,
    install_static_blocks,
    tell_compilers,
)
from vescale_parallel._step.forward_backward import install_step
from vescale_parallel._zero.owner_steps import RefusedMuon
from vescale_parallel._zero.schedule import zero_schedule_of
from vescale_parallel._zero.unit import Unit
from vescale_parallel._zero.units import ROOT


@dataclass(frozen=True)
class StagePlacements:
    """Where parameters are stored.

    To optimizers, `clip_grad_norm_` and checkpoints a stage is a shard: every rank has every
    parameter, under its own name and of its global shape, and no element of those of other stages.

    Attributes:
        mesh: that of the activations: the ranks of one stage.
        stored: all ranks, the axis of stages last: a parameter is sharded by the other axes first,
            and all of that is on one rank. With `zero` that axis and the one of its shards are one.
        owners: for each parameter, by every name, the rank that stores it; None: every rank does.
        shares: by the name of a parameter in a buffer of `zero`, the elements of each rank of the
            last axis: none on other stages.
    """

    mesh: DeviceMesh
    stored: DeviceMesh
    owners: Mapping[str, int | None]
    shares: Mapping[str, tuple[int, ...]]

    @property
    def is_plain(self) -> bool:
        """Whether activations are plain tensors: a stage is one rank, and nothing is sharded."""
        return is_plain(self.mesh) and not self.shares

    def of(self, row: ParameterRow) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Mesh and placements of a stored parameter."""
        ndim = len(row.global_shape)
        where = placements(row.layout, self.stored, ndim)
        owner = self.owners[row.name]
        if row.name in self.shares:
            where = (*where[:-1], RaggedShard(tuple(range(ndim)), self.shares[row.name]))
        elif owner is not None:
            # One rank of the axis has all of it, the others nothing.
            units = [0] * self.stored.size(self.stored.ndim - 1)
            units[owner] = 1
            where = (*where[:-1], RaggedShard((0,), units))
        return self.stored, where


def stage_placements(mesh: DeviceMesh, report: Report) -> StagePlacements:
    """Return where the parameters of a mesh with stages are stored. Collective: it makes groups."""
    assert report.split is not None
    others = [name for name in mesh_sizes(mesh) if name != AXIS]
    if any(report.split.buffers):
        return _with_shares(mesh, report, report.split, others)
    # Activations need a mesh as well; that of a stage of one rank has one axis of one.
    axes: dict[str, tuple[str, ...]] = {name: (name,) for name in others} or {"dp": ()}
    stored = with_axes(mesh, {**axes, AXIS: (AXIS,)})
    return StagePlacements(stored[tuple(axes)], stored, report.split.owners, {})


def _with_shares(
    mesh: DeviceMesh, report: Report, split: Split, others: list[str]
) -> StagePlacements:
    rest = {name: (name,) for name in others if name != report.over}
    # Stages outermost, then the shards of `zero`: number `stage * shards + shard` on the joint
    # axis, which is the order of `shares` below.
    stored = with_axes(mesh, {**rest, f"{AXIS}_{report.over}": (AXIS, report.over)})
    stages = mesh_sizes(mesh)[AXIS]
    shares = {}
    for rank, buffers in enumerate(split.buffers):
        for buffer in buffers:
            for index, slot in enumerate(buffer.plan.slots):
                own = tuple(buffer.plan.shares(index))
                before, behind = (0,) * len(own) * rank, (0,) * len(own) * (stages - rank - 1)
                shares[slot.names[0]] = (*before, *own, *behind)
    return StagePlacements(mesh[tuple(others)], stored, split.owners, shares)


def of_stage(report: Report, mesh: DeviceMesh) -> Report:
    """Return what of a report this rank installs: nothing on blocks of other ranks."""
    split = report.split
    if split is None:
        return report
    rank = mesh.get_local_rank(AXIS)
    elsewhere = {
        name
        for stage, owner in zip(split.stages, split.ranks, strict=True)
        for name in stage
        if owner != rank
    } | _absent(split, rank)

    def is_here(module: str) -> bool:
        return not any(module == one or module.startswith(f"{one}.") for one in elsewhere)

    return replace(
        report,
        # What every stage holds is swapped in with the model: in each forward of every stage, so
        # that all of them know that its gradient is a sum over stages.
        parameters=tuple(
            replace(row, unit=ROOT) if split.owners[row.name] is None else row
            for row in report.parameters
            if split.owners[row.name] in (None, rank)
        ),
        buffers=split.buffers[rank],
        boundaries=tuple(row for row in report.boundaries if is_here(row.module)),
        regions=tuple(row for row in report.regions if is_here(row.module)),
        experts=tuple(row for row in report.experts if is_here(row.module)),
        local_rows=tuple(name for name in report.local_rows if is_here(name)),
    )


def _absent(split: Split, rank: int) -> set[str]:
    """Names of modules outside of the blocks of which a rank lacks a parameter."""
    held_elsewhere = {
        name.rpartition(".")[0] for name, owner in split.owners.items() if owner not in (None, rank)
    }
    return held_elsewhere & set(split.stem)


def capture_stages(scene: RankStages, check: bool | str | None) -> None:
    """Let the blocks of this rank's stages be captured once and replayed.

    Args:
        scene: of the model.
        check: which replays are compared with the blocks, see `parallelize`.
    """
    # With `zero` nothing is held beside its units, which swap by hooks.
    holder = scene.held if isinstance(scene.held, HeldParameters) else zero_schedule_of(scene.model)
    assert holder is not None
    units: list[Unit] = holder.units
    install_static_blocks(scene.model, scene.own_blocks, units, scene.mesh, check)


def install_steps(
    model: nn.Module, here: Report, mesh: DeviceMesh, scene: RankStages | None
) -> None:
    """Let `forward_backward` know how steps of the model are made. Collective.

    Args:
        model: with distributed parameters.
        here: what of the report this rank installs.
        mesh: all ranks.
        scene: of a model in stages.
    """
    if scene is not None:
        numbers = lanes_of(scene.split.ranks)
        used = range(max(numbers.values(), default=0) + 1)
        lanes = [group_of(mesh, AXIS, lane=at) for at in used]
        lines = Lines(lanes, numbers, mesh.device_type)
        step = StagedStep(scene, lines, mesh, dim_of_rows(here.batch, here.over))
        install_step(model, step)
        install_units(scene, step)
        # Around it all, where a compiler comes first.
        tell_compilers(model)
        # A replay calls no hooks within, and what they collect goes to the other stages.
        plain = is_plain(scene.mesh) and isinstance(scene.held, HeldParameters)
        finish_static_blocks(model, scene.own_blocks, lambda: scene.collects, is_plain=plain)
    elif here.microbatches > 1:
        rows = dim_of_rows(here.batch, here.over)
        install_step(model, MicrobatchStep(model, here.microbatches, rows))


def install_stages(
    model: nn.Module, here: Report, mesh: DeviceMesh, where: StagePlacements, ahead: int | str
) -> RankStages:
    """Let modules have the parameters of this rank's stages while these run.

    Args:
        model: with distributed parameters.
        here: what of the report this rank installs.
        mesh: all ranks.
        where: of the parameters.
        ahead: how many units of `zero` are gathered ahead.
    """
    split = here.split
    assert split is not None
    rank = mesh.get_local_rank(AXIS)
    held: HeldParameters | nullcontext[None]
    behind: HeldParameters | nullcontext[None] = nullcontext()
    watcher: Watcher
    if any(split.buffers):
        # The units of `zero` swap by hooks, and gather what they share.
        stored = StoredPlacements(where.mesh, where.stored, {}, here.over, where.mesh)
        slots = [slot for rows in split.buffers for row in rows for slot in row.plan.slots]
        watcher = RefusedMuon(model, frozenset(name for slot in slots for name in slot.names))
        watch_steps(watcher)  # before the units of `zero` do
        install_zero(model, here, stored, ahead, is_alike=False)
        held = nullcontext()
        behind = _held_behind(model, here, where.mesh)
    else:
        cast_buffers(model, here)
        rows = [held_of(model, row, where.mesh) for row in here.parameters]
        held = HeldParameters(rows, where.mesh)
        watcher = LocalSteps(model)
        watch_steps(watcher)
    absent = frozenset(_absent(split, rank))
    streams = Streams(mesh.device_type)
    how: Any = {"behind": behind, "watcher": watcher}
    return RankStages(model, split, where.mesh, rank, held, streams, absent, **how)


def _held_behind(
    model: nn.Module, here: Report, mesh: DeviceMesh
) -> HeldParameters | nullcontext[None]:
    """What recomputed blocks take of the model's own unit, where that is in no buffer of it.

    The unit itself is swapped in where backward comes to what the model returns, which is on the
    last stage only.
    """
    zero = zero_schedule_of(model)
    assert zero is not None
    root = zero.root
    rest = root.held[sum(len(one.parameters) for one in root.buffers) :]
    return HeldParameters(rest, mesh) if rest and here.regions else nullcontext()
