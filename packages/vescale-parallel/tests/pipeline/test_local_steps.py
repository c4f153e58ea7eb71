"""Optimizers of stages step what a rank has as plain tensors, with the bits of steps of DTensors.

Two copies of a model are trained alike; between steps all is done that a program may do.
"""

import copy
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import stepped_pairs
import torch
from stepped_pairs import (
    CHANGES,
    OPTIMIZERS,
    Pair,
    backward,
    require_alike,
    require_whole_after_errors,
    step,
    train_changed,
    train_scaled,
)
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_parallel import DisagreementError, Plan, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import PARAMETERS, Decoder

PP, PP_DP, PP_TP = {"pp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}
FUSED: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW, fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "SGD, fused": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}


def staged(sizes: dict[str, int]) -> nn.Module:
    torch.manual_seed(3)
    how = Plan(parameters=PARAMETERS, pipeline="1f1b", microbatches=2)
    return parallelize(Decoder(blocks=2), make_mesh(device_type="cpu", **sizes), how)


def twins(sizes: dict[str, int], name: str) -> tuple[Pair, Pair]:
    return stepped_pairs.twins(lambda: staged(sizes), {**OPTIMIZERS, **FUSED}[name])


class Watch:
    """Which optimizers were helped in their latest step."""

    def __init__(self) -> None:
        self.helped: set[int] = set()
        self.handle = register_optimizer_step_post_hook(self._note)

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        (self.helped.discard if args[0] is optimizer else self.helped.add)(id(optimizer))


def trained_alike(rank: int, world_size: int, sizes: dict[str, int], name: str) -> None:
    one, two = twins(sizes, name)
    watch = Watch()
    try:
        for seed in range(4):
            step(one, seed)
            step(two, seed)
            require_alike(one, two)
            # The first step makes states, other than in these.
            assert id(two[1]) not in watch.helped
            assert (id(one[1]) in watch.helped) == (seed > 0 or name in ("SGD", "Adagrad"))
    finally:
        watch.handle.remove()


@pytest.mark.parametrize("name", [*OPTIMIZERS, *FUSED])
@pytest.mark.parametrize("sizes", [PP, PP_DP, PP_TP], ids=str)
def test_the_bits_of_steps_of_distributed_tensors(sizes: dict[str, int], name: str):
    simulate(prod(sizes.values()))(trained_alike, sizes, name)


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2, simulated=True)
def test_changes_between_backward_and_step(change: Callable[[Pair, int], None]):
    train_changed(twins(PP, "AdamW"), change)


@on_ranks(2, simulated=True)
def test_counts_of_parameters_that_are_trained_later():
    """Parameters that are trained later have other counts of steps, on ranks without them too."""
    pairs = twins(PP, "NAdam")
    for model, _ in pairs:
        model.blocks[0].requires_grad_(False)
        model.blocks[1].requires_grad_(False)
    for seed in range(6):
        for pair in pairs:
            pair[0].blocks[0].requires_grad_(seed >= 2)
            pair[0].blocks[1].requires_grad_(seed >= 4)
            step(pair, seed)
        require_alike(*pairs)
    counts = {int(state["step"]) for state in pairs[0][1].state.values()}
    assert counts == {2, 4, 6}


@on_ranks(2, simulated=True)
def test_counts_that_are_written_to_one_by_one():
    """Somebody writes to the count of one parameter after another: of those elsewhere as well."""
    pairs = twins(PP, "NAdam")
    names = [name for name, _ in pairs[0][0].named_parameters()]
    for seed, name in enumerate((names[0], *names)):
        for pair in pairs:
            backward(pair, seed)
            if seed:
                state = pair[1].state[pair[0].get_parameter(name)]
                state["step" if seed % 2 else "mu_product"] += 0.5
            pair[1].step()
        require_alike(*pairs)


@on_ranks(2, simulated=True)
def test_loss_scales():
    for assigned in (False, True):
        pairs = twins(PP, "SGD, fused")
        for pair in pairs:
            train_scaled(pair, assigned)
        require_alike(*pairs)


@on_ranks(2, simulated=True)
def test_a_step_that_raises():
    require_whole_after_errors(twins(PP, "AdamW"))


@on_ranks(2, simulated=True)
def test_states_that_are_loaded():
    """A state goes to an optimizer that was not helped, and back."""
    one, two = twins(PP, "AdamW")
    for seed in range(4):
        step(one, seed)
        step(two, seed)
        states = [copy.deepcopy(pair[1].state_dict()) for pair in (one, two)]
        one[1].load_state_dict(states[1])
        two[1].load_state_dict(states[0])
        require_alike(one, two)


@on_ranks(2)
def test_ranks_do_not_drift_apart():
    """Each rank steps other parameters than the others, and none takes that for diverging."""
    one, two = twins(PP, "AdamW, fused")
    for seed in range(10):
        step(one, seed)
        step(two, seed)
    require_alike(one, two)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ["SGD", "AdamW, fused"])
@on_ranks(2)
def test_a_step_that_a_rank_leaves_out_is_told(rank: int, world_size: int, name: str, which: int):
    pair = twins(PP, name)[which]
    for seed in range(3):
        step(pair, seed)
    backward(pair, 3)
    if rank:
        pair[1].step()
    with pytest.raises(DisagreementError, match=r"step of an optimizer.*False on rank 0; True"):
        backward(pair, 4)
