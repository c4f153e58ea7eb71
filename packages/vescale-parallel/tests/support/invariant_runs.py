"""Training whose bits must not depend on the ranks: what is run, and what is compared."""

import hashlib
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn, optim
from vescale_comm import simulate
from vescale_parallel import Plan, clip_grad_norm_, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import Decoder, plan_for, whole

OPTIONS: dict[str, Any] = {"blocks": 2, "width": 37, "vocabulary": 17}
"""Uneven on every number of ranks."""


def batch(step: int, rows: int = 11) -> tuple[Tensor, Tensor]:
    """Tokens and targets."""
    generator = torch.Generator().manual_seed(step)
    pieces = torch.randint(17, (rows, 6), generator=generator)
    return pieces[:, :-1], pieces[:, 1:]


def invariant_plan(sizes: Mapping[str, int], zero: Any, **words: Any) -> Plan:
    """The decoder's plan, invariant."""
    return plan_for(sizes, zero, deterministic="dp-invariant", **words)


def build(sizes: Mapping[str, int], zero: Any = 0, static: bool = False, **words: Any) -> nn.Module:
    """The decoder, parallelised over a mesh of these sizes."""
    torch.manual_seed(0)
    model = Decoder(**OPTIONS)
    plan = invariant_plan(sizes, zero, **words)
    return parallelize(model, make_mesh(device_type="cpu", **sizes), plan, static=static)


def steps(model: nn.Module, optimizer: optim.Optimizer, numbers: Any, rows: int = 11) -> list[str]:
    """Losses and norms of some steps, as bits; dropout goes on from the generator."""
    found = []
    for step in numbers:
        optimizer.zero_grad()
        loss = forward_backward(model, *batch(step, rows))
        norm = clip_grad_norm_(model, 1.0)
        optimizer.step()
        found += [loss.item().hex(), norm.item().hex()]
    return found


def digest(model: nn.Module) -> str:
    """All parameters, as a hash."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(whole(parameter.detach()).contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def trained(
    sizes: Mapping[str, int], zero: Any, number: int = 2, rows: int = 11, **words: Any
) -> tuple[list[str], str]:
    """Losses, norms and the digest of a training on simulated ranks."""

    def run(rank: int, world_size: int) -> tuple[list[str], str]:
        model = build(sizes, zero, **words)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        return steps(model, optimizer, range(number), rows), digest(model)

    found = simulate(prod(sizes.values())).run(run)
    assert all(one == found[0] for one in found)
    return found[0]


def resumed(first: tuple[int, Any], second: tuple[int, Any]) -> tuple[list[str], str]:
    """Two steps on one number of ranks, then two on another, from plain tensors between them."""

    def begin(rank: int, world_size: int) -> Any:
        model = build({"dp": first[0]}, first[1])
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        found = steps(model, optimizer, range(2))
        states = [optimizer.state[one] for one in model.parameters()]
        plain = [{key: whole(value) for key, value in one.items()} for one in states]
        values = [whole(one.detach()).clone() for one in model.parameters()]
        return found, values, plain, torch.get_rng_state()

    def go_on(rank: int, world_size: int, values: Any, plain: Any, generator: Tensor) -> Any:
        torch.manual_seed(5)
        model = Decoder(**OPTIONS)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        for parameter, value, state in zip(model.parameters(), values, plain, strict=True):
            parameter.data.copy_(value)
            optimizer.state[parameter] = {k: v.clone() for k, v in state.items()}
        torch.set_rng_state(generator)
        sizes = {"dp": second[0]}
        plan = invariant_plan(sizes, second[1])
        parallelize(model, make_mesh(device_type="cpu", **sizes), plan)
        return steps(model, optimizer, range(2, 4)), digest(model)

    one = simulate(first[0]).run(begin)[0]
    two = simulate(second[0]).run(go_on, *one[1:])[0]
    return one[0] + two[0], two[1]
