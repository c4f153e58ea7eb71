"""From a report to a model whose parameters are stored as shards: the steps of `parallelize`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import group_of
from vescale_dtensor import Placement, RaggedShard

from vescale_parallel._layout import Layout
from vescale_parallel._mesh import mesh_sizes
from vescale_parallel._placements import placements
from vescale_parallel._report import Report
from vescale_parallel._report_rows import ParameterRow
from vescale_parallel._zero.flat_buffer import FlatBuffer
from vescale_parallel._zero.resolve import BufferRow
from vescale_parallel._zero.schedule import SCHEDULE, Schedule
from vescale_parallel._zero.unit import Held, Unit
from vescale_parallel._zero.units import ROOT, unit_of


@dataclass(frozen=True)
class Storage:
    """Where stored parameters lie.

    Attributes:
        mesh: that of the activations.
        stored: the same ranks with the axis `over` last: a parameter is cut by the other axes
            first, and what they leave is cut flat. The same object where it is last already.
        shares: by the name of a parameter in a buffer, the elements of each rank of `over`.
        over: the axis.
        compute: dtype of gathered values; None: that of what is stored.
    """

    mesh: DeviceMesh
    stored: DeviceMesh
    shares: Mapping[str, tuple[int, ...]]
    over: str
    compute: torch.dtype | None

    def of(self, row: ParameterRow) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Mesh and placements of a stored parameter."""
        ndim = len(row.global_shape)
        where = placements(row.layout, self.stored, ndim)
        if row.name in self.shares:
            flat = RaggedShard(tuple(range(ndim)), self.shares[row.name])
            where = (*where[:-1], flat)
        return self.stored, where


def storage(mesh: DeviceMesh, report: Report) -> Storage:
    """Where the parameters of a report are stored. Collective where a mesh has to be made."""
    shares = {
        slot.names[0]: row.plan.shares(index)
        for row in report.buffers
        for index, slot in enumerate(row.plan.slots)
    }
    # One mesh for all stored parameters, also those that are not sharded: norms of all of them are
    # stacked, for example.
    stored = _with_last(mesh, report.over) if report.buffers else mesh
    return Storage(mesh, stored, shares, report.over, report.compute)


def _with_last(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    names = list(mesh_sizes(mesh))
    order = [*(i for i, name in enumerate(names) if name != axis), names.index(axis)]
    if order == list(range(len(names))):
        return mesh
    ranks = mesh.mesh.permute(order).contiguous()
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=tuple(names[i] for i in order))


def install_zero(model: nn.Module, report: Report, where: Storage, ahead: int) -> None:
    """Put the stored parameters into buffers, and register the hooks that gather them."""
    if not report.buffers:
        return
    rows = {row.name: row for row in report.parameters}
    by_unit: dict[str, list[BufferRow]] = {ROOT: []}
    for buffer in report.buffers:
        by_unit.setdefault(buffer.unit, []).append(buffer)
    # Parameters that are not sharded take part only to change their mesh, or their dtype.
    moves = where.stored is not where.mesh or where.compute is not None
    kept: dict[str, list[ParameterRow]] = {name: [] for name in by_unit}
    for row in report.parameters:
        if not row.zero and moves:
            kept[unit_of(row.names, list(by_unit))].append(row)
    units = [
        _make_unit(model, name, buffers, kept[name], rows, where)
        for name, buffers in by_unit.items()
    ]
    schedule = Schedule(units, ahead)
    setattr(model, SCHEDULE, schedule)
    schedule.install([model.get_submodule(unit.name) for unit in units])


def _make_unit(
    model: nn.Module,
    name: str,
    buffers: list[BufferRow],
    kept: list[ParameterRow],
    rows: Mapping[str, ParameterRow],
    where: Storage,
) -> Unit:
    group = group_of(where.mesh, where.over)
    made = []
    for buffer in buffers:
        own = [rows[slot.names[0]] for slot in buffer.plan.slots]
        parameters = [model.get_parameter(row.name) for row in own]
        shapes = [own_shape(row.layout, row.global_shape, where.mesh) for row in own]
        made.append(FlatBuffer(buffer, group, parameters, shapes))
    held_rows = [rows[slot.names[0]] for buffer in buffers for slot in buffer.plan.slots] + kept
    held = [_held(model, row, where.mesh) for row in held_rows]
    return Unit(name, made, held, where.mesh, where.compute)


def _held(model: nn.Module, row: ParameterRow, mesh: DeviceMesh) -> Held:
    places = tuple(
        (model.get_submodule(prefix), name)
        for prefix, _, name in (full.rpartition(".") for full in row.names)
    )
    where = placements(row.layout, mesh, len(row.global_shape))
    return Held(row.name, model.get_parameter(row.name), places, where)


def own_shape(layout: Layout, shape: tuple[int, ...], mesh: DeviceMesh) -> tuple[int, ...]:
    """This rank's local shape in a layout; extents follow `torch.chunk`, axis after axis."""
    extents = list(shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for at, (axis, size) in zip(coordinate, mesh_sizes(mesh).items(), strict=True):
        dim = layout.dim_of(axis, len(shape))
        if dim is not None:
            piece = -(-extents[dim] // size)
            extents[dim] = max(0, min(piece, extents[dim] - at * piece))
    return tuple(extents)
