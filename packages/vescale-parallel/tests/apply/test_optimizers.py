"""Optimizers of a model are found in one order on all ranks, whatever their garbage collectors did.

`balance_experts` redistributes what they remember, one after another: each is a collective.
"""

import gc

import torch
from torch import nn
from vescale_parallel._apply.optimizers import optimizers_of


def test_the_order_is_that_of_the_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    later = torch.optim.SGD(model[2].parameters(), lr=0.1)
    # It is older to the collector now than what comes.
    gc.collect()
    gc.disable()
    try:
        first = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)
        other = torch.optim.Adam(model[1].parameters())
        young = optimizers_of(model)
    finally:
        gc.enable()
    gc.collect()
    for found in (young, optimizers_of(model)):
        assert [id(one) for one in found] == [id(one) for one in (other, first, later)]
