"""A rule that is registered later is asked, whichever way a call takes: no cache outlives it."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch
import vescale_dtensor as vd
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import Shard
from vescale_dtensor._dispatch.registry import known_rules
from vescale_dtensor._planning.plan import Rule

asked = Counter()


def _counting(func):
    """The rule of a function, which counts who asks it."""
    rule = known_rules()[func]

    def strategy(call):
        asked[func] += 1
        return rule.strategy(call)

    return Rule(f"{rule.name}, counted", strategy, rule.reads, rule.writes, rule.views)


def _in_lists(func, *others):
    """As optimizers call it; only then is a call on lists known from before."""

    def call(x, y):
        with torch.no_grad():
            return func([x, y], *others)

    return call


ROADS = {
    "a method": (lambda x, y: x.mul(y), torch.Tensor.mul),
    "an operator": (lambda x, y: x * y, torch.Tensor.mul),
    "a function": (lambda x, y: torch.mul(x, y), torch.mul),
    "by name": (lambda x, y: torch.mul(input=x, other=y), torch.mul),
    "a scalar": (lambda x, y: x * 2.0, torch.Tensor.mul),
    # What is done to each element has the rule.
    "lists": (_in_lists(torch._foreach_mul, 2.0), torch.Tensor.mul),
    "lists in place": (_in_lists(torch._foreach_mul_, 1.0), torch.Tensor.mul_),
    "lists, recorded": (lambda x, y: torch._foreach_mul([x, y], 2.0), torch.Tensor.mul),
    "norms of lists": (_in_lists(torch._foreach_norm), torch.linalg.vector_norm),
    "a sum": (lambda x, y: x.sum(0), torch.Tensor.sum),
}


def _asks_again(rank, world_size, name):
    call, func = ROADS[name]
    mesh = device_mesh((1,))
    x, y = (vd.distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]) for _ in range(2))
    for _ in range(4):
        call(x, y)
    own = known_rules()[func]
    try:
        vd.register_rule(func, _counting(func))
        asked.clear()
        call(x, y)
        assert asked[func] >= 1
    finally:
        vd.register_rule(func, own)
    asked.clear()
    call(x, y)
    assert not asked


@pytest.mark.parametrize("name", ROADS)
def test_a_rule_registered_after_calls_is_asked(name):
    logging.disable(logging.WARNING)
    try:
        simulate(1)(_asks_again, name)
    finally:
        logging.disable(logging.NOTSET)
