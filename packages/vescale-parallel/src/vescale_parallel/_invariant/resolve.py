"""Resolves what a plan says of invariance for a model and a mesh: limits, and costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

from torch import nn

from vescale_parallel._common.messages import count, human_bytes, listed
from vescale_parallel._errors import PlanError
from vescale_parallel._invariant.tree import nodes_within, shares
from vescale_parallel._notation.batch import dim_of_rows
from vescale_parallel._notation.layout import RuleLayout
from vescale_parallel._notation.rows import ParameterRow

DP_INVARIANT: Final = "dp-invariant"

BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class InvariantRow:
    """How a step is computed that has the same bits on any number of ranks.

    Attributes:
        shards: logical shards of the batch.
        axes: the mesh axes that share the batch, in mesh order.
        sizes: the extents of these axes.
        batch: which dim of a tensor is that of the batch.
        gradient_bytes: of all gradients of a rank, in the dtype of the sums.
        norms: how many modules take statistics of the batch, each of its logical shard.
    """

    shards: int
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    batch: RuleLayout
    gradient_bytes: int
    norms: int = 0

    @property
    def ranks(self) -> int:
        """How many ranks share the batch."""
        return math.prod(self.sizes)

    @property
    def nodes(self) -> list[int]:
        """How many sums each rank sends: the largest subtrees that lie within its shards."""
        own = shares(self.shards, self.ranks)
        return [len(nodes_within((0, self.shards), one)) for one in own]

    @property
    def most(self) -> int:
        """How many shards the rank with most computes, one after another."""
        return max(high - low for low, high in shares(self.shards, self.ranks))

    @property
    def kept(self) -> int:
        """How many sums as large as all gradients a rank keeps at most, the newest included."""
        # Sums are joined as a binary counter carries, so that of n shards no more than its digits
        # are open.
        levels = max(1, self.most).bit_length()
        return max(levels, max(self.nodes)) if self.most > 1 else 1

    def __str__(self) -> str:
        """What `explain` prints: the cost beside a step that is not invariant."""
        size = self.gradient_bytes
        # Each rank owns 1/n of every sum, and is sent that part of all of them.
        sent = (self.ranks - 1) * max(self.nodes) * size // self.ranks
        usual = (self.ranks - 1) * size // self.ranks
        even = self.most * self.ranks == self.shards
        idle = "" if even else f"; {self.most * self.ranks - self.shards} turns stay idle"
        return (
            f"the same bits on any number of data-parallel ranks: {self.shards} logical shards, "
            f"{count(self.most, 'shard')} on a rank one after another{idle}\n"
            f"  gradients: {count(self.kept, 'sum')} of {human_bytes(size)} kept at most, "
            f"{count(max(self.nodes), 'sum')} sent: {human_bytes(sent)} in place of "
            f"{human_bytes(usual)} to reduce-scatter, then what the plan gathers anyway"
            f"{self._of_norms}"
        )

    @property
    def _of_norms(self) -> str:
        if not self.norms:
            return ""
        return (
            f"\n  {count(self.norms, 'batch norm')}: normalised by the rows of one logical shard; "
            "running statistics are those of the whole batch"
        )


@dataclass(frozen=True)
class InvariantWords:
    """What a plan says: how many logical shards, if any, and `batch_is`."""

    shards: int | None
    batch_is: str


class ResolvedPlan(Protocol):
    """What else of a plan is resolved already: see `Report`."""

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def parameters(self) -> tuple[ParameterRow, ...]: ...
    @property
    def batch(self) -> RuleLayout | None: ...
    @property
    def over(self) -> str: ...


def resolve_invariant(
    said: InvariantWords, model: nn.Module, report: ResolvedPlan
) -> InvariantRow | None:
    """Return how the step is computed; None where the plan does not ask for invariance.

    Raises:
        PlanError: with every reason why it cannot be invariant.
    """
    if said.shards is None:
        return None
    batch = report.batch
    problems = _problems(said.shards, said.batch_is, model, report)
    if problems or batch is None:
        head = f"deterministic='{DP_INVARIANT}' cannot hold for {type(model).__name__}:"
        raise PlanError("\n  - ".join([head, *problems]))
    named = [(axis, size) for axis, size in report.mesh if axis in batch.axes]
    trained = [row for row in report.parameters if model.get_parameter(row.name).requires_grad]
    return InvariantRow(
        shards=said.shards,
        axes=tuple(axis for axis, _ in named),
        sizes=tuple(size for _, size in named),
        batch=batch,
        # Halves are added in float32.
        gradient_bytes=sum(
            math.prod(row.local_shape) * max(4, row.dtype.itemsize) for row in trained
        ),
        norms=len(training_norms(model)),
    )


def _problems(shards: int, batch_is: str, model: nn.Module, report: ResolvedPlan) -> list[str]:
    batch = report.batch
    dims = {dim for _, dim in batch.dims} if batch is not None else set()
    if batch is None or dims != {dim_of_rows(batch, report.over)}:
        return ["the batch has no rows to cut: say batch='dp:0'."]
    sizes = dict(report.mesh)
    problems = []
    if batch_is != "global":
        problems.append(
            "batch_is='local': which rows a rank has would depend on the number of ranks. Pass the "
            "whole batch on every rank; each reads its logical shards of it."
        )
    ranks = math.prod(size for axis, size in sizes.items() if axis in batch.axes)
    if ranks > shards:
        problems.append(
            f"{ranks} ranks share the batch, and there are {count(shards, 'logical shard')}: "
            f"some would never have one. Say Invariant(shards={ranks}) or more."
        )
    shared = set(batch.axes) & set(sizes)
    sharded = [
        row.name
        for row in report.parameters
        if any(axis in shared and dim is not None for axis, dim in row.layout.dims)
    ]
    if sharded:
        problems.append(
            f"parameters are sharded over an axis of the batch: {listed(sharded)}. Each logical "
            "shard is computed by itself, with whole parameters; to store shards of them say "
            "zero=3."
        )
    if any(row.offload for row in report.parameters):
        problems.append("offload: sums of logical shards are added up on the device. Leave it out.")
    if any(row.zero for row in report.parameters) and report.over not in batch.axes:
        problems.append(
            f"zero is over '{report.over}', which does not share the batch ('{batch}')."
        )
    norms = synchronized_norms(model)
    if norms:
        problems.append(
            f"synchronised batch norms in training mode: {listed(norms)}. They ask for sums over "
            "the batch within forward, which shards that run one after another do not have. Use "
            "nn.BatchNorm, which takes each shard by itself, nn.GroupNorm, or set them to eval()."
        )
    return problems


def training_norms(model: nn.Module) -> list[str]:
    """Return the names of modules that take statistics of the batch in forward."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, BATCH_NORMS) and (module.training or not module.track_running_stats)
    ]


def synchronized_norms(model: nn.Module) -> list[str]:
    """Return the names of those that take statistics of all ranks' rows."""
    found = training_norms(model)
    return [name for name in found if isinstance(model.get_submodule(name), nn.SyncBatchNorm)]


def kept_norms(model: nn.Module) -> list[str]:
    """Return the names of those that keep running statistics, in the order of the model."""
    found = training_norms(model)
    return [
        name for name in found if model.get_submodule(name)._buffers.get("running_mean") is not None
    ]


def require_shards(shards: object) -> None:
    """Refuse what is no number of logical shards.

    Raises:
        PlanError: it is none.
    """
    if not isinstance(shards, int) or isinstance(shards, bool) or shards < 1:
        raise PlanError(
            f"plan deterministic.shards={shards!r}: a number of logical shards, 1 or more."
        )
