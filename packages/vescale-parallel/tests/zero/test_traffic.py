"""A step of each kind of parallelism sends the least that it has to: collectives and bytes."""

import copy
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vescale_comm import simulate, trace
from vescale_comm.testing import run
from vescale_dtensor import Partial
from zero_models import distributed, schedule_of

WIDTH, HIDDEN, LAYERS, ROWS, LENGTH = 8, 32, 3, 8, 4
FLOAT = 4
ELEMENTS = LAYERS * 2 * WIDTH * HIDDEN


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Stack(nn.Module):
    """Layers of which tensor parallelism gathers the sequence before, and scatters it after."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


PARAMETERS = {"*.up.weight": "tp:0", "*.down.weight": "tp:1"}
ACTIVATIONS = {"layers.0": "tp:1 ->", "*.mlp": "tp:full -> tp:1"}

Sent = dict[tuple[str, tuple[str, ...]], tuple[int, int]]
"""By operation and axes, how many collectives there are and what a rank sends in all of them."""


def least(sizes: dict[str, int], zero: int) -> Sent:
    """What a step has to send, from what has to be known where."""
    return {key: found for key, found in _least(sizes, zero) if found != (0, 0)}


def _least(sizes: dict[str, int], zero: int) -> Iterator[tuple[Any, tuple[int, int]]]:
    dp, tp, replicas = (sizes.get(axis, 1) for axis in ("dp", "tp", "replica"))
    own = ELEMENTS * FLOAT // tp
    if zero:
        # Gathered once a step, or in forward and again in backward, but for the last layer, with
        # which backward begins; reduced once, and together, small as they are, as they are gathered
        # in forward at level 3.
        gathered = 2 * LAYERS - 1 if zero == 3 else LAYERS
        shard = own // dp
        collectives = gathered - LAYERS + 1 if zero == 3 else gathered
        yield ("all_gather", ("dp",)), (collectives, gathered * (dp - 1) * shard // LAYERS)
        yield ("reduce_scatter", ("dp",)), (1, (dp - 1) * shard)
        own = shard
    elif dp > 1:
        # One sum of all gradients: each rank sends its own, and its part of the totals.
        yield ("all_reduce", ("dp",)), (1, 2 * own * (dp - 1) // dp)
    if replicas > 1:
        yield ("all_reduce", ("replica",)), (1, 2 * own * (replicas - 1) // replicas)
    if tp > 1:
        # Forward: gather and scatter in each layer. Backward: the same in turn, but for the input
        # of the first layer, which needs no gradient.
        one = ROWS // dp // replicas * LENGTH * WIDTH * FLOAT * (tp - 1) // tp
        yield ("all_gather", ("tp",)), (2 * LAYERS, 2 * LAYERS * one)
        yield ("reduce_scatter", ("tp",)), (2 * LAYERS - 1, (2 * LAYERS - 1) * one)


def step(rank: int, world_size: int, sizes: dict[str, int], zero: int) -> None:
    torch.manual_seed(0)
    words: dict[str, Any] = {"parameters": PARAMETERS, "activations": ACTIVATIONS}
    if "tp" not in sizes:
        words["activations"] = {}
    model = distributed(Stack(), sizes, zero, **words)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, ROWS * LENGTH * WIDTH).reshape(ROWS, LENGTH, WIDTH)
    # The first two compare batches and the order of units.
    for _ in range(3):
        optimizer.zero_grad()
        with trace() as seen:
            model(x).backward()
            optimizer.step()
    counts, sent = Counter[Any](), Counter[Any]()
    for record in seen.records:
        counts[record.op, tuple(record.axes)] += 1
        sent[record.op, tuple(record.axes)] += record.bytes
    found = {key: (counts[key], sent[key]) for key in counts}
    assert found == least(sizes, zero), found
    if zero:
        assert schedule_of(model).gathered_bytes == 0


KINDS = {
    "dp": ({"dp": 4}, 0),
    "tp": ({"tp": 4}, 0),
    "dp x tp": ({"dp": 2, "tp": 2}, 0),
    "zero1": ({"dp": 4}, 1),
    "zero2": ({"dp": 4}, 2),
    "zero3": ({"dp": 4}, 3),
    "zero3 x tp": ({"dp": 2, "tp": 2}, 3),
    "HSDP": ({"replica": 2, "dp": 2}, 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_sends_the_least_that_it_has_to(kind: str):
    sizes, zero = KINDS[kind]
    run(step, prod(sizes.values()), sizes, zero)


class Normed(nn.Module):
    """A layer whose parameters all ranks use for other rows and other parts of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x)).square().mean()


def partial_on_all(rank: int, world_size: int, sizes: dict[str, int], zero: int) -> None:
    torch.manual_seed(0)
    batch = ", ".join(f"{axis}:{dim}" for dim, axis in enumerate(sizes))
    words: dict[str, Any] = {"parameters": {"*": "replicate"}, "activations": {}, "batch": batch}
    plain = Normed()
    model = distributed(copy.deepcopy(plain), sizes, zero, axes=tuple(sizes), **words)
    x = torch.linspace(-1, 1, 2 * 4 * 6 * WIDTH).reshape(2, 4, 6, WIDTH)
    with trace() as seen:
        model(x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    summed = [record for record in seen.records if record.op == "all_reduce"]
    rest = sorted(set(sizes) - ({"dp"} if zero else set()))
    # The norm of sharded gradients is one number more that is summed, over dp.
    sums = [one for one in summed if one.bytes > 64]
    assert [sorted(one.axes) for one in sums] == [rest], summed
    plain(x).backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert not any(isinstance(one, Partial) for one in found.grad.placements)
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("axes", [("dp", "sp", "cp"), ("dp", "cp"), ("cp", "sp", "dp")])
def test_gradients_partial_on_several_axes_are_summed_by_one_collective(
    axes: tuple[str, ...], zero: int
):
    simulate(2 ** len(axes)).run(partial_on_all, dict.fromkeys(axes, 2), zero)
