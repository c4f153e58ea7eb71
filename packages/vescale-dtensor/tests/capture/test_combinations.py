"""Whole training steps of unusual parts, and of every optimizer, train bit for bit as in eager.

A case builds a step of a model and an optimizer. It is built twice from one seed; one copy runs in
eager, the other captured; losses, parameters and the states of optimizers are compared after every
step. Optimizers that count their steps in Python are one step of the program.
"""

import captured_training
import pytest
import torch
from captured_training import STEPS, Training, adam, losses, network, plain_step, sgd, trains
from named_cases import named_cases
from torch import nn
from vescale_comm.testing import on_ranks, run

CASES, case = named_cases()


@case
def learning_rate_that_is_a_tensor(wrap):
    model = network()
    rate = torch.tensor(0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, fused=True)
    training = Training(model, optimizer, wrap(lambda x: plain_step(model, optimizer, x)))
    training.after = lambda: rate.mul_(0.9)
    return training


class Trainer:
    """Reaches its optimizer by an attribute, and has hooks on it."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.steps = torch.zeros(())
        optimizer.register_step_pre_hook(lambda *_: self.note(self.steps + 1))
        optimizer.register_step_post_hook(lambda *_: self.note(self.steps * 2))

    def note(self, steps):
        self.steps.copy_(steps)

    def step(self, x):
        return plain_step(self.model, self.optimizer, x)


@case
def an_optimizer_with_hooks(wrap):
    model = network()
    trainer = Trainer(model, adam(model, foreach=True))
    return Training(model, trainer.optimizer, wrap(trainer.step), more=(trainer.steps,))


@case
def two_optimizers(wrap):
    model = network()
    optimizers = [
        torch.optim.AdamW(model.up.parameters(), lr=0.01, foreach=True),
        torch.optim.SGD(model.down.parameters(), lr=0.05, momentum=0.9),
    ]

    def step(x):
        loss = losses(model, x)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Training(model, optimizers[0], wrap(step))


@case
def the_optimizer_alone(wrap):
    model = network()
    optimizer = adam(model, foreach=True)

    def update(norm):
        nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()

    captured = wrap(update)

    def step(x):
        loss = losses(model, x)
        loss.backward()
        captured(0.1)
        return loss.detach()

    return Training(model, optimizer, step)


@case
def accumulation_over_calls(wrap):
    model = network()
    optimizer = adam(model, foreach=True)

    def part(x, last):
        loss = losses(model, x)
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    captured = wrap(part)
    return Training(model, optimizer, lambda x: captured(x, False) + captured(x * 2, True))


@case
def an_optimizer_made_inside(wrap):
    model = network()
    optimizer = sgd(model)

    def step(x):
        # Its step counts begin anew in each call, so they are constants of the program.
        weight = torch.ones(4, requires_grad=True)
        inner = torch.optim.Adam([weight], foreach=False)
        for _ in range(2):
            (x * weight).sum().backward()
            inner.step()
        return plain_step(model, optimizer, x * weight.detach())

    return Training(model, optimizer, wrap(step))


class Halving(torch.optim.Optimizer):
    """Somebody's own optimizer, whose rate follows from a number that it reads."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("step", torch.zeros(())).add_(1)
                p.add_(p.grad, alpha=-group["lr"] / self.steps_of(state))

    def steps_of(self, state):
        return state["step"].item()


@case
def an_optimizer_of_the_users(wrap):
    model = network()
    optimizer = Halving(model.parameters())
    return Training(model, optimizer, wrap(lambda x: plain_step(model, optimizer, x)))


@torch.library.custom_op("capture_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_autograd(lambda ctx, gradient: gradient * 3)  # not 2: so it is seen


@case
def a_custom_operator(wrap):
    """What a custom `autograd.Function` is to be written as."""
    model = network()
    optimizer = adam(model, fused=True)

    def step(x):
        optimizer.zero_grad()
        loss = doubled(losses(model, x))
        local = doubled(model.down.weight.to_local()).sum()
        loss.backward(), local.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, wrap(step))


# What hooks of a step that is called again do cannot be undone, so checks refuse it.
ONLY_ONCE = {"an_optimizer_with_hooks"}


@pytest.mark.parametrize("name", list(CASES))
@on_ranks(2)
def test_combinations(name):
    captured = trains(CASES[name])
    assert captured.replays >= STEPS - 3  # two recordings, and a new rate
    if name not in ONLY_ONCE:
        trains(CASES[name], check="sampled")


def a_scheduler_of_each_step(wrap):
    model = captured_training.network()
    optimizer = captured_training.adam(model, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    step = wrap(lambda x: captured_training.plain_step(model, optimizer, x))
    return captured_training.Training(model, optimizer, step, after=scheduler.step)


def verdict(rank, world_size, name):
    function = captured_training.trains(captured_training.with_optimizer(name))
    # What the optimizer makes at its first step is there before the second.
    assert 1 <= len(function.programs) <= 2
    assert function._misses.replays >= captured_training.STEPS - 2
    return len(function.programs[0].live)


@pytest.mark.parametrize("name", list(captured_training.OPTIMIZERS))
def test_optimizers_inside(name):
    assert run(verdict, 2, name) == [1, 1]  # called again at each replay


@on_ranks(2)
def test_a_rate_of_each_step_is_read_at_each_replay():
    captured = captured_training.trains(a_scheduler_of_each_step, steps=10)
    assert len(captured.programs) <= 2
