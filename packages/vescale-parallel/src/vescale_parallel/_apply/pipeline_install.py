"""A model in stages: where its parameters are stored, and what is installed on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import group_of
from vescale_dtensor import Placement, RaggedShard

from vescale_parallel._apply.placements import placements
from vescale_parallel._check.report import Report
from vescale_parallel._common.mesh import mesh_sizes
from vescale_parallel._notation.rows import ParameterRow
from vescale_parallel._pipeline.held import HeldParameters
from vescale_parallel._pipeline.messages import Lines
from vescale_parallel._pipeline.rules import AXIS
from vescale_parallel._pipeline.split import Split
from vescale_parallel._pipeline.stage import Scene
from vescale_parallel._pipeline.step import MicrobatchStep, StagedStep
from vescale_parallel._pipeline.streams import Streams
from vescale_parallel._pipeline.units import install_units
from vescale_parallel._step.forward_backward import STEP
from vescale_parallel._zero.unit import Held


@dataclass(frozen=True)
class StagePlacements:
    """Where parameters are stored.

    To optimizers, `clip_grad_norm_` and checkpoints a stage is a shard: every rank has every
    parameter, under its own name and of its global shape, and no element of those of other stages.

    Attributes:
        mesh: that of the activations: the ranks of one stage.
        stored: all ranks, the axis of stages last: a parameter is sharded by the other axes first,
            and all of that is on one rank.
        owners: for each parameter, by every name, the rank that stores it; None: every rank does.
    """

    mesh: DeviceMesh
    stored: DeviceMesh
    owners: Mapping[str, int | None]

    def of(self, row: ParameterRow) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Mesh and placements of a stored parameter."""
        ndim = len(row.global_shape)
        where = placements(row.layout, self.stored, ndim)
        owner = self.owners[row.name]
        if owner is not None:
            units = [0] * self.stored.size(self.stored.ndim - 1)
            units[owner] = 1
            where = (*where[:-1], RaggedShard((0,), units))
        return self.stored, where


def stage_placements(mesh: DeviceMesh, owners: Mapping[str, int | None]) -> StagePlacements:
    """Return where the parameters of a mesh with stages are stored. Collective: it makes groups."""
    names = list(mesh_sizes(mesh))
    others = [name for name in names if name != AXIS]
    ranks = mesh.mesh
    if not others:
        # Activations need a mesh as well; that of a stage of one rank has one axis of one.
        others, ranks = ["dp"], ranks.unsqueeze(-1)
        names = [*names, "dp"]
    order = [*(names.index(name) for name in others), names.index(AXIS)]
    stored = DeviceMesh(
        mesh.device_type,
        ranks.permute(order).contiguous(),
        mesh_dim_names=tuple(names[i] for i in order),
    )
    return StagePlacements(stored[tuple(others)], stored, owners)


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
        boundaries=tuple(row for row in report.boundaries if is_here(row.module)),
        regions=tuple(row for row in report.regions if is_here(row.module)),
    )


def _absent(split: Split, rank: int) -> set[str]:
    """Names of modules outside of the blocks of which a rank lacks a parameter."""
    held_elsewhere = {
        name.rpartition(".")[0] for name, owner in split.owners.items() if owner not in (None, rank)
    }
    return held_elsewhere & set(split.stem)


def install_steps(model: nn.Module, report: Report, mesh: DeviceMesh, where: object) -> None:
    """Let `forward_backward` know how steps of the model are made. Collective."""
    dims = [dim for _, dim in (report.batch.dims if report.batch else ()) if dim is not None]
    dim = dims[0] if dims else 0
    if isinstance(where, StagePlacements):
        assert report.split is not None
        scene = _scene(model, report, report.split, mesh, where)
        forward, backward = group_of(mesh, AXIS), group_of(where.stored, AXIS)
        lines = Lines(forward, backward, mesh.device_type)
        setattr(model, STEP, StagedStep(scene, lines, mesh, dim))
        install_units(scene)
    elif report.microbatches > 1:
        setattr(model, STEP, MicrobatchStep(model, report.microbatches, dim))


def _scene(
    model: nn.Module, report: Report, split: Split, mesh: DeviceMesh, where: StagePlacements
) -> Scene:
    rank = mesh.get_local_rank(AXIS)
    here = [
        Held(
            row.name,
            model.get_parameter(row.name),
            tuple(
                (model.get_submodule(prefix), name)
                for prefix, _, name in (full.rpartition(".") for full in row.names)
            ),
            placements(row.layout, where.mesh, len(row.global_shape)),
        )
        for row in report.parameters
        if split.owners[row.name] in (None, rank)
    ]
    held = HeldParameters(here, where.mesh)
    absent = frozenset(_absent(split, rank))
    return Scene(model, split, where.mesh, rank, held, Streams(mesh.device_type), absent)
