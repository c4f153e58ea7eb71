"""Counts the bytes of tensors that are alive during a step, from their storages.

What is counted: every storage that a torch op puts out, until it is freed, with the size it has at
that moment (a storage may be resized to nothing and back). What is not: fake tensors, memory inside
of one op and of the transport, and the allocator's slack.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tools.bench._train.training import Training, local
from tools.bench._wire import WRAPPERS

Sizes = dict[int, int]
"""Bytes by the number of a storage: addresses are used again, numbers are not."""


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank at the moment of a step at which the most are alive.

    Attributes:
        parameters, gradients, states: of those that hold after the step as well.
        rest: activations, gathered parameters, buffers of communication, caches, tables.
        held: what was there before the step, of whatever kind.
    """

    parameters: int
    gradients: int
    states: int
    rest: int
    held: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.states + self.rest


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, follows storages; `peak` are those of the largest moment.

    Args:
        before: tensors that are alive already and count.
    """

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._next = count()
        for tensor in before:
            self._note(tensor)
        self.peak: Sizes = self._sizes()
        self.held = self._highest = sum(self.peak.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op, and note what it puts out."""
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented  # the wrapper runs ops on what it holds, and those arrive here
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and not isinstance(one, WRAPPERS):
                self._note(one)
        sizes = self._sizes()
        total = sum(sizes.values())
        if total > self._highest:
            self._highest, self.peak = total, sizes
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            return  # what graphs say of shapes: fake tensors have sizes, and no memory
        if not any(one() is storage for one in self._alive.values()):
            self._alive[next(self._next)] = weakref.ref(storage)

    def _sizes(self) -> Sizes:
        found = {key: storage for key, one in self._alive.items() if (storage := one()) is not None}
        self._alive = {key: self._alive[key] for key in found}
        return {key: storage.nbytes() for key, storage in found.items()}

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers of the storages of these tensors."""
        wanted = [local(one).untyped_storage() for one in tensors]
        return {key for key, one in self._alive.items() if any(one() is each for each in wanted)}


def all_tensors() -> Iterator[Tensor]:
    """Every tensor with a storage of its own that Python knows."""
    gc.collect()
    # By `type`: `isinstance` would ask `__class__` of every proxy in the process.
    for one in gc.get_objects():
        kind = type(one)
        wrapper = issubclass(kind, WRAPPERS) or hasattr(kind, "to_local")
        if issubclass(kind, Tensor) and not wrapper:
            yield one


def storages_now() -> dict[int, UntypedStorage]:
    """What the process holds, by address; whoever keeps it keeps addresses from being reused."""
    return {storage._cdata: storage for storage in (t.untyped_storage() for t in all_tensors())}


def peak_of(
    training: Training, batch: tuple[Tensor, Tensor], others: Mapping[int, UntypedStorage]
) -> Peak:
    """The peak of one step; `others` are storages of the process that it does not count."""
    before = [one for one in all_tensors() if one.untyped_storage()._cdata not in others]
    with Live(before) as live:
        del before
        training.step(*batch)
    kinds = _kinds(training.optimizer, live)
    known = {key for keys in kinds.values() for key in keys}
    totals = {name: _bytes(live.peak, keys) for name, keys in kinds.items()}
    return Peak(**totals, rest=_bytes(live.peak, set(live.peak) - known), held=live.held)


def _bytes(sizes: Sizes, keys: set[int]) -> int:
    return sum(sizes.get(key, 0) for key in keys)


def _kinds(optimizer: torch.optim.Optimizer, live: Live) -> dict[str, set[int]]:
    """Storages of parameters, gradients and optimizer states, after the step."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    held = live.numbers(parameters)
    gradients = live.numbers(one.grad for one in parameters if one.grad is not None)
    states = live.numbers(
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    return {"parameters": held, "gradients": gradients - held, "states": states - held - gradients}
