"""Defines the result of `plan.check`: the plan, resolved for one model and one mesh."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vescale_parallel._check.activations import (
    Activations,
    item_bytes,
    saved_by_region,
    sequence_parallel,
    sharing,
)
from vescale_parallel._check.gathers import GatherRow, gather_table
from vescale_parallel._check.stage_costs import staged_cost
from vescale_parallel._checkpoint.resolve import RegionRow
from vescale_parallel._common.messages import dtype_name, human_bytes, listed, table
from vescale_parallel._cost import (
    Cluster,
    Cost,
    Piece,
    Precision,
    StepPlace,
    Workload,
    estimate,
    packed_bytes,
    piece_of,
)
from vescale_parallel._cost.links import named_cluster
from vescale_parallel._experts.resolve import ExpertsRow, experts_table
from vescale_parallel._invariant.resolve import InvariantRow
from vescale_parallel._notation.layout import RuleLayout
from vescale_parallel._notation.rows import BoundaryRow, ParameterRow
from vescale_parallel._pipeline.plan.split import Split
from vescale_parallel._static.units import CapturedUnit
from vescale_parallel._zero.offload import memory_table
from vescale_parallel._zero.reduce_ahead import ReduceAhead, fitting
from vescale_parallel._zero.resolve import BufferRow, buffer_table


@dataclass(frozen=True)
class Report:
    """A plan resolved for a model and a mesh; `str(report)` is the table.

    Attributes:
        mesh: axis and size, in mesh order.
        parameters: one row per parameter (shared ones once), in the order of the model.
        boundaries: one row per module that an activation rule matches.
        batch: layout of the batch, or None.
        total_bytes: bytes of all parameters on one device.
        notes: what is legal but may surprise.
        buffers: the flat buffers that hold the parameters with a `zero` level.
        over: the axis that those are sharded over.
        reduce_ahead: of how many units gradients are on their way at a time; None where it is no
            question: without buffers, in stages, and of logical shards.
        prefetch: how many units are gathered ahead.
        cast_buffers: buffers of modules that are stored in another dtype, by name.
        regions: modules that are computed again in backward; with a budget, the first of them.
        budget: bytes of activations of a rank, or None.
        batch_is: whether every rank passes the whole batch ("global") or its own rows ("local").
        invariant: how steps have the same bits on any number of ranks, or None.
        split: the stages of the model, or None.
        microbatches: into how many `forward_backward` divides a batch.
        experts: one row for each module of experts that the plan is about.
        local_rows: names of modules that the plan lets compute on each rank's own rows.
        sequence: how attention of sharded sequences runs.
        captured: of a model that `parallelize(..., static=True)` returned, what became of each of
            its units so far.
        gathers: of a parallelised model that has run, activations that its first forward gathered.
    """

    mesh: tuple[tuple[str, int], ...]
    parameters: tuple[ParameterRow, ...]
    boundaries: tuple[BoundaryRow, ...]
    batch: RuleLayout | None
    total_bytes: int
    notes: tuple[str, ...]
    buffers: tuple[BufferRow, ...] = ()
    over: str = ""
    reduce_ahead: ReduceAhead | None = None
    prefetch: int = 1
    cast_buffers: tuple[tuple[str, torch.dtype], ...] = ()
    regions: tuple[RegionRow, ...] = ()
    budget: float | None = None
    batch_is: str = "global"
    invariant: InvariantRow | None = None
    split: Split | None = None
    microbatches: int = 1
    experts: tuple[ExpertsRow, ...] = ()
    local_rows: tuple[str, ...] = ()
    captured: tuple[CapturedUnit, ...] = ()
    sequence: str = "auto"
    gathers: tuple[GatherRow, ...] = ()

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of parameters, between steps, on the rank that holds most."""
        if self.split is None:
            return self._bytes_of(self.parameters, self.buffers)
        owners = self.split.owners
        return max(
            # None: every stage has it.
            self._bytes_of([r for r in self.parameters if owners[r.name] in (None, rank)], own)
            for rank, own in enumerate(self.split.buffers)
        )

    def _bytes_of(self, rows: Sequence[ParameterRow], buffers: Sequence[BufferRow]) -> int:
        kept = sum(row.local_bytes for row in rows if not row.zero)
        # All buffers are sharded over the one axis `over`, into as many shards.
        ranks = range(buffers[0].plan.shards if buffers else 1)
        # By rank: the one with most of one buffer need not be that with most of another.
        return kept + max(sum(row.stored_on(rank) for row in buffers) for rank in ranks)

    @property
    def unpriced(self) -> tuple[str, ...]:
        """What `cost` leaves out of this plan."""
        sizes, found = dict(self.mesh), []
        if any(row.axes for row in self.experts):
            found.append("messages to experts, and that a token is computed by few of them")
        # Dim 0 is that of whole sequences, which attend to themselves only.
        if self.batch is not None and any(
            sizes.get(axis, 1) > 1 and dim is not None and dim > 0 for axis, dim in self.batch.dims
        ):
            found.append("messages of attention between shards of a sequence")
        return tuple(found)

    @property
    def activations(self) -> Activations:
        """What forward keeps for backward, by tokens; estimates of the cost model."""
        sizes = dict(self.mesh)
        # Pieces ask a workload only for its globs; how many tokens there are is asked later.
        pieces = [_piece(row, sizes, None, Workload(tokens=0)) for row in self.parameters]
        sharers = math.prod(sizes.get(axis, 1) for axis in (self.batch.axes if self.batch else ()))
        return Activations(
            pieces=pieces,
            sharers=sharers,
            tp=sharing(pieces, sizes),
            item=item_bytes(self.parameters),
            sequence_parallel=sequence_parallel(self.boundaries),
            regions=self.regions,
            budget=self.budget,
        )

    def cost(
        self,
        tokens: int,
        *,
        sequence: int = 0,
        zero: int | None = None,
        cluster: str | Cluster = "h100",
        precision: Precision | None = None,
        recompute: bool | None = None,
        **workload: Any,
    ) -> Cost:
        """Return what a training step would cost on a cluster, as `vescale_parallel.cost` does.

        Needs no processes; the model may be on the meta device. Stages run by their schedule, each
        in its own time; what else of a plan is not counted is in `unpriced`.

        Args:
            tokens: of the global batch.
            sequence: tokens that attend to each other; 0 leaves attention's products out.
            zero: ZeRO level of all parameters, over the axis of the plan; None: what the plan says.
            cluster: a name in `cost.CLUSTERS`, or one of your own.
            precision: bytes of an element by its use; by default bf16 with float32 masters.
            recompute: whether each repeated block is computed again; None: what the plan says.
            workload: `sequence_parallel`, `queries`, `lookups`; see `cost.Workload`.

        Raises:
            PlanError: there is no cluster of that name.
        """
        if recompute is None and self.regions:
            workload["regions"] = saved_by_region(self.activations.recomputed(tokens))
        work = Workload(
            tokens=tokens,
            sequence=sequence,
            recompute=bool(recompute),
            # Logical shards are computed one after another, and so count as microbatches do.
            turns=self.microbatches if self.invariant is None else self.invariant.most,
            prefetch=self.prefetch,
            **workload,
        )
        sizes = dict(self.mesh)
        scene = StepPlace(
            mesh=sizes,
            batch=self.batch.axes if self.batch else (),
            over=self.over or "dp",  # a plan without levels has no axis
            cluster=named_cluster(cluster),
        )
        pieces = [_piece(row, sizes, zero, work) for row in self.parameters]
        if "reduce_ahead" not in workload:
            packed = packed_bytes(pieces, precision or Precision())
            # What the plan leaves open, or says of no level, is decided by size.
            units = fitting(packed) if self.reduce_ahead is None else self.reduce_ahead.units
            work = replace(work, reduce_ahead=units)
        if self.split is not None:
            return staged_cost(pieces, self.split, scene, work, precision)
        return estimate(pieces, scene, work, precision)

    def __str__(self) -> str:
        """The table that `explain` prints."""
        # A table for people: whoever computes with a report reads its rows.
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.mesh)
        # Ranks at coordinate 0 hold the largest shard of everything, so sums of rows are theirs.
        summary = (
            f"{human_bytes(self.bytes_per_rank)} of parameters per rank at most, "
            f"{human_bytes(self.total_bytes)} on one device"
        )
        passed = ", each rank passes its rows" if self.batch_is == "local" else ""
        shared = "" if self.sequence == "auto" else f", attention by {self.sequence!r}"
        batch = f"{self.batch or 'left alone'}{passed}{shared}"
        parts = [f"plan on mesh({sizes}), batch {batch}", self._parameters()]
        if self.buffers:
            parts.append(buffer_table(self.buffers, self.over))
        if self.reduce_ahead is not None:
            parts.append(self.reduce_ahead.text())
        if any(one.offload for one in self.buffers):
            parts.append(memory_table(self.buffers))
        if self.cast_buffers:
            parts.append(_buffers(self.cast_buffers))
        if self.boundaries:
            parts.append(_boundaries(self.boundaries))
        if self.experts:
            parts.append(experts_table(self.experts))
        if self.local_rows:
            parts.append(f"each rank computes its own rows of {listed(self.local_rows)}")
        if self.regions:
            parts.append(self.activations.text())
        if self.invariant is not None:
            parts.append(str(self.invariant))
        if self.split is not None:
            parts.append(self.split.text())
        if self.gathers:
            parts.append(gather_table(self.gathers))
        if self.captured:
            parts.append(_captured(self.captured))
        return "\n\n".join([*parts, "\n".join([summary, *(f"note: {n}" for n in self.notes)])])

    def _parameters(self) -> str:
        casts = any(row.compute != row.dtype for row in self.parameters)
        rows = [
            (
                " = ".join(row.names),
                row.rule,
                row.layout,
                _shape(row.global_shape),
                _shape(row.local_shape) + (" at most" if row.uneven else ""),
                human_bytes(row.local_bytes),
                *([_dtypes(row)] if casts else []),
            )
            for row in self.parameters
        ]
        header = ["parameter", "rule", "layout", "global", "local", "bytes"]
        return table(header + ["dtype"] * casts, rows, right=["bytes"])


