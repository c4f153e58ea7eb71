"""Random combinations of what training steps are made of train bit for bit as in eager.

Each number stands for one combination of {optimizer, implementation} × clipping × scheduler ×
accumulation × GradScaler × average × evaluation × checkpointing × autocast × what is captured.
"""

import random
import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import vescale_dtensor as vd
from captured_training import OPTIMIZERS, Training, network, trains
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from vescale_comm.testing import on_ranks

CLIPS = {
    "none": lambda parameters: None,
    "norm": lambda p: nn.utils.clip_grad_norm_(p, 0.1),
    "norm, for-loop": lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=False),
    "infinite norm": lambda p: nn.utils.clip_grad_norm_(p, 0.1, float("inf")),
    "value": lambda p: nn.utils.clip_grad_value_(p, 0.01),
}
SCHEDULERS = {
    "none": None,
    "step": lambda o: lr_scheduler.StepLR(o, 4, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "warm restarts": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.StepLR(o, 3)], [3]
    ),
}
AVERAGES = ("none", "lerp inside", "of torch outside")
CAPTURED = (
    *("step", "forward", "checkpointed forward"),
    *("forward that checkpoints", "step that checkpoints", "forward that torch checkpoints"),
)


@dataclass(frozen=True)
class Combination:
    """What a step is made of."""

    optimizer: str
    clip: str
    scheduler: str
    microbatches: int
    scaler: bool
    average: str
    evaluates: bool
    autocast: bool
    set_to_none: bool
    captured: str


def combination(number):
    draw = random.Random(number)
    return Combination(
        draw.choice(sorted(OPTIMIZERS)),
        draw.choice(sorted(CLIPS)),
        draw.choice(sorted(SCHEDULERS)),
        draw.choice((1, 1, 3)),
        draw.random() < 0.3,
        draw.choice(AVERAGES),
        draw.random() < 0.3,
        draw.random() < 0.2,
        draw.random() < 0.6,
        draw.choice((*CAPTURED, "step", "step")),
    )


def forward_of(one, model, wrap):
    """What computes a loss, and what wraps the step."""

    def loss_of(x):
        mode = torch.autocast("cpu", torch.bfloat16) if one.autocast else nullcontext()
        with mode:
            if one.captured == "forward that torch checkpoints":
                found = checkpoint(model, x, use_reentrant=False)
            elif one.captured.endswith("that checkpoints"):
                found = vd.checkpoint(model, x)
            else:
                found = model(x)
        return (found.float() - x).square().mean()

    if one.captured.startswith("step"):
        return loss_of, wrap
    captured = wrap(loss_of)
    if one.captured == "checkpointed forward":
        return lambda x: checkpoint(captured, x, use_reentrant=False), lambda step: step
    return captured, lambda step: step


def build(one):
    """A case of a training that is such a combination."""

    def made(wrap):
        model = network()
        cls, options = OPTIMIZERS[one.optimizer]
        optimizer = cls(model.parameters(), lr=0.01, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=one.scaler)
        averages = [p.detach().clone() for p in model.parameters()]
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        loss_of, outer = forward_of(one, model, wrap)

        def gradients(x):
            if one.average == "lerp inside":
                with torch.no_grad():
                    torch._foreach_lerp_(averages, list(model.parameters()), 0.1)
            optimizer.zero_grad(set_to_none=one.set_to_none)
            total = torch.zeros(())
            for part in range(one.microbatches):
                loss = loss_of(x * (1 + part)) / one.microbatches
                scaler.scale(loss).backward()
                total = total + loss.detach()
            if not one.scaler:
                CLIPS[one.clip](model.parameters())
            return total

        wrapped = outer(gradients)

        def step(x):
            total = wrapped(x)
            if one.scaler:
                scaler.unscale_(optimizer)
                CLIPS[one.clip](model.parameters())
            scaler.step(optimizer)
            scaler.update()
            return total

        training = Training(model, optimizer, step, more=(ema, *averages))
        make = SCHEDULERS[one.scheduler]
        scheduler = make(optimizer) if make is not None else None
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

        def after():
            if scheduler is not None:
                scheduler.step()
            if one.average == "of torch outside":
                ema.update_parameters(model)
            if one.evaluates:
                model.eval()
                with torch.no_grad():
                    model(inputs)
                model.train()

        training.after = after
        return training

    return made


@pytest.mark.parametrize("number", range(40))
@on_ranks(2, simulated=True)
def test_random_combinations(number):
    one = combination(number)
    print(one)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rates that change, and by schedulers of torch
        captured = trains(build(one), refused="run")
    if one.captured == "forward that torch checkpoints":
        assert "saved-tensor hooks are active" in captured.refusal
    else:
        assert captured.replays, one
        assert captured.refusal is None, one
