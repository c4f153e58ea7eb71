"""Takes what modules write to gathered parameters back to what is stored.

The values that modules compute with have version counters of their own, slot by slot, so torch
itself counts what is written, whoever writes: `w.copy_(...)`, a view of it, `w.to_local()`, an
operator in C++, a replayed program. What is counted is taken back, and counted on the stored
parameter, before the next tensor of that slot is saved for backward or asked for: so a use before
the write is refused in backward, as on one device, and one behind it is right. `.data`, of which
torch counts nothing, has a list, and is taken back when the modules have run.

Each rank takes back what it stores, without communication: all of them have written alike, which
is an event that they compare. Nothing is asked of operators, and a unit whose parameters nobody has
written to is asked for the versions of its slots alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from vescale_dtensor.storage import Gathering, local_leaf, refuse_writes

from vescale_parallel._errors import ParallelError
from vescale_parallel._zero.flat_buffer import FlatBuffer

DataUses = list[tuple[int, Tensor | None]]
"""By the `id` of a gathered parameter, what its `.data` has handed out; None where it was set."""


class WrittenUnit(Protocol):
    """What matters of a unit."""

    @property
    def buffers(self) -> Sequence[FlatBuffer]: ...
    @property
    def held(self) -> Sequence[Any]: ...
    @property
    def data_uses(self) -> DataUses: ...
    @property
    def taken(self) -> set[str]: ...
    @property
    def cast_versions(self) -> dict[str, int]: ...


def take_back(unit: WrittenUnit, fulls: Sequence[Tensor]) -> None:
    """Let what is stored have what was written to the gathered parameters of a unit.

    Args:
        unit: it.
        fulls: what its modules held, one for each that is held.

    Raises:
        ParallelError: the values are in another dtype, shape or memory than what is stored.
        RuntimeError: autograd has recorded the write, which torch refuses for a leaf.
    """
    uses = list(unit.data_uses)
    unit.data_uses.clear()
    at = 0
    with torch.inference_mode(False), torch.no_grad():
        for buffer in unit.buffers:
            for slot in range(len(buffer.parameters) if buffer.handed else 0):
                full = fulls[at + slot]
                given = [one for number, one in uses if number == id(full)]
                if _is_counted(buffer, slot) or _tells_of_writes(given):
                    unit.taken.add(unit.held[at + slot].name)
                    _put_in_place(unit.held[at + slot], full, buffer.handed[slot])
                    take_slot(buffer, slot, is_set=None in given)
            at += len(buffer.parameters)
        for one, full in zip(unit.held[at:], fulls[at:], strict=True):
            _take_kept(unit, one, full, [one for number, one in uses if number == id(full)])


def refuse_cast_writes(unit: WrittenUnit, fulls: Sequence[Tensor]) -> list[Tensor]:
    """Refuse writes to gathered values of another dtype than is stored, at their line.

    Returns:
        Memory of which `permit_writes` is to be told when modules no longer compute with it.
    """
    refused = []
    for memory, names, starts, stored in _casts(unit, fulls):
        refuse_writes(memory, _Cast(names, starts, stored))
        refused.append(memory)
    return refused


def _casts(unit: WrittenUnit, fulls: Sequence[Tensor]) -> Iterator[Any]:
    """Memory of another dtype than is stored, what begins where in it, and the stored dtype."""
    at = 0
    for buffer in unit.buffers:
        if buffer.full is not None and buffer.full.dtype is not buffer.shard.dtype:
            names = [slot.names[0] for slot in buffer.row.plan.slots]
            yield buffer.full, names, buffer.starts, buffer.shard.dtype
        at += len(buffer.parameters)
    for one, full in zip(unit.held[at:], fulls[at:], strict=True):
        values = Gathering.values(full)
        if one.compute is not None and values.dtype is not one.stored.dtype:
            yield values, [one.name], [0], one.stored.dtype


class _Cast:
    """The error for a write to memory of another dtype than is stored."""

    def __init__(self, names: Sequence[str], starts: Sequence[int], stored: torch.dtype) -> None:
        self._names, self._starts, self._stored = names, starts, stored

    def __call__(self, local: Tensor) -> Exception:
        slot = max(bisect_right(self._starts, int(local.storage_offset())) - 1, 0)
        return _cast(self._names[slot], local.dtype, self._stored)


def is_written(unit: WrittenUnit, fulls: Sequence[Tensor]) -> bool:
    """Whether there may be something to take back."""
    if unit.data_uses:
        return True
    at = 0
    for buffer in unit.buffers:
        if [one._version for one in buffer.handed] != buffer.counted:
            return True
        at += len(buffer.parameters)
    # Those on every rank in full are the stored memory itself, or cast copies.
    return any(
        one.compute is not None and _is_cast_written(unit, one, full)
        for one, full in zip(unit.held[at:], fulls[at:], strict=True)
    )


def cast_again(unit: WrittenUnit, kept: Sequence[Any], fulls: Sequence[Tensor]) -> None:
    """Have new values in the cast copies that modules compute with, amid a forward.

    Args:
        unit: it.
        kept: those of its parameters that are on every rank in full.
        fulls: what its modules hold of them.
    """
    for one, full in zip(kept, fulls, strict=True):
        values, leaf = Gathering.values(full), local_leaf(one.stored)
        if one.compute is not None and values.dtype is not leaf.dtype:
            with torch.no_grad():
                values.detach().copy_(leaf)
            unit.cast_versions[one.name] = values._version


def moved_again(buffer: FlatBuffer, fulls: Sequence[Tensor]) -> None:
    """Have new values where `.data =` has moved what modules compute with, amid a forward.

    Args:
        buffer: that was gathered again.
        fulls: what modules hold of it.
    """
    with torch.no_grad():
        for full, view in zip(fulls, buffer.handed, strict=True):
            values = Gathering.values(full)
            if values.data_ptr() != view.data_ptr():
                values.detach().copy_(view)


def _is_cast_written(unit: WrittenUnit, one: Any, full: Tensor) -> bool:
    return Gathering.values(full)._version != unit.cast_versions.get(one.name, 0)


def take_slot(buffer: FlatBuffer, slot: int, *, is_set: bool = False) -> None:
    """Let what is stored have what was written to one slot.

    Args:
        buffer: it.
        slot: its number.
        is_set: whether `.data` was set: on one device uses before that keep the former memory.

    Raises:
        ParallelError: modules compute in another dtype.
    """
    name = buffer.row.plan.slots[slot].names[0]
    buffer.log.record(f"writes to {name}")
    full, shard, leaf = buffer.full, buffer.shard, buffer.leaves[slot]
    assert full is not None
    if full.dtype is not shard.dtype:
        raise _cast(name, full.dtype, shard.dtype)
    at, end = buffer.owned[slot]
    start = buffer.row.plan.start(buffer.group.rank)
    shard[at:end].copy_(full.detach()[start + at : start + end])
    if is_set or _is_counted(buffer, slot):
        # Once, also where this rank owns nothing of it: all ranks refuse the same backwards.
        increment_version([leaf])
        buffer.counted[slot] = buffer.handed[slot]._version
    # No copy of what was there before is of use, as on the device of what lies on the host.
    buffer.stepped()


def _is_counted(buffer: FlatBuffer, slot: int) -> bool:
    return buffer.handed[slot]._version != buffer.counted[slot]


def _tells_of_writes(given: Sequence[Tensor | None]) -> bool:
    return any([one is None or one._version for one in given])


def _put_in_place(one: Any, full: Tensor, view: Tensor) -> None:
    """Let the gathered memory have the values of a parameter, where `.data =` has moved them.

    Raises:
        ParallelError: they are none that can be stored.
        RuntimeError: autograd has recorded a write.
    """
    values = Gathering.values(full)
    if full.shape != one.stored.shape or values.dtype is not view.dtype:
        raise ParallelError(
            f"a forward has set parameter '{one.name}' to {values.dtype} of shape "
            f"{tuple(full.shape)}: what is stored has another dtype or shape, and is sharded by "
            "it. Change it before parallelize."
        )
    if values.grad_fn is not None and not getattr(values.grad_fn, "stands_for_leaves", False):
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation: parameter "
            f"'{one.name}', within a forward. Write to it under torch.no_grad()."
        )
    if values.data_ptr() != view.data_ptr() or values.stride() != view.stride():
        view.data.copy_(values.detach().clone())


def written_past_versions(unit: WrittenUnit, fulls: Sequence[Tensor]) -> set[str]:
    """Names of parameters, on every rank in full, that were written to where no version tells."""
    found = set()
    for one, full in zip(unit.held, fulls, strict=True):
        given = [given for number, given in unit.data_uses if number == id(full)]
        cast = one.compute is not None and _is_cast_written(unit, one, full)
        if cast or _tells_of_writes(given):
            found.add(one.name)
    return found


def _take_kept(unit: WrittenUnit, one: Any, full: Tensor, given: Sequence[Tensor | None]) -> None:
    """Take back what was written to a parameter that is on every rank in full."""
    values, leaf = Gathering.values(full), local_leaf(one.stored)
    if values.dtype is not leaf.dtype:
        if _is_cast_written(unit, one, full) or _tells_of_writes(given):
            raise _cast(one.name, values.dtype, leaf.dtype)
    elif None in given:
        _put_in_place(one, full, leaf)
        increment_version([leaf])


def _cast(name: str, compute: torch.dtype, stored: torch.dtype) -> ParallelError:
    dtype = str(stored).removeprefix("torch.")
    return ParallelError(
        f"a forward writes to parameter '{name}', which it has in {compute}, as precision= says: "
        f"what is stored is {stored}, and would be rounded. Write to it between forwards, or let "
        f"it compute in that dtype: precision={{'{name}': {{'compute': '{dtype}'}}, ...}}."
    )
