"""Optimizers that go element by element step what this rank has of a model as plain tensors.

Every rank of a pipeline has every parameter by name, and no elements of those of other stages. In
small models it takes longer to look at all of them than to update what is here. So a helper steps
the local tensors of parameters that have elements here; see `plain_steps`.

Parameters without elements have nothing to update but their counts of steps. One of those that were
stepped equally often is stepped with the others, and the rest are told its counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from vescale_dtensor import DTensor
from vescale_dtensor.storage import local_leaves, note_written, reduce_gradients

from vescale_parallel._common.optimizer_hooks import Args, Call
from vescale_parallel._common.plain_steps import Counts, Given, Held, Helped, HelpedSteps
from vescale_parallel._pipeline.run.optimizer_watch import OptimizersOf


class LocalSteps:
    """Lets optimizers of a model step its local tensors, where that is the same.

    Args:
        model: in stages, with distributed parameters that are on the mesh of all stages.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._optimizers = weakref.ref(model), OptimizersOf(model)
        self._steps = HelpedSteps(_LocalGroups)

    def before_step(self, optimizer: Optimizer, args: Args, kwargs: Any) -> Call | None:
        """Return what steps in an optimizer's place, if anything does."""
        model = self._model()
        if model is None or not self._optimizers.has(optimizer):
            return None
        own = cache(lambda: set(map(id, model.parameters())))
        return self._steps.begin(optimizer, own, args, kwargs)

    def after_step(self, optimizer: Optimizer, args: Args, kwargs: Any) -> None:
        """The step is done."""
        self._steps.end(optimizer, args)


class _LocalGroups(Helped):
    """The groups of one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[int, _Group] = {}

    def take(
        self, optimizer: Any, at: int, group: dict[str, Any], of: Callable[[], set[int]]
    ) -> tuple[Given, list[Any]]:
        """A group as a whole, or nothing of it."""
        parameters, found = group["params"], self._groups.get(at)
        if found is None or not found.is_current(optimizer, parameters):
            held = _held(optimizer, group, of())
            if held is None:
                return {}, parameters
            found = self._groups[at] = _Group(held)
        self.parts.append(found)
        return found.begin(), []


def _held(optimizer: Any, group: dict[str, Any], own: set[int]) -> Held | None:
    parameters = group["params"]
    if not all([id(one) in own and isinstance(one, DTensor) for one in parameters]):
        return None
    # A parameter that a group has twice is stepped twice in a row.
    if len(set(map(id, parameters))) != len(parameters) or not parameters:
        return None
    return Held.of(optimizer, group, parameters)


class _Group:
    """A group of parameters of an optimizer, and what it remembers of them, as plain tensors.

    Args:
        held: the parameters and states.
    """

    def __init__(self, held: Held) -> None:
        self._held = held
        self._leaves: list[Tensor] = []
        self._given: Given = {}
        self._locals: list[Tensor] = []
        self._absent: list[Counts] = []
        self._has_gradient: list[bool] = []

    def is_current(self, optimizer: Any, parameters: list[Any]) -> bool:
        """Whether these are the parameters, and the optimizer holds what it held."""
        own = self._held.parameters
        same = len(parameters) == len(own) and all(map(is_, parameters, own))
        return same and self._held.is_current(optimizer)

    def begin(self) -> Given:
        """What is stepped, with states."""
        reduce_gradients(self._held.parameters)
        leaves = local_leaves(self._held.parameters)
        locals_ = local_leaves(self._held.tensors)
        has_gradient = [leaf.grad is not None for leaf in leaves]
        # Objects are kept in place of others by `.data =` and by what moves a model.
        is_known = (
            len(leaves) == len(self._leaves)
            and all(map(is_, leaves, self._leaves))
            and all(map(is_, locals_, self._locals))
            and has_gradient == self._has_gradient
            and all([one.are_alike() for one in self._absent])
        )
        if not is_known:
            self._leaves, self._locals, self._has_gradient = leaves, locals_, has_gradient
            self._look()
        return self._given

    def _look(self) -> None:
        """Find out what is stepped, and which counts follow others."""
        self._given = {}
        # By what decides how they go on.
        alike: dict[Any, list[tuple[Tensor, dict[str, Any]]]] = {}
        for leaf, state, has_gradient in zip(
            self._leaves, self._held.states, self._has_gradient, strict=True
        ):
            if leaf.numel():
                self._given[leaf] = _local_state(state)
            else:
                numbers = _counts_of(state).items()
                how = [(name, one.item(), one.dtype, one.device) for name, one in numbers]
                alike.setdefault((leaf.dtype, has_gradient, *how), []).append((leaf, state))
        self._absent = []
        for members in alike.values():
            counts = Counts([_counts_of(state) for _, state in members])
            leaf, state = members[0]
            self._given[leaf] = _local_state({**state, **counts.stepped})
            self._absent.append(counts)

    def end(self, optimizer: Optimizer) -> None:
        """The step is done: tell of it."""
        for one in self._absent:
            one.tell()
        # Of one that all ranks have by name, and that stands for the group.
        pairs = zip(self._held.parameters, self._has_gradient, strict=True)
        stepped = next((parameter for parameter, has in pairs if has), None)
        if stepped is not None:
            note_written(stepped, f"{type(optimizer).__name__}.step")


def _counts_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: one for name, one in state.items() if not isinstance(one, DTensor)}


def _local_state(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: local_leaves([one])[0] if isinstance(one, DTensor) else one
        for name, one in state.items()
    }
