"""Whole training steps, captured, train ten steps bit for bit as in eager, or are refused.

A case builds a step of a model and an optimizer. It is built twice from one seed; one copy runs in
eager, the other captured; losses, parameters and the states of optimizers are compared after every
step. What is refused inside is right with `optimizer.step()` outside of the captured function.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import vescale_dtensor as vd
from capture_guards import line, rows, spread
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from vescale_comm.testing import run
from vescale_dtensor import Shard

STEPS = 10
# They read a step count, or a loss, into Python numbers: for-loops of most, and what needs a
# closure. On a GPU `capturable=True` keeps the count a tensor.
REFUSED = {
    *("ASGD foreach", "ASGD for-loop", "Adadelta differentiable", "Adafactor for-loop"),
    *("Adafactor foreach", "Adagrad foreach", "Adagrad for-loop", "Adam foreach", "Adam for-loop"),
    *("AdamW foreach", "AdamW for-loop", "Adamax foreach", "Adamax for-loop", "LBFGS"),
    *("NAdam foreach", "NAdam for-loop", "RAdam foreach", "RAdam for-loop"),
}
NEEDS_MORE = {"Optimizer", "SparseAdam", "LBFGS"}  # sparse gradients; a closure


def implementations():
    """Every optimizer of torch in each of its implementations, by name."""
    found = {}
    for name, cls in sorted(vars(torch.optim).items()):
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            continue
        if name in NEEDS_MORE:
            continue
        known = inspect.signature(cls.__init__).parameters
        ways = {"for-loop": {}}
        if "foreach" in known:
            ways = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}}
        if "fused" in known:
            ways["fused"] = {"fused": True}
        found |= {f"{name} {way}": (cls, options) for way, options in ways.items()}
    return found


OPTIMIZERS = implementations()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)
        self.up.weight = nn.Parameter(spread(self.up.weight.detach(), Shard(0)))
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return self.down(self.drop(self.up(x).relu()))


@dataclass
class Training:
    """One copy of what a case trains."""

    model: nn.Module
    optimizer: Any
    step: Callable[[Any], Any]
    after: Callable[[], None] = lambda: None
    more: tuple = ()


def network():
    torch.manual_seed(0)
    return vd.distribute_module(Net(), line())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def losses(model, x):
    return (model(x) - x).square().mean()


def plain_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = losses(model, x)
    loss.backward()
    optimizer.step()
    return loss.detach()


def with_optimizer(name):
    def build(wrap):
        cls, options = OPTIMIZERS[name]
        model = network()
        optimizer = cls(model.parameters(), lr=0.01, **options)
        return Training(model, optimizer, wrap(lambda x: plain_step(model, optimizer, x)))

    return build


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


def state_of(training):
    values = [*training.model.state_dict().values(), *training.more]
    for state in training.optimizer.state.values():
        values += [v for v in state.values() if isinstance(v, torch.Tensor)]
    for module in training.more:
        if isinstance(module, nn.Module):
            values += list(module.state_dict().values())
    values = [v for v in values if isinstance(v, torch.Tensor)]
    return [(v.to_local() if isinstance(v, vd.DTensor) else v).detach().clone() for v in values]


def trains(build, steps=STEPS):
    """Train both copies; the captured function is made by the case."""
    made = []

    def captured(function):
        made.append(vd.capture(function))
        return made[-1]

    eager, twin = build(lambda function: function), build(captured)
    for step in range(steps):
        found = []
        for training in (eager, twin):
            torch.manual_seed(step)
            loss = training.step(spread(rows(5, 4, seed=step)))
            training.after()
            found.append((loss, state_of(training), torch.get_rng_state()))
        (loss, states, random), (other, others, its) = found
        assert torch.equal(loss.full_tensor(), other.full_tensor()), step
        assert len(states) == len(others)
        assert all(map(torch.equal, states, others)), step
        assert torch.equal(random, its), step
    (function,) = made
    return function


def verdict(build):
    try:
        function = trains(build)
    except vd.CaptureError as error:
        return "refused" if "reads the value" in str(error) else str(error)
    assert function.programs
    return "right"


def optimizer_table(rank, world_size, names):
    return {name: verdict(with_optimizer(name)) for name in names}


def outside_table(rank, world_size, names):
    for name in names:
        cls, options = OPTIMIZERS[name]

        def build(wrap, cls=cls, options=options):
            model = network()
            optimizer = cls(model.parameters(), lr=0.01, **options)
            forward = wrap(lambda x: losses(model, x))

            def step(x):
                optimizer.zero_grad()
                loss = forward(x)
                loss.backward()
                optimizer.step()
                return loss.detach()

            return Training(model, optimizer, step)

        assert len(trains(build).programs) == 1


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizers_inside(name):
    (found, *others) = run(optimizer_table, 2, [name])
    assert others == [found]
    assert found[name] == ("refused" if name in REFUSED else "right")


def test_optimizers_outside():
    run(outside_table, 2, list(OPTIMIZERS), timeout=200)


def combination(rank, world_size, name):
    trains(CASES[name])


@pytest.mark.parametrize("name", list(CASES))
def test_combinations(name):
    run(combination, 2, name)
