"""Gradients that `no_sync` has kept are found by whatever looks for them, as on one device.

`zero_grad` drops them, in-place writes reach them, reading gives their sum, and a step that no
backward outside has preceded takes them in.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from vescale_comm import simulate
from vescale_parallel import forward_backward, no_sync
from zero_models import (
    backward,
    batch,
    distributed,
    make,
    require_same_gradients,
    require_same_values,
)

SIZES = [{"dp": 4}, {"dp": 2, "tp": 2}, {"replica": 2, "dp": 2}]


class Trainer:
    """A model and its optimizer, and what a program may do with them; steps are counted."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps = model, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def outside(self) -> None:
        backward(self.model, self.next())

    def inside(self) -> None:
        with no_sync(self.model):
            backward(self.model, self.next())

    def next(self) -> int:
        self.steps += 1
        return self.steps

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def write_zeros(self) -> None:
        self.model.zero_grad(set_to_none=False)

    def drop_one(self) -> None:
        next(self.model.parameters()).grad = None

    def drop_inside(self) -> None:
        self.model.blocks[1].mlp.down.weight.grad = None

    def scale(self) -> None:
        for one in self.model.parameters():
            if one.grad is not None:
                one.grad.mul_(0.5)

    def replace(self) -> None:
        for one in self.model.parameters():
            if one.grad is not None:
                one.grad = one.grad * 2

    def keep(self) -> None:
        for one in self.model.parameters():
            one.grad = one.grad

    def read(self) -> None:
        for one in self.model.parameters():
            if one.grad is not None:
                one.grad.sum()

    def freeze(self) -> None:
        """A unit, and one parameter of another; or, the next time, let them train again."""
        inner = self.model.blocks
        for one in (*inner[0].parameters(), inner[1].mlp.up.bias):
            one.requires_grad_(not one.requires_grad)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)

    def step(self) -> None:
        self.optimizer.step()


WORDS: list[Callable[[Trainer], None]] = [
    Trainer.outside,
    Trainer.inside,
    Trainer.inside,
    Trainer.zero_grad,
    Trainer.write_zeros,
    Trainer.drop_one,
    Trainer.drop_inside,
    Trainer.scale,
    Trainer.replace,
    Trainer.keep,
    Trainer.read,
    Trainer.freeze,
    Trainer.clip,
    Trainer.step,
]
PROGRAMS: dict[str, list[Callable[[Trainer], None]]] = {
    "dropped": [Trainer.inside, Trainer.zero_grad, Trainer.outside],
    "written": [Trainer.inside, Trainer.write_zeros, Trainer.outside],
    "after a reduction": [
        Trainer.outside, Trainer.inside, Trainer.write_zeros, Trainer.inside, Trainer.outside,
    ],
    "stepped": [Trainer.inside, Trainer.inside, Trainer.clip, Trainer.step, Trainer.outside],
    "frozen meanwhile": [
        Trainer.outside, Trainer.clip, Trainer.inside, Trainer.freeze, Trainer.outside,
        Trainer.step, Trainer.freeze, Trainer.inside, Trainer.freeze, Trainer.step,
    ],
    "one of them": [
        Trainer.inside, Trainer.drop_inside, Trainer.inside, Trainer.drop_one, Trainer.outside,
    ],
}  # fmt: skip


def run_program(
    program: list[Callable[[Trainer], None]], sizes: Any, zero: int, *, checked: bool = False
) -> None:
    """Compare at the end, or (`checked`) after each word, which changes where gradients are."""

    def rank(rank: int, world_size: int) -> None:
        found, wanted = Trainer(distributed(make(), sizes, zero)), Trainer(make())
        for number, word in enumerate(program):
            word(found)
            word(wanted)
            if checked or number == len(program) - 1:
                same(found, wanted, f"after {number} ({word.__name__})")
        found.step()
        wanted.step()
        require_same_values(found.model, wanted.model, rtol=1e-4, atol=1e-6)

    simulate(4).run(rank)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, sizes: dict[str, int], zero: int):
    run_program(PROGRAMS[name], sizes, zero)


def same(found: Trainer, wanted: Trainer, where: str) -> None:
    try:
        require_same_gradients(found.model, wanted.model)
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from error


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed: int):
    """A random program, on a random mesh and level."""
    dice = random.Random(seed)
    program = [dice.choice(WORDS) for _ in range(9)]
    sizes, zero, checked = dice.choice(SIZES), dice.choice([1, 2, 3]), dice.random() < 0.5
    run_program(program, sizes, zero, checked=checked)


def scaled(rank: int, world_size: int) -> None:
    found = []
    for model in (make(), distributed(make(), {"dp": 2, "tp": 2}, 3)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        with no_sync(model):
            for step in range(2):
                torch.manual_seed(step)
                scaler.scale(model(*batch(step))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        found.append(model)
    require_same_values(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_a_grad_scaler_finds_what_is_kept():
    simulate(4).run(scaled)


def interrupted(rank: int, world_size: int) -> None:
    plain, model = make(), distributed(make(), {"dp": 4}, 3, microbatches=2)
    for one in (plain, model):
        one.eval()
    calls: list[int] = []

    def second_raises(*_: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise ZeroDivisionError

    hook = model.blocks[2].register_forward_hook(second_raises)
    with pytest.raises(ZeroDivisionError):
        forward_backward(model, *batch(0))
    assert len(calls) == 2
    hook.remove()
    # What the first microbatch has left is thrown away, as on one device.
    model.zero_grad()
    for one in (plain, model):
        forward_backward(one, *batch(1))
    require_same_gradients(model, plain)


def test_what_a_step_has_kept_that_raised_is_dropped():
    simulate(4).run(interrupted)
