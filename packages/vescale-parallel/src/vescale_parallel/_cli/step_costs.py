"""Estimates the cost of a plan's step, with and without recomputation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from vescale_parallel._check.report import Report
from vescale_parallel._cost import Cluster, Cost
from vescale_parallel._cost.links import named_cluster
from vescale_parallel._plan.layers import looked_up
from vescale_parallel._plan.plan import Plan


@dataclass(frozen=True)
class Step:
    """What is trained at once.

    Attributes:
        sequences: of each data-parallel rank.
        sequence: tokens of one.
        recompute: whether the model computes its blocks again; else it is as the plan says.
    """

    sequences: int
    sequence: int
    recompute: bool


@dataclass(frozen=True)
class PlanCost:
    """A plan on a mesh, and its cost.

    Attributes:
        plan: the plan.
        report: the plan resolved.
        costs: of a step by whether blocks are recomputed; None: those that the plan says.
        chosen: which of them is asked for.
        memory: bytes of a device.
    """

    plan: Plan
    report: Report
    costs: Mapping[bool | None, Cost]
    chosen: bool | None
    memory: float

    @property
    def cost(self) -> Cost:
        """Of the step that is asked for."""
        return self.costs[self.chosen]

    @property
    def fits(self) -> bool:
        """Whether a device has the memory."""
        return self.cost.memory.total <= self.memory


def price_plan(
    model: nn.Module,
    plan: Plan,
    sizes: Mapping[str, int],
    step: Step,
    *,
    cluster: str | Cluster,
    memory: float | None = None,
) -> PlanCost:
    """Check a plan and price it.

    Raises:
        PlanError: the plan does not fit the model or the mesh, or there is no such cluster.
    """
    where = named_cluster(cluster)
    if memory is not None:
        # Of the cluster and not beside it: `Cost.fits` asks the cluster.
        where = replace(where, memory=memory)
    report = plan.check(model, sizes)
    ranks = 1
    for axis in report.batch.axes if report.batch else ():
        ranks *= sizes.get(axis, 1)
    costs = {
        recompute: report.cost(
            step.sequences * step.sequence * ranks,
            sequence=step.sequence,
            cluster=where,
            recompute=recompute,
            sequence_parallel=_sequence_parallel(plan),
            # By the type of modules: by itself the cost model goes by names, and takes any "*emb*"
            # for a table.
            lookups=looked_up(model),
        )
        # All three, whatever is asked for: the table shows what recomputation would save.
        for recompute in (False, True, None)
    }
    chosen = True if step.recompute else None
    return PlanCost(plan, report, costs, chosen, where.memory)


def _sequence_parallel(plan: Plan) -> bool:
    # Outside of its regions, activations are sharded where some module leaves them so.
    return any(
        text.rpartition("->")[2].strip().endswith(":1") for text in plan.activations.values()
    )