def _piece(row: ParameterRow, mesh: Iterable[str], zero: int | None, work: Workload) -> Piece:
    """Return a parameter as the cost model sees it."""
    where = ((axis, row.layout.dim_of(axis, len(row.global_shape))) for axis in mesh)
    dims = tuple((axis, dim) for axis, dim in where if dim is not None)
    # What lies on the host was resolved for the level of the plan; of another one it is not known.
    level = row.zero if zero is None else zero
    return piece_of(
        row.names,
        row.global_shape,
        row.local_shape,
        dims,
        zero=level,
        offload=row.offload if level == row.zero else "",
        work=work,
    )


def _boundaries(rows: Sequence[BoundaryRow]) -> str:
    return table(
        ["module", "rule", "in -> out"],
        [(row.module or "(the model)", row.rule, row.boundary.text) for row in rows],
    )


def _captured(units: Sequence[CapturedUnit]) -> str:
    why = "runs eagerly, or is not compared, because"
    header = ["captured unit", "programs", "replays", "compared", why]
    rows = [
        (
            one.name or "(the model)",
            one.programs,
            one.replays,
            one.compared,
            " ".join((one.refusal or one.uncompared or "").split()),
        )
        for one in units
    ]
    return table(header, rows, right=["programs", "replays", "compared"])


def _buffers(rows: Sequence[tuple[str, torch.dtype]]) -> str:
    return table(["buffer of a module", "dtype"], [(name, dtype_name(one)) for name, one in rows])


def _dtypes(row: ParameterRow) -> str:
    stored = dtype_name(row.dtype)
    as_well = f", computes in {dtype_name(row.compute)}" if row.compute != row.dtype else ""
    return stored + as_well


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
