"""What the tests of captured training share: small trainings, each built twice and compared."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import vescale_dtensor as vd
from capture_guards import line, rows, spread
from torch import nn
from vescale_dtensor import Shard

STEPS = 7  # two recordings, replays, and a new rate of a scheduler after the fifth
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


def whole_step(model, optimizer, wrap):
    """A training step, of which all but the update is wrapped."""

    def gradients(x):
        optimizer.zero_grad()
        loss = losses(model, x)
        loss.backward()
        return loss.detach()

    wrapped = wrap(gradients)

    def step(x):
        loss = wrapped(x)
        optimizer.step()
        return loss

    return step


def adam(model, **options):
    return torch.optim.Adam(model.parameters(), lr=0.01, **options)


def state_of(training):
    values = [*training.model.state_dict().values(), *training.more]
    for state in training.optimizer.state.values():
        values += [v for v in state.values() if isinstance(v, torch.Tensor)]
    for module in training.more:
        if isinstance(module, nn.Module):
            values += list(module.state_dict().values())
    values = [v for v in values if isinstance(v, torch.Tensor)]
    return [(v.to_local() if isinstance(v, vd.DTensor) else v).detach().clone() for v in values]


def trains(build, steps=STEPS, check=False, refused="raise"):
    """Train both copies; the captured function is made by the case."""
    made = []

    def captured(function):
        made.append(vd.capture(function, check=check, refused=refused))
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
