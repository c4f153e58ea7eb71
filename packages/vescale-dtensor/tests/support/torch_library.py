"""Small models and their inputs, for programs that run on one device and on a mesh."""

import torch
from torch import nn
from vescale_dtensor import Replicate, Shard

W = torch.linspace(-1, 1.5, 24).reshape(6, 4)
X = torch.linspace(-2, 3, 20).reshape(5, 4)


def network(place):
    torch.manual_seed(0)
    first, second = nn.Linear(4, 6), nn.Linear(6, 4)
    if place.mesh is not None:
        first.weight = place.parameter(first.weight.detach(), Replicate(), Shard(0))
        first.bias = place.parameter(first.bias.detach(), Replicate(), Shard(0))
        second.weight = place.parameter(second.weight.detach(), Replicate(), Shard(1))
        second.bias = place.parameter(second.bias.detach(), Replicate(), Replicate())
    return nn.Sequential(first, nn.Tanh(), second)


def batch(place, whole=X):
    return place(whole, Shard(0), Replicate())


def linear(place, whole=W):
    module = nn.Linear(whole.shape[1], whole.shape[0])
    nn.init.zeros_(module.bias)
    module.weight = place.parameter(whole)
    return module
