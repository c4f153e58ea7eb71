"""Kinds of state in models, in what trains them, and in what feeds them."""

import copy
import functools

import torch
from capture_guards import linear, rows, spread
from stale_kinds import another, in_place, itself, kind, mutated
from stale_kinds_values import KINDS as KINDS
from torch import nn
from torch.nn.utils import parametrize
from vescale_dtensor import Replicate

# --- models


def ordered(prepend):
    """A module whose hooks do not commute."""
    made = linear()
    made.register_forward_hook(lambda module, args, out: out * 2)
    made.calls = 0

    def change(value):
        value.calls += 1
        number = float(value.calls)
        value.register_forward_hook(lambda module, args, out: out + number, prepend=prepend)

    return made, change


kind(
    "hook put before the others",
    lambda: ordered(True)[0],
    mutated(lambda v: ordered(True)[1](v)),
    lambda x, v: v(x),
)


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


def parametrized(value):
    if parametrize.is_parametrized(value, "weight"):
        parametrize.remove_parametrizations(value, "weight", leave_parametrized=False)
    else:
        parametrize.register_parametrization(value, "weight", Doubled())


kind("parametrization", lambda: plain_linear(), mutated(parametrized), lambda x, v: v(x))


def plain_linear():
    torch.manual_seed(0)
    made = nn.Linear(4, 4)
    for name, parameter in list(made.named_parameters()):
        setattr(made, name, nn.Parameter(spread(parameter.detach(), Replicate())))
    return made


def with_buffer(value):
    persistent = "scale" in value._non_persistent_buffers_set
    value.register_buffer("scale", value.scale + 1, persistent=persistent)


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return x * self.scale * len(self.state_dict())


kind("buffer registered again", Buffered, mutated(with_buffer), lambda x, v: v(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = plain_linear(), plain_linear()

    def forward(self, x):
        return self.two(self.one(x))


def tied(value):
    if value.one.weight is value.two.weight:
        value.two.weight = nn.Parameter(value.one.weight.detach() * 2)
    else:
        value.two.weight = value.one.weight


def gradients_of(value):
    return [None if p.grad is None else p.grad.full_tensor() for p in value.parameters()]


def training(x, value):
    value.zero_grad()
    loss = value(x).square().sum()
    loss.backward()
    return loss.detach()


kind("tying of weights", Tied, mutated(tied), training, gradients_of)
kind(
    "requires_grad of a parameter",
    Tied,
    mutated(lambda v: v.one.weight.requires_grad_(not v.one.weight.requires_grad)),
    training,
    gradients_of,
)
kind(
    "dtype by .to()",
    Tied,
    mutated(
        lambda v: v.to(torch.float64 if v.one.weight.dtype is torch.float32 else torch.float32)
    ),
    lambda x, v: v(x.to(v.one.weight.dtype)),
)
kind(
    "state loaded in place",
    Tied,
    mutated(lambda v: v.load_state_dict({k: w * 2 for k, w in v.state_dict().items()})),
    training,
    gradients_of,
)
kind(
    "state assigned",
    Tied,
    mutated(
        lambda v: v.load_state_dict({k: w * 2 for k, w in v.state_dict().items()}, assign=True)
    ),
    training,
    gradients_of,
)
kind(
    "data of a parameter",
    Tied,
    mutated(lambda v: setattr(v.one.weight, "data", v.one.weight.data * 2)),
    training,
    gradients_of,
)


kind(
    "module in a module list",
    lambda: nn.ModuleList([plain_linear(), nn.ReLU()]),
    mutated(lambda v: v.__setitem__(1, nn.Tanh() if isinstance(v[1], nn.ReLU) else nn.ReLU())),
    lambda x, v: v[1](v[0](x)),
)
kind(
    "order of a module dict",
    lambda: nn.ModuleDict({"a": plain_linear(), "b": nn.ReLU()}),
    mutated(lambda v: v.update({"a": v.pop("a")})),
    lambda x, v: functools.reduce(lambda y, m: m(y), v.values(), x),
)
in_place(
    "parameter in a parameter list",
    lambda: nn.ParameterList([spread(torch.ones(4), Replicate())]),
    lambda v: v.append(v[-1].detach() * 2),
    lambda v: v[len(v) - 1],
)
kind(
    "forward of one module",
    plain_linear,
    mutated(lambda v: setattr(v, "forward", lambda x, f=v.forward: f(x) * 2)),
    lambda x, v: v(x),
)


# --- training


class Trained:
    """A model of one weight, with what trains it."""

    def __init__(self, make=lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1))):
        self.weight = nn.Parameter(spread(torch.ones(4), Replicate()))
        self.optimizer = make([self.weight])

    def step(self, x):
        self.optimizer.zero_grad()
        loss = (x * self.weight).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def trains(x, value):
    return value.step(x)


def weight_of(value):
    return value.weight.detach().full_tensor()


kind(
    "learning rate in a tensor, written",
    Trained,
    mutated(lambda v: v.optimizer.param_groups[0]["lr"].mul_(0.5)),
    trains,
    weight_of,
)
kind(
    "learning rate in a tensor, replaced",
    Trained,
    mutated(lambda v: v.optimizer.param_groups[0].update(lr=torch.tensor(0.01))),
    trains,
    weight_of,
)
for setting_name, options, value in (
    ("momentum", {"lr": 0.1, "momentum": 0.5}, 0.9),
    ("weight_decay", {"lr": 0.1}, 0.5),
    ("maximize", {"lr": 0.1}, True),
    ("nesterov", {"lr": 0.1, "momentum": 0.5}, True),
    ("foreach", {"lr": 0.1, "foreach": False}, True),
    ("dampening", {"lr": 0.1, "momentum": 0.5}, 0.5),
):
    kind(
        f"{setting_name} of a group",
        lambda options=options: Trained(lambda p: torch.optim.SGD(p, **options)),
        mutated(lambda v, n=setting_name, w=value: flip(v.optimizer.param_groups[0], n, w)),
        trains,
        weight_of,
    )


def flip(group, name, value):
    group[name] = value if group[name] != value else type(value)(value * 0.5)


kind(
    "state of an optimizer, loaded",
    lambda: Trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    mutated(lambda v: v.optimizer.load_state_dict(copy.deepcopy(v.optimizer.state_dict()))),
    trains,
    weight_of,
)
kind(
    "scale of a loss scaler",
    lambda: torch.amp.GradScaler("cpu", init_scale=2.0),
    mutated(lambda v: v.update(v.get_scale() * 2) if v._scale is not None else None),
    lambda x, v: v.scale(x),
)


class Averaged:
    def __init__(self):
        self.model = plain_linear()
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def __call__(self, x):
        return self.average(x)


kind(
    "average that was updated",
    Averaged,
    mutated(lambda v: (double(v.model), v.average.update_parameters(v.model))),
    lambda x, v: v(x),
)


def double(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)


kind(
    "scheduler that steps outside",
    lambda: scheduled(),
    mutated(lambda v: v.scheduler.step()),
    trains,
    weight_of,
)


def scheduled():
    made = Trained(lambda p: torch.optim.SGD(p, lr=0.1))
    made.scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, 0.5)
    made.optimizer.step()
    return made


# --- iterators

another(
    "dataset",
    lambda: torch.utils.data.TensorDataset(torch.arange(4.0)),
    lambda v: torch.utils.data.TensorDataset(v.tensors[0] + 1),
    lambda v: v[1][0],
)
another("rows of a batch", lambda: rows(), lambda v: v + 1, itself)
