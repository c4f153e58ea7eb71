"""Steps that a helper makes in an optimizer's place: plain tensors in place of parameters.

An optimizer of torch looks at every parameter in Python several times a step, and each of its
operations goes through a wrapper. Where its update of an element depends on nothing but that
element's values, any plain tensors that have the elements can be stepped. So before a step a helper
of the same class is put in the optimizer's place: it has the optimizer's settings, and such tensors
with their gradients and states. The optimizer, its groups, and what it remembers of each parameter
are never changed meanwhile, whatever raises.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from vescale_dtensor import DTensor

from vescale_parallel._common.optimizer_hooks import Args, Call
from vescale_parallel._common.torch_compat import has_step_hooks

_KINDS: Final = ("Adadelta", "Adagrad", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "SGD")
"""By exact type: a subclass may do anything."""

ELEMENTWISE: Final = frozenset(
    kind for name in _KINDS if (kind := getattr(torch.optim, name, None)) is not None
)
"""Optimizers that update each element by its own gradient and state alone."""

Given = dict[Tensor, dict[str, Tensor]]
"""What is stepped, with its states."""


class Part(Protocol):
    """Something of an optimizer's parameters that is stepped by a helper."""

    def end(self, optimizer: Optimizer) -> None:
        """The step is done: tell of what was written to. Without a history."""


class Helped(ABC):
    """One optimizer, in whose place a helper steps.

    Attributes:
        running: the helper, during a step.
        parts: what it steps.
    """

    def __init__(self) -> None:
        self.running: Any = None
        self.parts: list[Part] = []

    @abstractmethod
    def take(
        self, optimizer: Any, at: int, group: dict[str, Any], of: Any
    ) -> tuple[Given, list[Any]]:
        """What the helper steps of group number `at`, and the parameters that it takes as they are.

        What is stepped is noted in `parts`. The same on all ranks.
        """

    def helper(self, optimizer: Any, of: Any) -> Any:
        """What steps in the optimizer's place; None where nothing can be stepped otherwise."""
        self.parts = []
        groups: list[dict[str, Any]] = []
        states = _States(optimizer.state)
        for at, group in enumerate(optimizer.param_groups):
            taken: Given = {}
            rest = group["params"]
            if not group.get("differentiable"):
                taken, rest = self.take(optimizer, at, group, of)
            states.update(taken)
            # Apart: lists of plain tensors and of DTensors do not mix.
            lists = [one for one in (list(taken), rest) if one]
            groups += [{**group, "params": one} for one in lists or [rest]]
        if not states:
            return None
        self.running = object.__new__(type(optimizer))
        # Also what a GradScaler has left there for a fused step.
        vars(self.running).update(vars(optimizer))
        self.running.param_groups, self.running.state = groups, states
        return self.running


class HelpedSteps:
    """Steps of optimizers on what one model has.

    Args:
        make: for one optimizer.
    """

    def __init__(self, make: Callable[[], Helped]) -> None:
        self._make = make
        # Weakly: this must not keep an optimizer whose owner has let it go.
        self._of: weakref.WeakKeyDictionary[Optimizer, Helped] = weakref.WeakKeyDictionary()

    def begin(self, optimizer: Optimizer, of: Any, args: Args, kwargs: Any) -> Call | None:
        """What `step` is to be called with in place of these; None: with these.

        The same answer on every rank, but for states that only some ranks have changed.

        Args:
            optimizer: whose step it is; its gradients are complete.
            of: what its parameters are part of.
            args: of `step`, itself first.
            kwargs: of `step`.
        """
        if torch.compiler.is_compiling() or not _can_be_helped(optimizer, args, kwargs):
            return None
        known = self._of.get(optimizer)
        if known is None:
            known = self._of[optimizer] = self._make()
        with torch.no_grad():
            helper = known.helper(optimizer, of)
        return None if helper is None else ((helper,), kwargs)

    def end(self, optimizer: Optimizer, args: Args) -> None:
        """The step is done."""
        known = self._of.get(optimizer)
        # Where the optimizer was not helped, it stands there itself.
        if known is not None and args and args[0] is known.running:
            parts, known.running, known.parts = known.parts, None, []
            with torch.no_grad():
                for one in parts:
                    one.end(optimizer)


