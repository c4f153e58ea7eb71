"""Installs parameters that are stored as shards, as a report says: steps of `parallelize`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import group_of
from vescale_dtensor import Placement, RaggedShard

from vescale_parallel._apply.placements import placements
from vescale_parallel._check.report import Report
from vescale_parallel._common.mesh import mesh_sizes
from vescale_parallel._common.mesh_axes import with_axes
from vescale_parallel._notation.layout import RuleLayout, block_sizes
from vescale_parallel._notation.rows import ParameterRow
from vescale_parallel._zero import host
from vescale_parallel._zero.flat_buffer import FlatBuffer
from vescale_parallel._zero.gather_log import GatherLog
from vescale_parallel._zero.offload import OPTIMIZER
from vescale_parallel._zero.resolve import BufferRow
from vescale_parallel._zero.schedule import Schedule, install_schedule
from vescale_parallel._zero.unit import Unit, UnitParameter
from vescale_parallel._zero.units import ROOT


@dataclass(frozen=True)
class StoredPlacements:
    """Where parameters are stored.

    Attributes:
        mesh: that of the activations.
        stored: the same ranks with the axis `over` last: a parameter is sharded by the other axes
            first, and their shards are sharded flat. The same object where it is last already.
        shares: by the name of a parameter in a buffer, the elements of each rank of `over`.
        over: the axis.
        whole: all ranks; that of the activations lacks the axes of the batch where logical shards
            are computed one after another.
    """

    mesh: DeviceMesh
    stored: DeviceMesh
    shares: Mapping[str, tuple[int, ...]]
    over: str
    whole: DeviceMesh

    def of(self, row: ParameterRow) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Mesh and placements of a stored parameter."""
        ndim = len(row.global_shape)
        where = placements(row.layout, self.stored, ndim)
        if row.name in self.shares:
            flat = RaggedShard(tuple(range(ndim)), self.shares[row.name])
            where = (*where[:-1], flat)
        return self.stored, where


def stored_placements(
    whole: DeviceMesh, report: Report, mesh: DeviceMesh | None = None
) -> StoredPlacements:
    """Return where a report's parameters are stored. Collective where a mesh has to be made.

    Args:
        whole: all ranks.
        report: the plan, resolved.
        mesh: that of the activations, by default all ranks.
    """
    mesh = whole if mesh is None else mesh
    shares = {
        slot.names[0]: row.plan.shares(index)
        for row in report.buffers
        for index, slot in enumerate(row.plan.slots)
    }
    # One mesh for all stored parameters, also those that are not sharded: norms of all of them are
    # stacked, for example.
    stored = _with_last(whole, report.over) if report.buffers else mesh
    return StoredPlacements(mesh, stored, shares, report.over, whole)


def _with_last(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    names = list(mesh_sizes(mesh))
    order = [*(name for name in names if name != axis), axis]
    return mesh if order == names else with_axes(mesh, {name: (name,) for name in order})


def install_zero(
    model: nn.Module,
    report: Report,
    where: StoredPlacements,
    ahead: int | str,
    *,
    is_alike: bool = True,
) -> None:
    """Put the stored parameters into buffers, and register the hooks that gather them.

    Args:
        model: with distributed parameters.
        report: the plan, resolved.
        where: of the parameters.
        ahead: how many units are gathered ahead; "auto": one, and small ones together.
        is_alike: whether all ranks have these units, and compare what they gather first; of stages
            each has its own.
    """
    cast_buffers(model, report)
    # Parameters that are not sharded take part only to change their mesh, or their dtype.
    moved = where.stored is not where.mesh
    kept = [r for r in report.parameters if not r.zero and (moved or r.compute != r.dtype)]
    if not (report.buffers or kept):
        return
    rows = {row.name: row for row in report.parameters}
    names = dict.fromkeys([ROOT, *(one.unit for one in report.buffers), *(r.unit for r in kept)])
    log = GatherLog(where.whole)
    moves = any(one.offload for one in report.buffers)
    link = host.host_link(where.mesh.device_type) if moves else None
    if link is not None:
        host.move_buffers(model, link.device)
    units = [
        _make_unit(
            model,
            name,
            [one for one in report.buffers if one.unit == name],
            [row for row in kept if row.unit == name],
            rows,
            where,
            log,
            link,
        )
        for name in names
    ]
    units_ahead = 0 if report.reduce_ahead is None else report.reduce_ahead.units
    # As the plan leaves open. Stages have units of their own, which others do not wait for.
    sums = report.reduce_ahead is not None and report.reduce_ahead.is_chosen and is_alike
    how: Any = {"joins": isinstance(ahead, str), "sums_together": sums}
    how["reduce_ahead"] = units_ahead
    how["is_alike"] = is_alike
    schedule = Schedule(units, 1 if isinstance(ahead, str) else ahead, log, **how)
    install_schedule(model, schedule)
    schedule.install([model.get_submodule(unit.name) for unit in units])


def _make_unit(
    model: nn.Module,
    name: str,
    buffers: list[BufferRow],
    kept: list[ParameterRow],
    rows: Mapping[str, ParameterRow],
    where: StoredPlacements,
    log: GatherLog,
    link: host.HostLink | None,
) -> Unit:
    made = []
    for buffer in buffers:
        own = [rows[slot.names[0]] for slot in buffer.plan.slots]
        parameters = [model.get_parameter(row.name) for row in own]
        shapes = [own_shape(row.layout, row.global_shape, where.mesh) for row in own]
        # Of all ranks: the mesh of activations lacks the axis where logical shards are computed one
        # after another.
        group = group_of(where.whole, where.over)
        shard = None
        if link is not None and buffer.offload:
            # Below level 3 all that is gathered stays on the device, this rank's part with it.
            keeps = buffer.offload == OPTIMIZER and buffer.zero == 3
            shard = host.HostShard(link, keeps=keeps)
        made.append(FlatBuffer(buffer, group, parameters, shapes, log, shard))
    held_rows = [rows[slot.names[0]] for buffer in buffers for slot in buffer.plan.slots] + kept
    held = [held_of(model, row, where.mesh) for row in held_rows]
    return Unit(name, made, held, where.mesh)


def cast_buffers(model: nn.Module, report: Report) -> None:
    """Store buffers of modules in the dtypes of the report."""
    buffers = dict(model.named_buffers())
    for name, dtype in report.cast_buffers:
        # The object stays: modules may hold it under several names.
        buffers[name].data = buffers[name].data.to(dtype)


def held_of(model: nn.Module, row: ParameterRow, mesh: DeviceMesh) -> UnitParameter:
    places = tuple(
        (model.get_submodule(prefix), name)
        for prefix, _, name in (full.rpartition(".") for full in row.names)
    )
    where = placements(row.layout, mesh, len(row.global_shape))
    # Where the plan says nothing, values keep the dtype of what is stored, also after `.double()`.
    compute = row.compute if row.compute != row.dtype else None
    return UnitParameter(row.name, model.get_parameter(row.name), places, where, compute)


def own_shape(layout: RuleLayout, shape: tuple[int, ...], mesh: DeviceMesh) -> tuple[int, ...]:
    """Return this rank's local shape in a layout; extents follow `torch.chunk`, axis after axis."""
    extents = list(shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for at, (axis, size) in zip(coordinate, mesh_sizes(mesh).items(), strict=True):
        dim = layout.dim_of(axis, len(shape))
        if dim is not None:
            owned = 0
            for within in block_sizes(layout, axis, extents[dim]):
                extent = -(-within // size)
                owned += max(0, min(extent, within - at * extent))
            extents[dim] = owned
    return tuple(extents)
