"""Kinds of state of torch: modules, tensors, optimizers, and tensors that a function keeps."""

from dataclasses import replace

import torch
from capture_guards import linear, rows, spread
from stale_kinds import KINDS, Settings, another, factor_is, in_place, itself, kind, mutated
from stale_kinds_code import called, maybe_scaled
from torch import nn
from vescale_dtensor import Replicate

# --- modules and tensors

another("tensor", lambda: torch.ones(4), lambda v: torch.full((4,), 3.0), itself)
another(
    "tensor in nested containers",
    lambda: {"a": [(torch.ones(4),)]},
    lambda v: {"a": [(torch.full((4,), 3.0),)]},
    lambda v: v["a"][0][0],
)
in_place(
    "replaced tensor in nested containers",
    lambda: {"a": [torch.ones(4)]},
    lambda v: v["a"].__setitem__(0, torch.full((4,), 3.0)),
    lambda v: v["a"][0],
)
kind(
    "module in nested containers",
    lambda: {"a": [linear()]},
    mutated(lambda v: v["a"].__setitem__(0, nn.Tanh())),
    lambda x, v: v["a"][0](x),
)
kind("train flag", lambda: nn.Dropout(1.0), mutated(lambda v: v.eval()), called)
kind(
    "number of a module",
    lambda: nn.LeakyReLU(0.5),
    mutated(lambda v: setattr(v, "negative_slope", 0.25)),
    called,
)
kind(
    "hook of a module",
    linear,
    mutated(lambda v: v.register_forward_hook(lambda m, a, r: r * 2)),
    called,
)


# --- optimizers


def parameter():
    return nn.Parameter(spread(rows(4, 4, seed=7), Replicate()).detach())


def momentum(**options):
    return torch.optim.SGD([parameter()], lr=0.1, momentum=0.9, **options)


def adamw():
    return torch.optim.AdamW([parameter()], lr=0.1, fused=True)


def stepped(x, optimizer):
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    optimizer.zero_grad()
    total = sum((x @ p).square().sum() for p in parameters)
    total.backward()
    optimizer.step()
    return total.detach()


def weights(optimizer):
    return [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]


def group_is(**options):
    return mutated(lambda optimizer: optimizer.param_groups[0].update(options))


def optimizer_kind(name, make, change, use=stepped):
    kind(name, make, change, use, weights)


def doubling_hook(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad.mul_(2)


optimizer_kind("learning rate", momentum, group_is(lr=0.01))
optimizer_kind("weight decay", momentum, group_is(weight_decay=0.5))
optimizer_kind("momentum", momentum, group_is(momentum=0.5))
optimizer_kind("betas", adamw, group_is(betas=(0.5, 0.6)))
optimizer_kind(
    "added group", momentum, mutated(lambda v: v.add_param_group({"params": [parameter()]}))
)
optimizer_kind(
    "another optimizer", momentum, lambda v: torch.optim.SGD(v.param_groups[0]["params"], lr=0.01)
)
optimizer_kind("cleared state", momentum, mutated(lambda v: v.state.clear()))
optimizer_kind(
    "hook of an optimizer", momentum, mutated(lambda v: v.register_step_pre_hook(doubling_hook))
)
optimizer_kind(
    "hook of a parameter",
    momentum,
    mutated(lambda v: v.param_groups[0]["params"][0].register_hook(lambda g: g * 2)),
)
optimizer_kind(
    "scheduler",
    lambda: torch.optim.lr_scheduler.StepLR(momentum(), 1),
    mutated(lambda v: v.step()),
    lambda x, v: stepped(x, v.optimizer),
)
KINDS["scheduler"] = replace(KINDS["scheduler"], seen=lambda v: weights(v.optimizer))


# --- tensors that are kept


class Keeper:
    def __init__(self):
        self.last, self.log = torch.zeros(()), []


def keep_last(x, value):
    value.last = (x * 2).sum()
    return value.last


def keep_log(x, value):
    value.log.append(x.sum())
    return value.log[-1]


def keep_average(x, value):
    loss = x.sum()
    value.last = 0.5 * value.last + 0.5 * loss.detach()
    return loss


def count(x, value):
    value.factor += 1
    return x * 2


def same(value):
    return value


kind("last result on an object", Keeper, same, keep_last, lambda v: v.last)
kind("results in a list", Keeper, same, keep_log, lambda v: list(v.log))
kind("running average", Keeper, same, keep_average, lambda v: v.last)
kind("recurrent state", Keeper, same, lambda x, v: keep_average(x, v) + v.last, lambda v: v.last)
kind("counter", Settings, same, count, lambda v: v.factor)
kind("attribute of a parameter", parameter, factor_is(3.0), lambda x, v: maybe_scaled(x @ v, v))
