"""A model in stages, eager and static, beside each other: the same bits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from stage_runs import whole
from torch import Tensor, nn
from vescale_comm.nested import tensors_within
from vescale_parallel import CapturedUnit, Plan, captured_units, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh

Calls = Callable[[nn.Module, torch.optim.Optimizer], Sequence[Any]]
"""What a test does with a model; the tensors in what it returns are compared."""


def values_of(outputs: Any) -> list[Tensor]:
    return [whole(one).detach().clone() for one in tensors_within(outputs)]


def made(make: Callable[[], nn.Module], sizes: Mapping[str, int], how: Plan, static: bool) -> Any:
    model = make()
    parallelize(model, make_mesh(device_type="cpu", **sizes), how, static=static)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def require_same_bits(
    make: Callable[[], nn.Module], sizes: Mapping[str, int], how: Plan, calls: Calls
) -> list[CapturedUnit]:
    """Make the calls of an eager and of a static model; returns the units of the latter."""
    found: list[list[Tensor]] = []
    for static in (False, True):
        model, optimizer = made(make, sizes, how, static)
        torch.manual_seed(11)
        values = values_of(calls(model, optimizer))
        values += values_of(list(model.state_dict().values()))
        found.append([*values, torch.get_rng_state()])
    eager, captured = found
    assert len(eager) == len(captured) > 4
    for at, (one, two) in enumerate(zip(eager, captured, strict=True)):
        assert torch.equal(one, two), at
    return captured_units(model)


def trained(
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]], steps: int = 3
) -> Calls:
    """Some steps: losses, and all gradients of each."""

    def calls(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        every: list[Any] = []
        for step in range(steps):
            args, kwargs = batch(step)
            every.append(forward_backward(model, *args, **kwargs))
            every += [values_of([one.grad]) for one in model.parameters() if one.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        return every

    return calls


def are_plain(units: Sequence[CapturedUnit]) -> bool:
    """Whether all run eagerly, as a stage on one rank has no dispatch to save."""
    told = [one.replays == 0 and "plain tensors" in str(one.refusal) for one in units]
    return bool(told) and all(told)


def replays(units: Sequence[CapturedUnit]) -> dict[str, int]:
    """By name, of units that are captured, how many calls were replayed."""
    return {one.name: one.replays for one in units if one.name and one.refusal is None}
