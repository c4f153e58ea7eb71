"""Counts the bytes that a run holds between steps on every rank."""

from collections.abc import Iterable

import torch
from torch import Tensor
from vescale_comm.agreement import gather_numbers
from vescale_dtensor import DTensor

from vescale_parallel.train.run import Run

KINDS = ("parameters", "gradients", "states")


def held_bytes(run: Run) -> list[dict[str, int]]:
    """Return bytes of parameters, gradients and states of the optimizer, by rank. Collective."""
    parameters = list(run.model.parameters())
    states = [
        value
        for state in run.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    gradients = [one.grad for one in parameters if one.grad is not None]
    own = {
        "parameters": local_bytes(parameters),
        "gradients": local_bytes(gradients),
        "states": local_bytes(states),
    }
    told = gather_numbers([own[kind] for kind in KINDS])
    return [dict(zip(KINDS, one, strict=True)) for one in told]


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of memory that these tensors lie in on this rank, shared memory once."""
    memory: dict[int, int] = {}
    with torch.no_grad():
        for tensor in tensors:
            local = tensor.detach()
            # Of shards in the buffer of a unit the buffer: all of it is held for them.
            storage = (local.to_local() if isinstance(local, DTensor) else local).untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes()
    return sum(memory.values())
