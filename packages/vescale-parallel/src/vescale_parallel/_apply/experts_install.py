"""Lets modules of experts compute over a mesh, and modules of rows on those of each rank."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import group_of

from vescale_parallel._apply.placements import placements
from vescale_parallel._check.report import Report
from vescale_parallel._common.mesh import mesh_sizes
from vescale_parallel._experts.exchange import Shares
from vescale_parallel._experts.forward import ExpertsForward
from vescale_parallel._experts.resolve import ExpertsRow, axes_within
from vescale_parallel._local_rows.declare import LocalRowsForward
from vescale_parallel._notation.layout import RuleLayout
from vescale_parallel._notation.rows import ParameterRow


def install_experts(model: nn.Module, report: Report, mesh: DeviceMesh) -> None:
    """Replace the forward of each module of experts that a plan is about. Collective.

    Args:
        model: with distributed parameters.
        report: the plan, resolved.
        mesh: of the activations.
    """
    rows = {name: row for row in report.parameters for name in row.names}
    for row in report.experts:
        prefix = f"{row.module}." if row.module else ""
        stacks = {name: rows[f"{prefix}{name}"] for name in row.kind.stacks}
        module = model.get_submodule(row.module)
        module.forward = _forward(module, row, stacks, mesh)


def install_local_rows(model: nn.Module, report: Report, mesh: DeviceMesh) -> None:
    """Replace the forward of each module that a plan lets compute on each rank's own rows."""
    for name in report.local_rows:
        module = model.get_submodule(name)
        module.forward = LocalRowsForward(module, name, mesh)


def _forward(
    module: nn.Module, row: ExpertsRow, stacks: dict[str, ParameterRow], mesh: DeviceMesh
) -> ExpertsForward:
    sizes = mesh_sizes(mesh)
    within = axes_within(row, stacks, sizes)
    used = {
        name: placements(_only(one.layout, (*row.axes, *within)), mesh, len(one.global_shape))
        for name, one in stacks.items()
    }
    names = list(sizes)
    shares = Shares(group_of(mesh, row.axes), row.counts) if row.axes else None
    return ExpertsForward(
        module,
        row.kind,
        mesh,
        shares,
        [names.index(axis) for axis in row.axes],
        [names.index(axis) for axis in within],
        used,
    )


def _only(layout: RuleLayout, axes: tuple[str, ...]) -> RuleLayout:
    """The layout over these axes; over others the tensor is whole."""
    dims = tuple((axis, dim) for axis, dim in layout.dims if axis in axes)
    blocks = tuple((axis, one) for axis, one in layout.blocks if axis in axes)
    return RuleLayout(str(layout), dims, blocks=blocks)
