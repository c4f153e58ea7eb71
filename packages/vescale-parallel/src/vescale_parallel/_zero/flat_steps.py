"""Optimizers that go element by element step flat buffers: one plain tensor for each, no wrapper.

The memory of a whole buffer is stepped at once: a helper has per buffer one tensor, gradient and
state; see `plain_steps`.

States stay under their parameters, as DTensors: from the second step on these are views of one flat
tensor a buffer, as parameters are of the shard. Whatever was put in their place (a loaded state,
say) is copied there again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from vescale_dtensor import DTensor
from vescale_dtensor.storage import local_leaves, note_written

from vescale_parallel._common.plain_steps import Counts, Given, Held, Helped
from vescale_parallel._zero.flat_buffer import FlatBuffer


class FlatGroups(Helped):
    """The groups of one optimizer: of each the buffers of which it has all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[int, tuple[list[int], list[FlatBuffer]]] = {}
        self._states: dict[int, _FlatState] = {}

    def take(
        self, optimizer: Any, at: int, group: dict[str, Any], of: Sequence[FlatBuffer]
    ) -> tuple[Given, list[Any]]:
        """Each buffer as one parameter, and the parameters of no such buffer."""
        ids = list(map(id, group["params"]))
        known, buffers = self._groups.get(at, ([], []))
        if ids != known:  # groups are added and changed while training
            buffers = _whole(ids, of)
            self._groups[at] = ids, buffers
        taken: Given = {}
        parameters: set[int] = set()
        for buffer in buffers:
            part = self._part(optimizer, group, buffer)
            if part is not None:
                self.parts.append(part)
                taken[part.shard] = part.state.flat
                parameters.update(map(id, buffer.parameters))
        return taken, [one for one in group["params"] if id(one) not in parameters]

    def _part(self, optimizer: Any, group: dict[str, Any], buffer: FlatBuffer) -> _Part | None:
        """A buffer as one parameter, with its gradient; None: it is not stepped as one."""
        # Such facts are equal on all ranks of a program that has not drifted, other than where
        # memory is: a rank that owns nothing of a parameter would find that always right.
        shard, leaves = buffer.current_shard()
        gradients = [one.grad for one in leaves]
        if any([one is None for one in gradients]):
            return None  # left out of this step, as on one device
        if len({one.dtype for one in gradients if one is not None}) > 1:
            return None  # as parameters keep them (`grad_dtype`)
        state = self._states.pop(id(buffer), None)
        if state is None or not state.is_in_place(optimizer, shard):
            held = Held.of(optimizer, group, buffer.parameters)
            if held is None or not _are_alike(held.states):
                return None
            state = _FlatState(buffer, held, shard)
        self._states[id(buffer)] = state
        gradient, is_copy = _flat_gradient(buffer, shard, gradients)
        if gradient.dtype is not shard.dtype:
            shard.grad_dtype = gradient.dtype
        shard.grad = gradient
        return _Part(buffer, leaves, state, shard, gradient if is_copy else None)


def _whole(ids: Sequence[int], buffers: Sequence[FlatBuffer]) -> list[FlatBuffer]:
    """The buffers of which a group has all parameters, each of them once."""
    known = set(ids)
    if len(known) < len(ids):
        return []
    return [one for one in buffers if all(id(p) in known for p in one.parameters)]


@dataclass(frozen=True)
class _Part:
    """A buffer that is stepped.

    Attributes:
        buffer: it.
        leaves: its parameters.
        state: what the optimizer remembers of them.
        shard: the tensor that is stepped.
        copied: its gradient, where that is a copy of theirs.
    """

    buffer: FlatBuffer
    leaves: list[Tensor]
    state: _FlatState
    shard: Tensor
    copied: Tensor | None

    def end(self, optimizer: Optimizer) -> None:
        """Tell of what was written to."""
        if self.copied is not None and getattr(optimizer, "grad_scale", None) is not None:
            # A fused step takes the scale out of what it is given.
            for leaf, place in zip(self.leaves, self.buffer.shards_of(self.copied), strict=True):
                if leaf.grad is not None:
                    leaf.grad.copy_(place.view(leaf.grad.shape))
        self.shard.grad = None
        self.state.counts.tell()
        note_written(self.buffer.parameters[0], f"{type(optimizer).__name__}.step")
        # The memory was written to by another tensor: a graph of before the step is refused.
        increment_version(self.leaves)


class _FlatState:
    """What an optimizer remembers of a buffer's parameters, as flat tensors.

    Attributes:
        flat: by name, for the flat parameter.
        counts: what is told to all parameters.

    Args:
        buffer: it.
        held: its parameters and their states, alike for all. They become views of flat tensors.
        shard: of the buffer.
    """

    def __init__(self, buffer: FlatBuffer, held: Held, shard: Tensor) -> None:
        self._held, self._like = held, (shard.dtype, shard.device)
        self.flat: dict[str, Tensor] = {}
        numbers: list[dict[str, Tensor]] = [{} for _ in held.states]
        for name, first in held.states[0].items():
            values = [one[name] for one in held.states]
            if not isinstance(first, DTensor):
                for own, value in zip(numbers, values, strict=True):
                    own[name] = value
                continue
            flat = self.flat[name] = shard.new_zeros(shard.shape, dtype=first.dtype)
            for local, place in zip(local_leaves(values), buffer.shards_of(flat), strict=True):
                place.copy_(local)
                # The tensor stays the same object, as a user may hold it.
                local.data = place
        self.counts = Counts(numbers)
        self.flat.update(self.counts.stepped)
        self._addresses = self._now()

    def _now(self) -> list[int]:
        return list(map(Tensor.data_ptr, local_leaves(self._held.tensors)))

    def is_in_place(self, optimizer: Any, shard: Tensor) -> bool:
        """Whether all values are still views of the flat tensors, and counts are alike."""
        return (
            (shard.dtype, shard.device) == self._like
            and self._held.is_current(optimizer)
            and self._now() == self._addresses
            and self.counts.are_alike()
        )


def _are_alike(states: Sequence[Mapping[str, Any]]) -> bool:
    """Whether states have the same names, of tensors of one kind each, and equal counts."""
    if any(list(one) != list(states[0]) for one in states):
        return False
    columns = [[one[name] for one in states] for name in states[0]]
    if any(len({(type(one), one.dtype, one.device) for one in each}) > 1 for each in columns):
        return False
    # In one piece: on a device each comparison would wait for it.
    counts = [torch.stack(each) for each in columns if not isinstance(each[0], DTensor)]
    return all(bool((one == one[0]).all()) for one in counts)


def _flat_gradient(
    buffer: FlatBuffer, shard: Tensor, gradients: Sequence[Any]
) -> tuple[Tensor, bool]:
    """The gradient of the shard, and whether it is a copy of those of the parameters."""
    # Mostly they are the views of one reduction.
    size, base = gradients[0].element_size(), None
    for gradient, (at, end) in zip(gradients, buffer.owned, strict=True):
        if end > at:
            start = gradient.data_ptr() - at * size
            if base is None:
                base, first, offset = start, gradient, at
            elif start != base:
                break
    else:
        if base is not None:
            begin = first.storage_offset() - offset
            storage = first.untyped_storage().nbytes()
            if begin >= 0 and (begin + shard.numel()) * size <= storage:
                return first.as_strided((shard.numel(),), (1,), begin), False
    copied = shard.new_zeros(shard.shape, dtype=gradients[0].dtype)
    for gradient, place in zip(gradients, buffer.shards_of(copied), strict=True):
        dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
        place.copy_(dense.reshape(-1))
    return copied, True
