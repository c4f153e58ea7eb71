"""What one rank does otherwise is named as soon as docs/checks.md says, by kind, begin and length.

What is communicated is compared at every step. What a rank computes between is compared in the
first eight steps and in one of 31: a difference that lasts is named within 31 steps, and one of a
single step may not be.
"""

import contextlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from vescale_comm import CommMismatchError, simulate
from vescale_dtensor import Replicate, Shard, distribute_tensor, explain

PAGE = Path(__file__).parents[2] / "docs" / "checks.md"
BEGINS, WAIT = (3, 50, 500), 66
# What rank 1 does, and how the table calls it.
KINDS = {
    "shape": "a batch of another shape",
    "mode": "`model.eval()`",
    "update": "a step of the optimizer left out",
    "rate": "another learning rate",
    "dropout": "another probability of dropout",
    "draw": "a stray random draw",
    "call": "a call left out (`x * 2`)",
    "number": "another number (`x * 3`)",
    "values": "a batch of other values",
    "write": "a write to a parameter",
}


def trained(rank, world_size, kind, begins, lasts):
    """After how many steps rank 1 is named; None if it is not."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    w = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    optimizer = torch.optim.SGD([w], lr=0.01)
    for step in range(begins + WAIT):
        is_other = rank == 1 and (step == begins or (lasts and step > begins))
        other = kind if is_other else ""
        try:
            one_step(mesh, w, optimizer, other)
        except CommMismatchError:
            return step - begins
    return None


def one_step(mesh, w, optimizer, other):
    local = torch.full((6 if other == "shape" else 4, 4), 0.5 if other == "values" else 0.25)
    x = distribute_tensor(local, mesh, [Shard(0)], src_data_rank=None)
    if other != "call":
        x = x * (3 if other == "number" else 2)
    x = F.dropout(x @ w, 0.25 if other == "dropout" else 0.5, other != "mode")
    x.square().mean().backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.02 if other == "rate" else 0.01
    if other == "draw":
        torch.rand(1)
    if other == "write":
        with torch.no_grad():
            w.mul_(0.9)
    (w.grad * 1).sum().item()
    if other != "update":
        optimizer.step()
    w.grad = None


def said(steps):
    if steps is None:
        return "not named"
    if steps <= 1:
        return "at once"
    return f"within {next(bound for bound in (31, 64) if steps <= bound)} steps"


def cells(kind, begins):
    """By how long it lasts: one step, for ever."""
    found = []
    for lasts in (False, True):
        steps = simulate(2).run(trained, kind, begins, lasts)
        found.append(said(max(steps) if None not in steps else None))
    return found


def documented():
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines()]
    return {row[0]: row[1:] for row in rows if row[0] in KINDS.values()}


@pytest.mark.parametrize(
    "begins", [*BEGINS[:2], pytest.param(BEGINS[2], marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_table_of_the_guide(kind, begins):
    at = 2 * BEGINS.index(begins)
    assert documented()[KINDS[kind]][at : at + 2] == cells(kind, begins)


def copied_alone(rank, world_size):
    """Between sampled steps one rank copies what it keeps, by a call or for its strides."""
    mesh = init_device_mesh("cpu", (world_size,))
    w = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    kept = [distribute_tensor(torch.ones(2, 4).t(), mesh, [Shard(0)]) for _ in range(3)]
    for step in range(40):
        if step == 20:
            one, other, third = kept
            kept = [one.clone() if rank else one, other.contiguous(), third.to(torch.float64)]
            with explain() if rank else contextlib.nullcontext():
                kept.append(third.contiguous())
        total = sum((one.to(torch.float32) @ w[: one.shape[1]]).sum() for one in kept)
        total.backward()
        (w.grad * 1).sum().item()
        w.grad = None
    return True


def test_a_copy_between_sampled_steps_is_no_other_tensor():
    # Of 4 rows over 3 ranks: the last has none, and of one row all strides are contiguous.
    assert simulate(3).run(copied_alone) == [True] * 3


if __name__ == "__main__":
    for name, words in KINDS.items():
        print("|", " | ".join([words, *(one for at in BEGINS for one in cells(name, at))]), "|")
