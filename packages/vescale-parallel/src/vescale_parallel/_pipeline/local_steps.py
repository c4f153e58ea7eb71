"""Optimizers that go element by element step what this rank has of a model as plain tensors.

Every rank of a pipeline has every parameter by name, and no elements of those of other stages. An
optimizer of torch looks at each of them in Python, several times a step and through a wrapper: in
small models that takes longer than to update it. So before a step a helper of the same class is put
in the optimizer's place: it has the optimizer's settings, and the local tensors of parameters that
have elements here, with their gradients and states. The optimizer itself is not changed.

Parameters without elements have nothing to update but their counts of steps. One of those that were
stepped equally often is stepped with the others, and the rest are told its counts.
"""

from __future__ import annotations

import weakref
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from vescale_dtensor import DTensor, local_leaves, note_written, reduce_gradients

from vescale_parallel._common.optimizer_hooks import Args, Call
from vescale_parallel._pipeline.stepped import OptimizersOf
from vescale_parallel._zero.flat_steps import States, can_be_helped, helper_of


class LocalSteps:
    """Lets optimizers of a model step its local tensors, where that is the same.

    Args:
        model: in stages, with distributed parameters that are on the mesh of all stages.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._optimizers = weakref.ref(model), OptimizersOf(model)
        self._steps = _LocalSteps()

    def before_step(self, optimizer: Optimizer, args: Args, kwargs: Any) -> Call | None:
        """Return what steps in an optimizer's place, if anything does."""
        model = self._model()
        if model is None or not self._optimizers.has(optimizer):
            return None
        return self._steps.begin(model, optimizer, args, kwargs)

    def after_step(self, optimizer: Optimizer, args: Args, kwargs: Any) -> None:
        """The step is done."""
        self._steps.end(optimizer, args)


class _LocalSteps:
    """Steps of optimizers on the parameters of one model."""

    def __init__(self) -> None:
        # Weakly: this must not keep an optimizer whose owner has let it go.
        self._of: weakref.WeakKeyDictionary[Optimizer, _Stepped] = weakref.WeakKeyDictionary()

    def begin(self, model: nn.Module, optimizer: Optimizer, args: Args, kwargs: Any) -> Call | None:
        """What `step` is to be called with in place of these; None: with these.

        The same answer on every rank, but for states that only some ranks have changed.
        """
        if torch.compiler.is_compiling() or not can_be_helped(optimizer, args, kwargs):
            return None
        known = self._of.get(optimizer)
        if known is None:
            known = self._of[optimizer] = _Stepped()
        helper = known.helper(model, optimizer)
        return None if helper is None else ((helper,), kwargs)

    def end(self, optimizer: Optimizer, args: Args) -> None:
        """The step is done."""
        known = self._of.get(optimizer)
        # Where the optimizer was not helped, it stands there itself.
        if known is not None and args and args[0] is known.running:
            known.end(optimizer)


class _Stepped:
    """One optimizer.

    Attributes:
        running: what steps in its place at the moment.
    """

    def __init__(self) -> None:
        self.running: Any = None
        self._groups: list[_Group] = []

    def helper(self, model: nn.Module, optimizer: Any) -> Any:
        """What steps in the optimizer's place; None where no group can be stepped so."""
        before, self._groups = self._groups, []
        groups: list[dict[str, Any]] = []
        states = States(optimizer.state)
        own: set[int] | None = None
        for at, group in enumerate(optimizer.param_groups):
            found = before[at] if at < len(before) else None
            if found is None or not found.is_current(optimizer, group):
                if own is None:
                    own = {id(one) for one in model.parameters()}
                found = _Group.of(optimizer, group, own)
            self._groups.append(found)
            taken = found.begin()
            if taken is None:
                groups.append(group)
                continue
            states.update(taken)
            groups.append({**group, "params": list(taken)})
        if not states:
            return None
        self.running = helper_of(optimizer, groups, states)
        return self.running

    def end(self, optimizer: Any) -> None:
        """Tell of what was written to."""
        self.running = None
        for group in self._groups:
            group.end(f"{type(optimizer).__name__}.step")


class _Counts:
    """Parameters without elements that were stepped equally often.

    Args:
        leaf: the one of them that is stepped.
        counts: its plain tensors, by name.
    """

    def __init__(self, leaf: Tensor, counts: dict[str, Tensor]) -> None:
        self._leaf, self._counts = leaf, counts
        # Those of the others, and for each what it is told.
        self._others: list[Tensor] = []
        self._sources: list[Tensor] = []
        # Of all of them, since the latest step.
        self._versions = self._now()

    def _now(self) -> list[int]:
        return [one._version for one in (*self._counts.values(), *self._others)]

    def follow(self, counts: dict[str, Tensor]) -> None:
        """One more, which has these plain tensors."""
        self._others += counts.values()
        self._sources += [self._counts[name] for name in counts]
        self._versions = self._now()

    def are_alike(self) -> bool:
        """Whether nobody else has written to them."""
        return self._versions == self._now()

    def tell(self) -> None:
        """Let the others have what the stepped one has."""
        # Without a gradient it was left out of this step, as they were.
        if self._others and self._leaf.grad is not None:
            torch._foreach_copy_(self._others, self._sources)
        self._versions = self._now()


