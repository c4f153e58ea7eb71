"""Libraries that add up over the world by themselves are told that a DTensor is global already.

A value that is counted once for each rank is the wrong number in silence. So every function of
torch.distributed that gets a DTensor raises on every rank, names who called it, and says what to
write; and what a DTensor was added to in place, as metrics do with their states, is one itself.
"""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist
import vescale_dtensor as vd
from one_device import Place, check
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, on_ranks, run
from vescale_dtensor import Partial, Replicate, Shard, UnsupportedError

CLASSES = 3
SCORES = torch.linspace(-1, 1, 21).reshape(7, CLASSES).sin()
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2])


class Metric:
    """What torchmetrics' are: plain states, batches added in place, gathered when it computes."""

    def __init__(self, sync_on_compute=True):
        self.sync_on_compute = sync_on_compute
        self.matrix = torch.zeros(CLASSES, CLASSES)
        self.total = torch.zeros(())

    def update(self, scores, labels):
        pairs = labels * CLASSES + scores.argmax(1)
        self.matrix += torch.bincount(pairs, minlength=CLASSES**2).reshape(CLASSES, CLASSES)
        self.total += labels.numel()

    def compute(self):
        states = [self.matrix, self.total]
        if self.sync_on_compute and dist.is_initialized():
            states = [self.gathered(state).sum(0) for state in states]
        return states[0] / states[1]

    def gathered(self, state):
        found = [torch.zeros_like(state) for _ in range(dist.get_world_size())]
        dist.all_gather(found, state)
        return torch.stack(found)


def measured(place, layout, sync):
    metric = Metric(sync)
    for _ in range(2):
        metric.update(place(SCORES, *layout), place(LABELS, layout[0], Replicate()))
    return metric.compute()


LAYOUTS = ((Shard(0), Replicate()), (Shard(0), Shard(1)), (Replicate(), Replicate()))


def metrics(rank, world):
    for layout in LAYOUTS:
        check(lambda place: measured(place, layout, sync=False))  # noqa: B023
        place = Place(device_mesh((2, 2), ("dp", "tp")))
        with pytest.raises(UnsupportedError, match=r"all_gather.*test_libraries_that_sum.*sync_on"):
            measured(place, layout, sync=True)


@pytest.mark.parametrize("where", [simulate(4), lambda f: run(f, 4)], ids=["simulated", "gloo"])
def test_a_metric_that_gathers_its_states(where):
    where(metrics)


AUGMENTED = {
    "add": (operator.iadd, torch.float32),
    "subtract": (operator.isub, torch.float32),
    "multiply": (operator.imul, torch.float32),
    "divide": (operator.itruediv, torch.float32),
    "floor divide": (operator.ifloordiv, torch.float32),
    "power": (operator.ipow, torch.float32),
    "remainder": (operator.imod, torch.float32),
    "or": (operator.ior, torch.int64),
    "and": (operator.iand, torch.int64),
    "xor": (operator.ixor, torch.int64),
    "left shift": (operator.ilshift, torch.int64),
    "right shift": (operator.irshift, torch.int64),
}


@pytest.mark.parametrize("name", AUGMENTED)
@on_ranks(4)
def test_what_a_dtensor_is_added_to_is_one(name):
    function, dtype = AUGMENTED[name]
    x = torch.arange(1, 7).reshape(2, 3).to(dtype)
    mesh = device_mesh((2, 2), ("dp", "tp"))
    for layout in ([Shard(0), Replicate()], [Shard(0), Shard(1)], [Replicate()] * 2):
        other = vd.distribute_tensor(x, mesh, layout, src_data_rank=None)
        total, dense = x + 7, x + 7
        alias, memory = total, total.data_ptr()
        for _ in range(3):
            total, dense = function(total, other), function(dense, x)
            assert isinstance(total, vd.DTensor)
            assert total.placements == (Replicate(), Replicate())
        # It is the same memory, and whoever has the plain tensor sees what was added.
        assert total.data_ptr() == memory == alias.data_ptr()
        assert torch.equal(alias, dense)
        assert torch.equal(total.full_tensor(), dense)
        with pytest.raises(UnsupportedError, match="global already"):
            dist.all_reduce(total)


@on_ranks(4)
def test_what_is_stepped_by_hand_stays_what_it_is():
    """Parameters and leaves stay what they are."""
    x = Place(device_mesh((2, 2), ("dp", "tp")))(SCORES[0], Shard(0), Replicate())
    module = torch.nn.Linear(CLASSES, 1, bias=False)
    weight, leaf = module.weight, torch.ones(CLASSES, requires_grad=True)
    kept = leaf
    with torch.no_grad():
        module.weight -= x * 0.1
        leaf -= x * 0.1
    assert module.weight is weight
    assert leaf is kept
    assert torch.equal(leaf.detach(), 1 - SCORES[0] * 0.1)


def with_gradients(place):
    x = place(SCORES, grad=True)
    total = torch.zeros(())
    for row in range(3):
        total += x[row].square().sum() * (row + 1)
    total *= x.sum()
    total.backward()
    return [total, x.grad]


def plain_that_wants_a_gradient(place):
    x, plain = place(SCORES, Shard(0), Partial(), grad=True), torch.ones(3, requires_grad=True)
    total = plain * 2
    total *= x.sum(0)
    total.sum().backward()
    return [total, x.grad, plain.grad]


@pytest.mark.parametrize("program", [with_gradients, plain_that_wants_a_gradient])
def test_gradients_of_what_was_added_to(program):
    simulate(4)(lambda rank, world: check(program))