class Held:
    """What an optimizer remembers of parameters: tensors that lie as these do, and plain numbers.

    Attributes:
        parameters: DTensors.
        states: of each, by name.
        tensors: those of all states that lie as parameters do.
    """

    def __init__(self, parameters: Sequence[Any], states: list[dict[str, Any]]) -> None:
        self.parameters, self.states = list(parameters), states
        self._values = list(chain.from_iterable(map(dict.values, states)))
        self.tensors = [one for one in self._values if isinstance(one, DTensor)]

    @classmethod
    def of(cls, optimizer: Any, group: Mapping[str, Any], parameters: Sequence[Any]) -> Held | None:
        """Look at a group's parameters; None where they are to be stepped as they are."""
        states = [optimizer.state.get(one) or {} for one in parameters]
        # The first step makes states, for each parameter. SGD without momentum keeps none.
        is_bare = type(optimizer) is torch.optim.SGD and not group["momentum"]
        can_be = all([type(one) is dict and (one or is_bare) for one in states])
        return cls(parameters, states) if can_be and all(map(_lie, parameters, states)) else None

    def is_current(self, optimizer: Any) -> bool:
        """Whether the optimizer holds what it held, by identity."""
        # By `map`, without a line of Python for each parameter and name in every step.
        return (
            all(map(is_, map(optimizer.state.get, self.parameters), self.states))
            and sum(map(len, self.states)) == len(self._values)
            and all(map(is_, chain.from_iterable(map(dict.values, self.states)), self._values))
        )


class Counts:
    """Numbers of parameters that were stepped equally often: those of one are set for all.

    Attributes:
        stepped: by name, what is stepped.

    Args:
        values: of each parameter, by name. They become views of one tensor.
    """

    def __init__(self, values: Sequence[Mapping[str, Tensor]]) -> None:
        self.stepped: dict[str, Tensor] = {}
        self._own = list(chain.from_iterable(map(dict.values, map(dict, values))))
        self._together: list[tuple[Tensor, Tensor]] = []
        for name in values[0]:
            together = torch.stack([each[name] for each in values])
            for index, each in enumerate(values):
                # The tensor stays the same object, as a user may hold it.
                each[name].data = together[index]
            self.stepped[name] = together[0].clone()
            self._together.append((together, self.stepped[name]))
        self._versions = [one._version for one in self._own]

    def are_alike(self) -> bool:
        """Whether nobody else has written to them, perhaps not to all."""
        return [one._version for one in self._own] == self._versions

    def tell(self) -> None:
        """Let all parameters have what the stepped one has."""
        for together, stepped in self._together:
            # By a tensor of its own, so that a write by anybody else shows in their versions.
            together.copy_(stepped)


class _States(dict[Any, Any]):
    """States of a helper: its own, and those of the optimizer for parameters that both have."""

    def __init__(self, others: Any) -> None:
        super().__init__()
        self._others = others

    def __missing__(self, parameter: Any) -> Any:
        return self._others[parameter]


def _can_be_helped(optimizer: Optimizer, args: Args, kwargs: dict[str, Any]) -> bool:
    """Whether a helper of its class can make a step in an optimizer's place."""
    if type(optimizer) not in ELEMENTWISE:
        return False
    # A closure computes gradients within the step, and other hooks may change them there.
    # Another optimizer in its place: tensors of a second model are stepped already.
    if len(args) != 1 or args[0] is not optimizer or has_step_hooks(optimizer):
        return False
    return all([value is None for value in kwargs.values()])


def _lie(parameter: DTensor, state: Mapping[str, Any]) -> bool:
    """Whether what an optimizer holds of a parameter lies as the parameter does."""
    return all(
        [
            one.placements == parameter.placements
            and one.shape == parameter.shape
            and not one.requires_grad
            if isinstance(one, DTensor)
            else type(one) is Tensor and not one.ndim
            for one in state.values()
        ]
    )
