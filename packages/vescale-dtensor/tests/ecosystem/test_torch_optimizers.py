"""Schedules, averages and what else of torch surrounds optimizers give what one device gives.

Each program runs on one device and on dp=2 x tp=2, and all that it returns is compared. Optimizers
and clipping are `ops/test_optimizers`, scaling is `test_grad_scaler`.
"""

import copy

import pytest
import torch
from named_cases import named_cases
from one_device import check
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch_library import batch, network
from vescale_comm import simulate

PROGRAMS, program = named_cases()


def trained(place, make, schedule=None, closure=False, double=False):
    model, inputs = network(place), batch(place)
    if double:
        model, inputs = model.double(), inputs.double()
    optimizer = make(list(model.parameters()))
    schedule = schedule(optimizer) if schedule else None

    def backward():
        optimizer.zero_grad()
        loss = model(inputs).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        if closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
        if schedule:
            schedule.step()
    return list(model.parameters())


@program
def lbfgs(place):
    return trained(
        place, lambda ps: torch.optim.LBFGS(ps, lr=0.01, max_iter=4), closure=True, double=True
    )


@program
def lbfgs_with_line_search(place):
    def make(parameters):
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

    return trained(place, make, closure=True, double=True)


@program
def schedules(place):
    return [
        trained(
            place,
            lambda ps: torch.optim.SGD(ps, lr=torch.tensor(0.01)),
            lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
        ),
        trained(
            place,
            lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
            lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        ),
    ]


def stepped(model, optimizer, inputs):
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@program
def optimizer_states_load(place):
    model = network(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stepped(model, optimizer, batch(place))
    twin = copy.deepcopy(model)
    other = torch.optim.AdamW(twin.parameters(), lr=0.01)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(twin, other, batch(place))
    return list(twin.parameters()), other.state_dict()["state"]


@program
def averaged_models(place):
    model = network(place)
    mean = swa_utils.AveragedModel(model)
    moving = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        stepped(model, optimizer, batch(place))
        mean.update_parameters(model)
        moving.update_parameters(model)
    return list(mean.parameters()), list(moving.parameters())


def with_gradients(place):
    model = network(place)
    model(batch(place)).square().sum().backward()
    return model


@program
def clipping(place):
    model = with_gradients(place)
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total)
    return total, [p.grad for p in model.parameters()]


@program
def parameters_as_a_vector(place):
    model = network(place)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    return vector, list(model.parameters())


@program
def zeroed_gradients(place):
    model = with_gradients(place)
    model.zero_grad(set_to_none=False)
    model(batch(place)).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    simulate(4)(lambda rank, world: check(PROGRAMS[name]))
