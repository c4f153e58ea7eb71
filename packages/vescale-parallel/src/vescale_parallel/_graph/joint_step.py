"""`train_step`: the joint graph of a parallelised model's step, ZeRO's gathers among its nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from vescale_dtensor import Joint, capture
from vescale_dtensor.storage import joint_stored

from vescale_parallel._errors import GraphError
from vescale_parallel._graph.agreement import agreed
from vescale_parallel._graph.collectives import collectives, dependencies, needs
from vescale_parallel._graph.placement import place_collectives
from vescale_parallel._graph.stored_units import StoredUnit
from vescale_parallel._zero.schedule import zero_schedule_of


def train_step(model: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Joint:
    """Forward, loss, backward and gradient sums of a parallelised model as one graph.

    As `vescale_dtensor.joint(capture(function), ...)`, and for models with ZeRO too: each unit is
    gathered where it is first used (level 3: and anew where the backward first uses it), and its
    gradients are reduced in one collective as soon as they are there. `with_optimizer` adds
    the optimizer, `schedule` merges and reorders what is sent.

    While the graph is made, all units are gathered at once, and the function runs, once or a few
    times: buffers are written to and random numbers drawn as in any forward, no gradient is made,
    and no optimizer steps. Collective.

    Args:
        model: what `parallelize` returned.
        function: forward and loss, of the model; it returns the loss alone or first of a tuple.
        *args: of a call of it.
        **kwargs: of the same call.

    Raises:
        GraphError: units of which a graph cannot be made (logical shards, stages).
        CaptureError: see `vescale_dtensor.joint`.
        DisagreementError: ranks would gather or reduce other things, or in another order.

    Examples:
        step = graph.train_step(model, lambda x, y: loss_of(model(x), y), x, y)
        step = step.with_optimizer(optimizer, max_norm=1.0)
        step = step.running(graph.schedule(step.graph_module).graph_module)
        loss, norm = step(x, y)
    """
    schedule = zero_schedule_of(model)
    units = schedule.units if schedule is not None else []
    for unit in units:
        if unit.collect is not None or not unit.syncs:
            raise GraphError(
                "train_step: gradients of the model are not reduced in its backward (logical "
                "shards, no_sync): no graph is made of such a step"
            )
        if any(buffer.host is not None for buffer in unit.buffers):
            raise GraphError(
                "train_step: parameters of the model lie on the host by offload=, and a graph is "
                "of one device: parallelize without it"
            )
        if unit.forward is not None:
            raise GraphError("train_step: the model is static=True; parallelize it without")
    # The root's comes first, though it may have nothing.
    stored = [StoredUnit(unit) for unit in units if unit.held]
    try:
        whole = joint_stored(capture(function, check=None), args, kwargs, stored)
    finally:
        for one in stored:
            one.let_go()
    again = {one.names[0] for one in stored if _is_given_back(one)}
    made = place_collectives(whole.graph_module, again)
    found = collectives(made.graph)
    waits, *_ = dependencies(made)
    # Only to compare: ranks whose gathers stood in another order would wait for each other in the
    # first step.
    agreed(found, needs(found, waits))
    return whole.running(made)


def _is_given_back(one: StoredUnit) -> bool:
    """Whether a unit is gathered anew for the backward: as in eager mode, not the root."""
    buffers = one.unit.buffers
    return bool(one.unit.name) and any(buffer.row.zero == 3 for buffer in buffers)
