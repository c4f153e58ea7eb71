"""Experts change their rank: to where there is less to do, with their optimizer states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vescale_comm.agreement import Facts, require_same
from vescale_dtensor import DTensor, RaggedShard
from vescale_dtensor.storage import set_gradient_reducer

from vescale_parallel._apply.gradients import BUCKET_BYTES, BucketedReducer
from vescale_parallel._apply.optimizers import Distribute, optimizers_of, take_over
from vescale_parallel._common.gradient_dtypes import keep_gradient_dtype
from vescale_parallel._common.mesh import everyone
from vescale_parallel._common.messages import listed
from vescale_parallel._errors import DisagreementError, ParallelError
from vescale_parallel._experts.forward import ExpertsForward
from vescale_parallel._experts.partition import partition

_HEAD = "balance_experts was not given the same on all ranks, and has moved nothing:"
_ADVICE = "Pass the counts of all tokens, as Routing.load gives them, on every rank."


def balance_experts(
    model: nn.Module,
    loads: Mapping[str, Any],
    *,
    most: int | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> dict[str, tuple[int, ...]]:
    """Move experts between the ranks that share them, so that the busiest has least to do.

    Collective. Each rank goes on to hold consecutive experts, so names, values, checkpoints and the
    order of all sums stay; how many it holds changes. Their parameters are new objects; living
    optimizers are given them, and the states of what moves go along. Take them from the model
    again: the old ones are empty, and a list of them that was kept for clipping clips nothing.

    Args:
        model: as `parallelize` returned it, without gradients (after `zero_grad`).
        loads: by names of modules of experts, how many tokens each expert had, as `Routing.load`
            counts them; the same on all ranks.
        most: experts that a rank may hold; None: twice as many as if all had as many.
        bucket_bytes: as for `parallelize`.

    Returns:
        By names of modules, how many experts each rank holds now.

    Raises:
        DisagreementError: on every rank: loads differ.
        ParallelError: there is no such module of experts, experts are not over one axis of ranks,
            stacks are stored otherwise (`zero`, stages), hold gradients, or loads do not fit.
    """
    known = {
        name: forward
        for name, module in model.named_modules()
        if isinstance(forward := vars(module).get("forward"), ExpertsForward)
    }
    if not known:
        raise ParallelError("balance_experts: the model has no experts that a plan shards.")
    # Among the ranks of its mesh only: others may hold another model, and never come here.
    group = everyone(next(iter(known.values())).mesh)
    moved: dict[str, ExpertsForward] = {}
    counts: dict[str, tuple[int, ...]] = {}
    failure: Exception | None = None
    try:
        moved = {name: _experts(known, name) for name in loads}
    except Exception as error:  # told first: the others would wait for a rank that raises here
        failure = error
    kinds = {n: "distributed" if isinstance(loads[n], DTensor) else "plain" for n in moved}
    held = {"loads of": kinds}
    require_same(Facts(held, _HEAD, _ADVICE, DisagreementError), group, problem=failure)
    # Only now, as each is a collective.
    whole = {n: one.full_tensor() if isinstance(one, DTensor) else one for n, one in loads.items()}
    try:
        counts = {name: _counts(name, moved[name], load, most) for name, load in whole.items()}
    except Exception as error:
        failure = error
    held = {"shares of experts": {name: str(one) for name, one in counts.items()}}
    require_same(Facts(held, _HEAD, _ADVICE, DisagreementError), group, problem=failure)
    # Only now: up to here nothing has changed, and every rank goes on.
    optimizers = optimizers_of(model)
    for name, share in counts.items():
        forward = known[name]
        old = [forward.module.get_parameter(one) for one in forward.kind.stacks]
        made = dict(_moved(forward, share))
        take_over(optimizers, made)
        new = [parameter for parameter, _ in made.values()]
        set_gradient_reducer(new, BucketedReducer(bucket_bytes), owned=True)
        # Last, when modules and optimizers hold the new ones: who still computes with an old one
        # finds it empty, and does not train a copy.
        for stack in old:
            _emptied(stack)
        assert forward.shares is not None
        forward.shares = replace(forward.shares, counts=share)
    return counts


def _experts(known: Mapping[str, ExpertsForward], name: str) -> ExpertsForward:
    """Return the forward of a module of experts that can be moved."""
    forward = known.get(name)
    if forward is None:
        raise ParallelError(
            f"'{name}' is no module of experts that a plan shards. There are {listed([*known])}."
        )
    stacks = [forward.module.get_parameter(one) for one in forward.kind.stacks]
    if forward.shares is None or len(forward.over) != 1:
        raise ParallelError(f"the experts of '{name}' are not shared over one axis of the mesh.")
    if any(not isinstance(p, DTensor) or p.device_mesh != forward.mesh for p in stacks):
        raise ParallelError(
            f"the experts of '{name}' are stored over other ranks than they compute on, by "
            "zero= or stages: they cannot be moved."
        )
    if any(p.grad is not None for p in stacks):
        raise ParallelError(f"the experts of '{name}' hold gradients: call zero_grad() first.")
    return forward


def _counts(name: str, forward: ExpertsForward, load: Any, most: int | None) -> tuple[int, ...]:
    experts, ranks = forward.kind.experts, len(forward.shares.counts) if forward.shares else 1
    numbers = [int(one) for one in (load.tolist() if isinstance(load, Tensor) else load)]
    bound = 2 * -(-experts // ranks) if most is None else most
    # One more where capacity drops tokens: the last counts those, which nobody computes.
    if len(numbers) not in (experts, experts + 1) or min(numbers) < 0 or bound * ranks < experts:
        raise ParallelError(
            f"balance_experts of '{name}': {len(numbers)} loads and at most {bound} experts on "
            f"each of {ranks} ranks, for {experts} experts. Pass one load, not negative, for each."
        )
    return partition(numbers[:experts], ranks, bound)


@torch.no_grad()
def _emptied(stack: nn.Parameter) -> None:
    """Give back the memory of a parameter that was replaced; computing with it raises."""
    stack.data = stack.detach()[:0]


def _moved(
    forward: ExpertsForward, counts: tuple[int, ...]
) -> Iterator[tuple[int, tuple[nn.Parameter, Distribute]]]:
    """Redistribute the stacks of a module; yields what `take_over` asks for. Collective."""
    axis = forward.over[0]
    for name in forward.kind.stacks:
        old = forward.module.get_parameter(name)
        assert isinstance(old, DTensor)
        where = [
            RaggedShard((0,), counts) if position == axis else one
            for position, one in enumerate(old.placements)
        ]

        # `where` as a default: optimizers call this behind the loop, whose variable is that of the
        # last stack by then.
        def distribute(tensor: Tensor, where: list[Any] = where) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            # Also what optimizers remember of it: each expert goes on with its own moments.
            moved: Tensor = tensor.detach().redistribute(forward.mesh, where)
            return moved

        new = nn.Parameter(distribute(old), requires_grad=old.requires_grad)
        keep_gradient_dtype(new, old)
        forward.placements[name] = tuple(
            RaggedShard((0,), counts) if position == axis else one
            for position, one in enumerate(forward.placements[name])
        )
        holder, _, own = name.rpartition(".")
        setattr(forward.module.get_submodule(holder), own, new)
        yield id(old), (new, distribute)
