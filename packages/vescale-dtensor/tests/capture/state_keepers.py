"""Functions that keep state of one call in Python, in every kind of place that there is."""

import torch
from torch import nn


class Keeper:
    shared = None

    def __init__(self):
        self.last, self.log, self.calls, self.average = None, [], 0, torch.zeros(())
        self.table = {}


def keeping(body):
    keeper = Keeper()
    return lambda x: body(x, keeper)


def keep_last(x, keeper):
    keeper.last = x.sum()
    return keeper.last


def keep_log(x, keeper):
    keeper.log.append(x.sum())
    return x


def keep_count(x, keeper):
    keeper.calls += 1
    return x * 2


def keep_average(x, keeper):
    keeper.average = keeper.average * 0.9 + x.sum() * 0.1
    return x


def keep_entry(x, keeper):
    keeper.table["last"] = x.sum()
    return keeper.table["last"]


def keep_of_class(x, keeper):
    type(keeper).shared = x.sum()
    return Keeper.shared


def keep_on_a_tensor(x, keeper):
    keeper.average.last = x.sum()
    return x


def keep_on_a_function(x, keeper):
    keep_on_a_function.last = x.sum()
    return x


KEEPERS = (
    *(keep_last, keep_log, keep_count, keep_average, keep_entry),
    *(keep_of_class, keep_on_a_tensor, keep_on_a_function),
)


def keep_nonlocal():
    last = None

    def function(x):
        nonlocal last
        last = x.sum()
        return last

    return function


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        self.last = x.sum()
        return self.last


def keep_buffer():
    return Buffered()


LAST = None


def keep_global(x):
    global LAST
    LAST = x.sum()
    return LAST
