"""ZeRO sends and holds no more than it has to: collectives, bytes and memory are counted."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from vescale_comm import trace
from vescale_comm.testing import run
from vescale_dtensor import DTensor, gradient_total
from vescale_parallel import no_sync
from zero_models import backward, batch, distributed, make, plan_for, schedule_of

BLOCKS = 3


def flat_bytes(model: nn.Module) -> dict[str, int]:
    """Gathered bytes by unit."""
    rows = [b.row for unit in schedule_of(model).units for b in unit.buffers]
    return {row.unit: row.gathered_bytes for row in rows}


def elsewhere(rank: int, world_size: int, sizes: dict[str, int], over: list[list[str]]) -> None:
    model = distributed(make(), sizes, 3)
    backward(model)
    first = model.embed.weight
    owed = sum(p.grad.to_local().numel() * 4 for p in model.parameters() if p.ndim)
    with trace() as seen:
        gradient_total(first)
    assert sorted(sorted(r.axes) for r in seen.records) == over
    assert {r.op for r in seen.records} <= {"all_reduce"}
    if list(sizes) == ["replica", "dp"]:
        # Twice the shards, less what stays: what an all-reduce over two ranks has to send.
        assert sum(r.bytes for r in seen.records if r.axes == ("replica",)) == owed
    with trace() as seen:
        gradient_total(model.norm.weight)
    assert not seen.records


@pytest.mark.parametrize(
    ("sizes", "over"),
    [
        # Scalars are whole on every rank, so their sums go over all axes: a kind of their own.
        ({"dp": 4}, [["dp"]]),
        ({"replica": 2, "dp": 2}, [["dp", "replica"], ["replica"]]),
        ({"dp": 2, "tp": 2}, [["dp", "tp"], ["tp"]]),
        (
            {"replica": 2, "dp": 2, "tp": 2},
            [["dp", "replica", "tp"], ["replica"], ["replica", "tp"]],
        ),
    ],
    ids=str,
)
def test_sums_over_other_axes_are_one_collective_a_kind(sizes: Any, over: list[list[str]]):
    run(elsewhere, torch.Size(sizes.values()).numel(), sizes, over)


def memory(rank: int, world_size: int, ahead: int) -> None:
    model = distributed(make(), {"dp": world_size}, 3, prefetch=ahead)
    backward(model)
    model.zero_grad()
    schedule, units = schedule_of(model), flat_bytes(model)
    root, block = units[""], units["blocks.0"]
    forward: list[int] = []
    inside: list[int] = []
    for one in model.blocks:
        one.register_forward_pre_hook(lambda *_: forward.append(schedule.gathered_bytes))
        one.mlp.register_forward_hook(lambda *_: inside.append(schedule.gathered_bytes))
    behind: list[int] = []
    unreduced: list[int] = []

    def watch(module: nn.Module, args: Any, output: DTensor) -> None:
        output.register_hook(lambda _: behind.append(schedule.gathered_bytes))
        output.register_hook(lambda _: unreduced.append(unreduced_bytes(model)))

    for one in model.blocks:
        one.mlp.register_forward_hook(watch)
    torch.manual_seed(0)
    loss = model(*batch(0))
    # One gathered ahead is under way, and counts when it has arrived.
    assert forward == inside == [root + block] * BLOCKS
    # What backward gathers first has stayed.
    assert schedule.gathered_bytes == root + ahead * block
    loss.backward()
    assert behind == [root + block] * BLOCKS
    # Gradients are packed only while they are reduced: none waits at a boundary.
    assert unreduced == [0] * BLOCKS
    assert schedule.gathered_bytes == 0
    assert unreduced_bytes(model) == 0
    with no_sync(model):
        backward(model)
    assert unreduced_bytes(model) == sum(units.values())
    backward(model, 1)
    assert unreduced_bytes(model) == schedule.gathered_bytes == 0


def unreduced_bytes(model: nn.Module) -> int:
    """Bytes of gradients that are as large as what is gathered."""
    buffers = [b for unit in schedule_of(model).units for b in unit.buffers]
    return sum(b.unreduced.nbytes for b in buffers if b.unreduced is not None)


@pytest.mark.parametrize("ahead", [0, 1])
def test_live_bytes_of_gathered_buffers_at_unit_boundaries(ahead: int):
    run(memory, 4, ahead)


def storages(rank: int, world_size: int) -> None:
    """What autograd keeps from forward to backward holds no gathered buffer."""
    model = distributed(make(), {"dp": world_size}, 3)
    seen: list[Any] = []

    def note(module: nn.Module, *_: Any) -> None:
        unit = next(u for u in schedule_of(model).units if u.name == "blocks.1")
        seen.extend(weakref.ref(b.full.untyped_storage()) for b in unit.buffers)
        assert seen[-1]() is not None

    model.blocks[1].mlp.register_forward_hook(note)
    loss = model(*batch(0))
    assert len(seen) == 1
    assert seen[0]() is None
    loss.backward()


def test_a_released_buffer_is_gone():
    run(storages, 4)


def stored(rank: int, world_size: int, zero: int) -> None:
    model = distributed(make(), {"dp": 2, "tp": 2}, zero)
    report = plan_for({"dp": 2, "tp": 2}, zero).check(make(), {"dp": 2, "tp": 2})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    backward(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    kept = 0
    for unit in schedule_of(model).units:
        for buffer in unit.buffers:
            memory = buffer.shard if buffer.full is None else buffer.full
            kept += memory.untyped_storage().nbytes()
            assert memory.untyped_storage().nbytes() == buffer.row.stored_bytes
    own = sum(bytes_of(p) for p in model.parameters())
    states = sum(
        bytes_of(value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, DTensor)
    )
    assert states == 2 * own
    shards = sum(row.shard_bytes for row in report.buffers)
    whole = sum(row.local_bytes for row in report.parameters if not row.zero)
    assert own <= shards + whole
    assert kept + whole == report.bytes_per_rank


def bytes_of(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_stored_bytes_are_those_that_explain_tells(zero: int):
    run(stored, 4, zero)
