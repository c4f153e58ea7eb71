"""The step of an optimizer in a joint graph: states and numbers as inputs, writes in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from vescale_dtensor._autograd.eager_steps import note_settings
from vescale_dtensor._dispatch.execute import after_mutation
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._joint.builder import Builder
from vescale_dtensor._joint.labels import Label
from vescale_dtensor._joint.optimizers import OptimizerRule, rule_of
from vescale_dtensor._tensor.copied_views import check_writable
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import has_step_hooks, note_step


@dataclass(frozen=True)
class UpdatedParameter:
    """A parameter that the graph updates.

    Attributes:
        name: of it.
        leaf: it.
        group: the index of its group of the optimizer.
        moments: names of the tensors of its state that are inputs of the graph.
        clock: which inputs its numbers are: those of parameters of one group and one count of
            steps are shared.
    """

    name: str
    leaf: DTensor
    group: int
    moments: tuple[str, ...]
    clock: int


@dataclass
class Update:
    """What feeds the inputs that an update adds to a graph, and counts its steps.

    Attributes:
        optimizer: whose step it is.
        rule: of its kind.
        stepped: the parameters, in the order of the optimizer.
        clocks: for each of them the group, and one parameter that counts.
        members: of each group, when the graph was made.
        forms: what decided the operators of each group.
    """

    optimizer: Optimizer
    rule: OptimizerRule
    stepped: tuple[UpdatedParameter, ...]
    clocks: tuple[tuple[int, DTensor], ...]
    members: tuple[tuple[int, ...], ...]
    forms: tuple[tuple[bool, ...], ...]

    def arguments(self) -> list[Any]:
        """Numbers, then moments: the inputs of the graph that are the update's.

        Raises:
            CaptureError: the optimizer is not as it was when the graph was made.
        """
        self._check()
        found: list[Any] = []
        groups = self.optimizer.param_groups
        counted = self._counted()
        steps = [counted(leaf) for _, leaf in self.clocks]
        for at, (group, _) in enumerate(self.clocks):
            given = self.rule.values(groups[group], steps[at] + 1)
            found += map(float, given)
        for one in self.stepped:
            if counted(one.leaf) != steps[one.clock]:
                raise CaptureError(
                    f"joint: '{one.name}' was stepped another number of times than parameters that "
                    "the graph updates with the same numbers. Make the graph anew"
                )
            state = self.optimizer.state[one.leaf]
            found += [local_moment(state, name, one) for name in one.moments]
            if self.rule.counts:
                found.append(state["step"])
        return found

    def _counted(self) -> Callable[[DTensor], float]:
        """Return what says how many steps a parameter has had, and waits for a device once."""
        if not self.rule.counts:
            return self._steps
        # Fused optimizers count on the device: one copy to the host for all of them.
        leaves = [one.leaf for one in self.stepped]
        counts = [self.optimizer.state[leaf].get("step") for leaf in leaves]
        if not all(isinstance(one, Tensor) and not one.is_cpu for one in counts):
            return self._steps
        numbers = torch.stack(counts).tolist()
        return dict(zip(leaves, numbers, strict=True)).__getitem__

    def _steps(self, leaf: DTensor) -> float:
        step = self.optimizer.state[leaf].get("step", 0.0)
        return float(step.item() if isinstance(step, Tensor) else step)

    def _check(self) -> None:
        rule, groups = rule_of(self.optimizer), self.optimizer.param_groups
        forms = tuple(rule.form(group) for group in groups)
        if rule is not self.rule or members(self.optimizer) != self.members or forms != self.forms:
            raise CaptureError(
                "joint: groups, parameters or options of the optimizer have changed since the "
                "graph was made (numbers may change, but not from or to none). Make it anew"
            )
        check_hooks(self.optimizer)

    def before(self) -> None:
        """Ask whether all that the update writes to may be written to, before it runs."""
        note_settings(self.optimizer, self.stepped[0].leaf._spec.layout.mesh)
        for one in self.stepped:
            check_writable(one.leaf, "the update of a joint graph")

    def after(self) -> None:
        """Count the steps that the graph has made, and tell the wrappers that were written to."""
        states = [self.optimizer.state[one.leaf] for one in self.stepped]
        counts = [state["step"] for state in states if "step" in state]
        if counts and not self.rule.counts:
            with torch.no_grad():
                torch._foreach_add_(counts, 1)
        for one, state in zip(self.stepped, states, strict=True):
            after_mutation(one.leaf)
            for name in one.moments:
                after_mutation(state[name])
        note_step(self.optimizer)


def members(optimizer: Optimizer) -> tuple[tuple[int, ...], ...]:
    """Which parameters are in which group."""
    return tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups)


def check_hooks(optimizer: Optimizer) -> None:
    """Refuse hooks around steps: a graph runs none.

    Raises:
        CaptureError: there are some.
    """
    if has_step_hooks(optimizer):
        raise CaptureError(
            "joint: hooks run around the steps of the optimizer, and in no graph. Take them off"
        )


def local_moment(state: Mapping[str, Any], name: str, one: UpdatedParameter) -> Tensor:
    """This rank's part of a tensor of the state.

    Raises:
        CaptureError: it lies otherwise than its parameter.
    """
    found = state.get(name)
    if isinstance(found, DTensor) and found._spec.layout == one.leaf._spec.layout:
        local: Tensor = found._local_tensor
        if local.shape == one.leaf._local_tensor.shape:
            return local
    raise CaptureError(
        f"joint: '{name}' of the optimizer's state of '{one.name}' is "
        f"{'missing' if found is None else 'laid out otherwise than the parameter'}. Step it once "
        "in eager mode, or load its state, and make the graph anew"
    )


def plan_update(optimizer: Optimizer, named: Mapping[int, str]) -> Update:
    """How an optimizer is to step these parameters; makes the state of those without one.

    Args:
        optimizer: of torch.
        named: names of the parameters that get gradients, by id.

    Raises:
        CaptureError: an optimizer that no graph has operators for.
    """
    rule = rule_of(optimizer)
    check_hooks(optimizer)
    clocks: dict[tuple[int, float], int] = {}
    found: list[UpdatedParameter] = []
    counted: list[tuple[int, DTensor]] = []
    made = Update(optimizer, rule, (), (), members(optimizer), ())
    for index, group in enumerate(optimizer.param_groups):
        for leaf in group["params"]:
            if id(leaf) not in named:
                continue
            moments = rule.moments(group)
            state = optimizer.state[leaf]
            if any(state.get(name) is None for name in moments):
                rule.begin(state, leaf, group)
            key = index, made._steps(leaf)
            clock = clocks.setdefault(key, len(clocks))
            if clock == len(counted):
                counted.append((index, leaf))
            found.append(UpdatedParameter(named[id(leaf)], leaf, index, moments, clock))
    made.stepped, made.clocks = tuple(found), tuple(counted)
    made.forms = tuple(rule.form(group) for group in optimizer.param_groups)
    return made


def add_update(
    make: Builder, update: Update, stored: Mapping[int, fx.Node], totals: Mapping[int, fx.Node]
) -> None:
    """Add the operators of an update, and inputs in the order of `Update.arguments`.

    Args:
        make: adds nodes.
        update: what to add.
        stored: the local tensor of each parameter, by its id.
        totals: its complete gradient.
    """
    groups = update.optimizer.param_groups
    numbers: list[dict[str, fx.Node]] = []
    for group, leaf in update.clocks:
        values = update.rule.values(groups[group], update._steps(leaf) + 1)
        pairs = zip(update.rule.numbers, values, strict=True)
        numbers.append({name: make.input(name, float(one)) for name, one in pairs})
    moments: list[dict[str, fx.Node]] = []
    for one in update.stepped:
        state = update.optimizer.state[one.leaf]
        moments.append(
            {name: make.input(name, local_moment(state, name, one)) for name in one.moments}
        )
        if update.rule.counts:
            moments[-1]["step"] = make.input("step", state["step"])
        for name, node in moments[-1].items():
            node.meta["source"] = f"{one.name}.{name}"
    make.label = Label("update", type(update.optimizer).__name__)
    for at, (group, _) in enumerate(update.clocks):
        items = [
            (stored[id(one.leaf)], totals[id(one.leaf)], {**own, **numbers[at]})
            for one, own in zip(update.stepped, moments, strict=True)
            if one.clock == at
        ]
        update.rule.update_all(make, items, groups[group])
    make.label = None
