"""`Plan.search`: layouts side by side by the cost model, and the fastest of those that fit."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

from torch import nn

from vescale_parallel._check.report import Report
from vescale_parallel._common.messages import human_bytes, table
from vescale_parallel._cost import Cluster, Cost
from vescale_parallel._errors import PlanError
from vescale_parallel._notation.layout import parse_layout
from vescale_parallel._plan.layers import looked_up
from vescale_parallel._zero.units import unit_names


class Checked(Protocol):
    """What is asked of a plan here; `Plan` itself stands above this module."""

    @property
    def batch(self) -> str | None:
        """Layout of the batch."""

    def check(self, model: nn.Module, mesh_shape: Any) -> Report:
        """Return the plan resolved."""

    def with_(self, **fields: Any) -> Self:
        """Return the plan with other fields."""


P = TypeVar("P", bound=Checked)


@dataclass(frozen=True)
class Candidate(Generic[P]):
    """One layout.

    Attributes:
        name: as the table shows it.
        plan: the layout.
        sequence_parallel: whether its activations between layers are sharded.
    """

    name: str
    plan: P
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Question:
    """For what a layout is looked for.

    Attributes:
        sizes: of the mesh.
        batch: sequences of the global batch.
        sequence: tokens of one.
        recompute: whether the model itself computes its blocks again in backward.
        cluster: devices, their memory and links.
    """

    sizes: Mapping[str, int]
    batch: int
    sequence: int
    recompute: bool
    cluster: Cluster

    def cost(self, model: nn.Module, one: Candidate[Any]) -> Cost:
        """Return that of a step."""
        report: Report = one.plan.check(model, self.sizes)
        return report.cost(
            self.batch * self.sequence,
            sequence=self.sequence,
            cluster=self.cluster,
            recompute=self.recompute or None,
            sequence_parallel=one.sequence_parallel,
            lookups=looked_up(model),
        )

    def shares(self, one: Candidate[Any]) -> int:
        """Return how many ranks share the batch."""
        axes = parse_layout(one.plan.batch).axes if one.plan.batch else ()
        return math.prod(self.sizes.get(axis, 1) for axis in axes)


def candidates(
    layouts: Sequence[Candidate[P]], kinds: Sequence[str | None]
) -> Iterator[Candidate[P]]:
    """Return each layout with each level of ZeRO and each kind of checkpointing."""
    for one in layouts:
        for level in range(4):
            for kind in kinds:
                plan = one.plan.with_(zero=level, checkpoint=kind)
                name = f"{one.name}, zero={level}" + (f", checkpoint={kind}" if kind else "")
                yield Candidate(name, plan, one.sequence_parallel)


def _kinds(model: nn.Module, question: Question) -> list[str | None]:
    """Return how blocks may be recomputed: by the plan, unless the model does so itself."""
    has_blocks = len(unit_names(model, ())) > 1
    return [None, "selective", "full"] if has_blocks and not question.recompute else [None]


def search(model: nn.Module, layouts: Sequence[Candidate[P]], question: Question) -> tuple[P, str]:
    """Return the fastest candidate that fits, and the table that says why.

    Raises:
        PlanError: none fits; the message has the table.
    """
    rows: list[tuple[str, str, str, str]] = []
    found: list[tuple[float, float, int, Candidate[P]]] = []
    for one in candidates(layouts, _kinds(model, question)):
        # Some rank would have no sequence, and the cost model divides tokens evenly.
        if question.batch < question.shares(one):
            rows.append((one.name, "", "", f"{question.shares(one)} ranks share the batch"))
            continue
        cost = question.cost(model, one)
        size = human_bytes(round(cost.memory.total))
        verdict = "fits" if cost.fits else "too large"
        # Also of what does not fit: the table says how far it is from it.
        rows.append((one.name, size, f"{1e3 * cost.seconds:.4g}", verdict))
        if cost.fits:
            # Of equals the one with the least memory, and then the plainest.
            # The number also keeps `min` from comparing candidates, which have no order.
            found.append((cost.seconds, cost.memory.total, len(found), one))
    text = table(["layout", "bytes a rank", "ms a step", ""], rows, right=["bytes a rank"])
    head = _head(question)
    if not found:
        raise PlanError(
            f"{head}\n\n{text}\n\nno layout fits: take more ranks, a smaller batch, "
            "or devices with more memory."
        )
    best = min(found)[-1]
    return best.plan, f"{head}\n\n{text}\n\nchosen, as the fastest that fits: {best.name}"


def _head(question: Question) -> str:
    sizes = ", ".join(f"{axis}={size}" for axis, size in question.sizes.items())
    how = "recomputed by the model" if question.recompute else "as said"
    return (
        f"mesh({sizes}) of {question.cluster.name} with {human_bytes(int(question.cluster.memory))}"
        f", {question.batch} x {question.sequence} tokens a step, activations of blocks {how}"
    )
