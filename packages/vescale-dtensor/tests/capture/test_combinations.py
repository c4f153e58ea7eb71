"""Whole training steps, captured, train bit for bit as in eager.

A case builds a step of a model and an optimizer. It is built twice from one seed; one copy runs in
eager, the other captured; losses, parameters and the states of optimizers are compared after every
step.
"""

import pytest
import torch
from captured_training import (
    STEPS,
    Training,
    adam,
    losses,
    network,
    plain_step,
    sgd,
    trains,
    with_optimizer,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from vescale_comm import simulate
from vescale_comm.testing import run

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def step_case(name, body):
    """A case of SGD whose step is `body(model, optimizer, x)`."""

    def build(wrap):
        model = network()
        optimizer = sgd(model)
        return Training(model, optimizer, wrap(lambda x: body(model, optimizer, x)))

    CASES[name] = build


def clipped_by(clip):
    def body(model, optimizer, x):
        optimizer.zero_grad()
        loss = losses(model, x)
        loss.backward()
        clip(model.parameters())
        optimizer.step()
        return loss.detach()

    return body


def accumulated(model, optimizer, x):
    optimizer.zero_grad()
    total = torch.zeros(())
    for scale in (0.25, 0.75):
        loss = losses(model, x * scale) * scale
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


step_case("clipping by norm", clipped_by(lambda p: nn.utils.clip_grad_norm_(p, 0.1)))
step_case(
    "clipping by norm, for-loop",
    clipped_by(lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=False)),
)
step_case("clipping by value", clipped_by(lambda p: nn.utils.clip_grad_value_(p, 0.01)))
step_case("accumulation inside", accumulated)


@case
def scheduler_outside(wrap):
    training = with_optimizer("SGD foreach")(wrap)
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, step_size=5, gamma=0.5)
    training.after = scheduler.step
    return training


@case
def learning_rate_that_is_a_tensor(wrap):
    model = network()
    rate = torch.tensor(0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, fused=True)
    training = Training(model, optimizer, wrap(lambda x: plain_step(model, optimizer, x)))
    training.after = lambda: rate.mul_(0.9)
    return training


@case
def exponential_average(wrap):
    model = network()
    optimizer = sgd(model)
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    training = Training(model, optimizer, wrap(lambda x: plain_step(model, optimizer, x)))
    training.after = lambda: average.update_parameters(model)
    training.more = (average,)
    return training


@case
def average_inside(wrap):
    model = network()
    optimizer = sgd(model)
    averages = [p.detach().clone() for p in model.parameters()]

    def step(x):
        loss = plain_step(model, optimizer, x)
        with torch.no_grad():
            torch._foreach_lerp_(averages, list(model.parameters()), 0.1)
        return loss

    return Training(model, optimizer, wrap(step), more=tuple(averages))


@case
def evaluation_in_between(wrap):
    model = network()
    optimizer = sgd(model)
    forward = wrap(model)

    def step(x):
        optimizer.zero_grad()
        loss = (forward(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            seen = forward(x).sum()
        model.train()
        return loss.detach() + seen

    return Training(model, optimizer, step)


@case
def checkpoint_around(wrap):
    model = network()
    optimizer = sgd(model)
    up = wrap(lambda x: model.up(x).relu())

    def step(x):
        optimizer.zero_grad()
        hidden = checkpoint(up, x.detach().requires_grad_(), use_reentrant=False)
        loss = model.down(hidden).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


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
def average_of_torch_inside(wrap):
    model = network()
    optimizer = adam(model, foreach=True)
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def step(x):
        loss = plain_step(model, optimizer, x)
        average.update_parameters(model)
        return loss

    return Training(model, optimizer, wrap(step), more=(average,))


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


def combination(rank, world_size, name):
    captured = trains(CASES[name])
    assert captured.replays >= STEPS - 3  # two recordings, and a new rate
    if name not in ONLY_ONCE:
        trains(CASES[name], check="sampled")


@pytest.mark.parametrize("name", list(CASES))
def test_combinations(name):
    run(combination, 2, name)


SIMULATED = ["clipping by norm", "average_of_torch_inside", "evaluation_in_between"]


@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_ranks_that_are_threads(name):
    simulate(2)(combination, name)
