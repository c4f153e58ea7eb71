"""A mesh of simulated ranks on the one device, beside one device: operators and training."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from torch import Tensor

from tools.first_gpu.cases import Case, CaseResult, alike
from tools.first_gpu.models import (
    TRAININGS,
    Training,
    built,
    one_device,
    parallelised,
    step_of,
    train,
)
from tools.first_gpu.sections._operators import FAMILIES

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


def _trained(training: Training, device: torch.device) -> CaseResult:
    from vescale_comm import simulate

    torch.manual_seed(0)
    expected = train(built(training.model, device), one_device(training), device)

    def body(rank: int, world_size: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return train(parallelised(training, device), step_of(training), device)

    found = simulate(training.ranks)(body)
    return alike(
        {
            f"rank {rank}: {name}": (one, values[name])
            for rank, values in enumerate(found)
            for name, one in expected.items()
        }
    )


def _operators(family: str, ranks: int, device: torch.device) -> CaseResult:
    """Each operator of a family along each dim of its first operand, with gradients."""
    from vescale_comm import simulate

    operators = FAMILIES[family]
    expected = {one.name: one.on_one_device(device) for one in operators}

    def body(rank: int, world_size: int) -> dict[str, dict[str, dict[str, Tensor]]]:
        return {one.name: one.on_ranks(device, world_size) for one in operators}

    return alike(
        {
            f"{name} {layout}, rank {rank}: {what}": (expected[name][what], value)
            for rank, found in enumerate(simulate(ranks)(body))
            for name, layouts in found.items()
            for layout, values in layouts.items()
            for what, value in values.items()
        }
    )
