"""Training steps of unusual parts train bit for bit as in eager; an optimizer's step is refused.

A case builds a step of a model and an optimizer. It is built twice from one seed; one copy runs in
eager, the other captured; losses, parameters and the states of optimizers are compared after every
step.
"""

import pytest
import torch
import vescale_dtensor as vd
from captured_training import OPTIMIZERS, STEPS, Training, adam, losses, network, trains, whole_step
from named_cases import named_cases
from torch import nn
from torch.optim.swa_utils import AveragedModel
from vescale_comm.testing import on_ranks

CASES, case = named_cases()


@case
def clipping_alone(wrap):
    model = network()
    optimizer = adam(model, foreach=True)
    clipped = wrap(lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm))

    def step(x):
        optimizer.zero_grad()
        loss = losses(model, x)
        loss.backward()
        clipped(0.1)
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


@case
def accumulation_over_calls(wrap):
    model = network()
    optimizer = adam(model, foreach=True)

    def part(x, first):
        if first:
            optimizer.zero_grad()
        loss = losses(model, x)
        loss.backward()
        return loss.detach()

    captured = wrap(part)

    def step(x):
        loss = captured(x, True) + captured(x * 2, False)
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


@case
def a_scheduler_of_each_step(wrap):
    model = network()
    optimizer = adam(model, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    return Training(model, optimizer, whole_step(model, optimizer, wrap), after=scheduler.step)


@torch.library.custom_op("capture_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_autograd(lambda ctx, gradient: gradient * 3)  # not 2: so it is seen


@case
def a_custom_operator(wrap):
    """What a custom `autograd.Function` is to be written as."""
    model = network()
    optimizer = adam(model, fused=True)

    def gradients(x):
        optimizer.zero_grad()
        loss = doubled(losses(model, x))
        local = doubled(model.down.weight.to_local()).sum()
        loss.backward(), local.backward()
        return loss.detach()

    captured = wrap(gradients)

    def step(x):
        loss = captured(x)
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


@pytest.mark.parametrize("name", list(CASES))
@on_ranks(2, simulated=True)
def test_combinations(name):
    captured = trains(CASES[name])
    assert captured.replays >= STEPS - 2
    trains(CASES[name], check="sampled")


def refused_steps():
    """Training steps in which an optimizer, a scaler or an average makes a step."""

    def stepping(update, build=adam):
        def case(wrap):
            model = network()
            optimizer = build(model)
            more = torch.amp.GradScaler("cpu", init_scale=16.0), AveragedModel(model)

            def step(x):
                optimizer.zero_grad()
                loss = losses(model, x)
                more[0].scale(loss).backward()
                update(optimizer, *more)
                return loss.detach()

            return Training(model, optimizer, wrap(step), more=more[1:])

        return case

    def unscaled(optimizer, scaler, average):
        scaler.unscale_(optimizer)
        scaler.step(optimizer), scaler.update()

    def of(cls, options):
        return lambda model: cls(model.parameters(), lr=0.01, **options)

    found = {
        name: ("the step of an optimizer", stepping(lambda o, *_: o.step(), of(*kind)))
        for name, kind in OPTIMIZERS.items()
    }
    found["unscale_"] = "a GradScaler's part", stepping(unscaled)
    found["update_parameters"] = (
        "reads the value of a tensor",
        stepping(lambda o, s, average: (average.update_parameters(average.module), o.step())),
    )
    return found


@pytest.mark.parametrize("name", list(refused_steps()))
@on_ranks(2, simulated=True)
def test_a_step_of_an_optimizer_is_refused(name):
    words, build = refused_steps()[name]
    assert words in trains(build, steps=3, refused="run").refusal
    with pytest.raises(vd.CaptureError, match=words):
        trains(build, steps=2)