class _Group:
    """A group of parameters of an optimizer, and what it remembers of them, as plain tensors.

    Args:
        parameters: they.
        held: what the optimizer holds of each; empty: this group is stepped as it is.
    """

    def __init__(self, parameters: list[Any], held: list[dict[str, Any]]) -> None:
        self._parameters, self._held = parameters, held
        self._values = list(chain.from_iterable(map(dict.values, held)))
        self._distributed = [one for one in self._values if isinstance(one, DTensor)]
        self._leaves: list[Tensor] = []
        # What is stepped: leaves, and states by leaf.
        self._given: dict[Tensor, dict[str, Tensor]] = {}
        self._locals: list[Tensor] = []
        self._absent: list[_Counts] = []
        self._has_gradient: list[bool] = []
        self._is_stepped = False

    @classmethod
    def of(cls, optimizer: Any, group: dict[str, Any], own: set[int]) -> _Group:
        """Look whether a group can be stepped so.

        Args:
            optimizer: whose group it is.
            group: it.
            own: the `id` of each parameter of the model.
        """
        parameters = list(group["params"])
        held = [optimizer.state.get(one) or {} for one in parameters]
        # The first step makes states, for each parameter. SGD without momentum keeps none.
        is_bare = type(optimizer) is torch.optim.SGD and not group["momentum"]
        can_be = (
            not group.get("differentiable")
            and all([id(one) in own and isinstance(one, DTensor) for one in parameters])
            # A parameter that a group has twice is stepped twice in a row.
            and len({id(one) for one in parameters}) == len(parameters)
            and all([type(one) is dict and (one or is_bare) for one in held])
            and all(map(_are_local, parameters, held))
        )
        return cls(parameters, held if can_be else [])

    def is_current(self, optimizer: Any, group: dict[str, Any]) -> bool:
        """Whether the optimizer holds what it held, by identity."""
        parameters, held = group["params"], self._held
        # By `map`, without a line of Python for each parameter and name in every step.
        return bool(
            held
            and not group.get("differentiable")
            and len(parameters) == len(self._parameters)
            and all(map(is_, parameters, self._parameters))
            and all(map(is_, map(optimizer.state.get, parameters), held))
            and sum(map(len, held)) == len(self._values)
            and all(map(is_, chain.from_iterable(map(dict.values, held)), self._values))
        )

    def begin(self) -> dict[Tensor, dict[str, Tensor]] | None:
        """What is stepped, with states; None: this group is stepped as it is."""
        self._is_stepped = bool(self._held)
        if not self._held:
            return None
        reduce_gradients(self._parameters)
        leaves = local_leaves(self._parameters)
        locals_ = local_leaves(self._distributed)
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
        alike: dict[Any, _Counts] = {}
        for leaf, held, has_gradient in zip(
            self._leaves, self._held, self._has_gradient, strict=True
        ):
            if not leaf.numel():
                counts = _counts_of(held)
                key = (leaf.dtype, has_gradient, *(one.item() for one in counts.values()))
                if key in alike:
                    alike[key].follow(counts)
                    continue
                alike[key] = _Counts(leaf, counts)
            self._given[leaf] = _local_state(held)
        self._absent = list(alike.values())

    def end(self, what: str) -> None:
        """The step is done: tell of it."""
        if not self._is_stepped:
            return
        with torch.no_grad():
            for one in self._absent:
                one.tell()
        # Of one that all ranks have by name, and that stands for the group.
        stepped = [p for p, has in zip(self._parameters, self._has_gradient, strict=True) if has]
        if stepped:
            note_written(stepped[0], what)


def _are_local(parameter: DTensor, held: dict[str, Any]) -> bool:
    """Whether what an optimizer holds of a parameter lies as the parameter does."""
    return all(
        [
            one.placements == parameter.placements
            and one.shape == parameter.shape
            and not one.requires_grad
            if isinstance(one, DTensor)
            else type(one) is Tensor and not one.ndim
            for one in held.values()
        ]
    )


def _counts_of(held: dict[str, Any]) -> dict[str, Tensor]:
    return {name: one for name, one in held.items() if not isinstance(one, DTensor)}


def _local_state(held: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: local_leaves([one])[0] if isinstance(one, DTensor) else one
        for name, one in held.items()
    }
