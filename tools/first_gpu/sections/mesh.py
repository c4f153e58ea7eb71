"""A mesh of simulated ranks on the one device, beside one device: operators and training."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from torch import Tensor

from tools.first_gpu.cases import Case, Found, alike, both
from tools.first_gpu.models import (
    TRAININGS,
    Training,
    built,
    one_device,
    parallelised,
    step_of,
    train,
)
from tools.first_gpu.sections._operators import FAMILIES, Operator

SIZES = (2, 4, 8)


def cases(device: torch.device) -> list[Case]:
    """Trainings and families of operators in turns, on two ranks first."""
    trainings = [
        (training.ranks, Case(f"train {name}", partial(_trained, training)))
        for name, training in TRAININGS.items()
    ]
    families = [
        (ranks, Case(f"{name}, {ranks} ranks", partial(_operators, name, ranks)))
        for ranks, name in product(SIZES, FAMILIES)
    ]
    # Python's sort keeps the order of those that are equal.
    return [case for _, case in sorted([*trainings, *families], key=lambda one: one[0])]


def _trained(training: Training, device: torch.device) -> Found:
    from vescale_comm import simulate

    torch.manual_seed(0)
    expected = train(built(training.model, device), one_device(training), device)

    def body(rank: int, world_size: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return train(parallelised(training, device), step_of(training), device)

    found = simulate(training.ranks)(body)
    return both(*(_compared(expected, one, rank) for rank, one in enumerate(found)))


def _compared(expected: dict[str, Tensor], found: dict[str, Tensor], rank: int) -> Found:
    pairs = {f"rank {rank}: {name}": (one, found[name]) for name, one in expected.items()}
    return alike(pairs)


def _operators(family: str, ranks: int, device: torch.device) -> Found:
    """Each operator of a family along each dim of its operands, with gradients."""
    return both(*(_along(one, ranks, device) for one in FAMILIES[family]))


def _along(operator: Operator, ranks: int, device: torch.device) -> Found:
    from vescale_comm import simulate

    expected = operator.on_one_device(device)
    found = simulate(ranks)(lambda rank, world_size: operator.on_ranks(device, world_size))
    pairs = {
        f"{operator.name} {layout}, rank {rank}: {what}": (expected[what], value)
        for rank, layouts in enumerate(found)
        for layout, values in layouts.items()
        for what, value in values.items()
    }
    return alike(pairs)
