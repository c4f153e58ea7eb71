"""Writes what torch's optimizers do to one parameter as operators, in the same order.

A rule says which tensors an optimizer keeps of a parameter, which numbers it takes at a step (the
learning rate, corrections by the number of steps), and which operators it runs. Numbers are inputs
of the graph, computed in Python as torch does, so that schedules of them need no other graph.
Sources: torch/optim/sgd.py, adam.py, adamw.py (for-loop and foreach forms, which agree in bits).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx, optim

from vescale_dtensor._errors import CaptureError
from vescale_dtensor._joint.builder import Builder

aten: Any = torch.ops.aten
Group = Mapping[str, Any]
Nodes = Mapping[str, fx.Node]
Item = tuple[fx.Node, fx.Node, Nodes]
"""A parameter, its gradient, and moments and numbers by their names."""


class OptimizerRule(ABC):
    """How one optimizer updates one parameter."""

    numbers: tuple[str, ...]
    """Names of the numbers that it takes at each step."""
    counts = False
    """Whether it counts steps itself, in tensors of the state that are inputs of the graph."""

    @abstractmethod
    def moments(self, group: Group) -> tuple[str, ...]:
        """Names in the state of tensors like the parameter."""

    @abstractmethod
    def begin(self, state: dict[str, Any], parameter: Tensor, group: Group) -> None:
        """Make the state of a parameter that was never stepped.

        Raises:
            CaptureError: the first step is another one than those that follow, or the state is of
                steps with other options.
        """

    @abstractmethod
    def values(self, group: Group, steps: float) -> tuple[float, ...]:
        """The numbers of a step, which is number `steps` of the parameter, from 1 on."""

    @abstractmethod
    def form(self, group: Group) -> tuple[bool, ...]:
        """What decides which operators there are."""

    def update_all(self, make: Builder, items: Sequence[Item], group: Group) -> None:
        """Add the operators for parameters of one group and one count of steps."""
        for p, g, of in items:
            self.update(make, p, g, of, group)

    def update(self, make: Builder, p: fx.Node, g: fx.Node, of: Nodes, group: Group) -> None:
        """Add the operators for one parameter."""
        raise NotImplementedError


class _SGD(OptimizerRule):
    numbers: tuple[str, ...] = ("minus_lr", "weight_decay", "momentum", "new")

    def moments(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def begin(self, state: dict[str, Any], parameter: Tensor, group: Group) -> None:
        if group["momentum"] == 0:
            return
        # torch clones the first gradient, whole: whose first step it is, no other graph or eager
        # step would know.
        if group["dampening"] != 0:
            raise CaptureError(
                "joint: the first step of SGD with dampening is another one than those that "
                "follow. Make one step in eager mode, or load its state, and then the graph"
            )
        # Minus zero: adding a gradient to it gives its bits, also where it is plus or minus zero.
        state["momentum_buffer"] = torch.full_like(parameter.detach(), -0.0)

    def values(self, group: Group, steps: float) -> tuple[float, ...]:
        return (-group["lr"], group["weight_decay"], group["momentum"], 1 - group["dampening"])

    def form(self, group: Group) -> tuple[bool, ...]:
        momentum = group["momentum"] != 0
        decays = group["weight_decay"] != 0
        flags = bool(group["nesterov"]), bool(group["maximize"]), group["dampening"] != 0
        return momentum, decays, *flags

    def update(self, make: Builder, p: fx.Node, g: fx.Node, of: Nodes, group: Group) -> None:
        momentum, decays, nesterov, maximize, _ = self.form(group)
        if maximize:
            g = make(aten.neg.default, g)
        if decays:
            g = make(aten.add.Tensor, g, p, alpha=of["weight_decay"])
        if momentum:
            buffer = make(aten.mul_.Tensor, of["momentum_buffer"], of["momentum"])
            buffer = make(aten.add_.Tensor, buffer, g, alpha=of["new"])
            g = make(aten.add.Tensor, g, buffer, alpha=of["momentum"]) if nesterov else buffer
        make(aten.add_.Tensor, p, g, alpha=of["minus_lr"])


class _Adam(OptimizerRule):
    numbers: tuple[str, ...] = ("decay", "new1", "beta2", "new2", "correction", "eps", "minus_size")

    def __init__(self, *, decoupled: bool) -> None:
        self._decoupled = decoupled

    def moments(self, group: Group) -> tuple[str, ...]:
        found = ("exp_avg", "exp_avg_sq")
        return (*found, "max_exp_avg_sq") if group["amsgrad"] else found

    def begin(self, state: dict[str, Any], parameter: Tensor, group: Group) -> None:
        if state:  # torch ends in a KeyError there
            missing = [name for name in self.moments(group) if state.get(name) is None]
            raise CaptureError(
                f"joint: the state of steps that Adam has made has no '{missing[0]}': set amsgrad "
                "before the first step, or load a state that was made with it"
            )
        wide = torch.get_default_dtype() is torch.float64
        state["step"] = torch.tensor(0.0, dtype=torch.float64 if wide else torch.float32)
        for name in self.moments(group):
            state[name] = torch.zeros_like(parameter.detach(), memory_format=torch.preserve_format)

    def values(self, group: Group, steps: float) -> tuple[float, ...]:
        lr, decay = group["lr"], group["weight_decay"]
        beta1, beta2 = group["betas"]
        size = lr / (1 - beta1**steps)
        correction = (1 - beta2**steps) ** 0.5
        decay = 1 - lr * decay if self._is_decoupled(group) else decay
        return (decay, 1 - beta1, beta2, 1 - beta2, correction, group["eps"], -size)

    def form(self, group: Group) -> tuple[bool, ...]:
        decays = group["weight_decay"] != 0
        flags = bool(group["amsgrad"]), bool(group["maximize"]), self._is_decoupled(group)
        return decays, *flags

    def _is_decoupled(self, group: Group) -> bool:
        return bool(group.get("decoupled_weight_decay", self._decoupled))

    def update(self, make: Builder, p: fx.Node, g: fx.Node, of: Nodes, group: Group) -> None:
        decays, amsgrad, maximize, decoupled = self.form(group)
        if maximize:
            g = make(aten.neg.default, g)
        if decays and decoupled:
            p = make(aten.mul_.Tensor, p, of["decay"])
        elif decays:
            g = make(aten.add.Tensor, g, p, alpha=of["decay"])
        if p.meta["val"].is_complex():
            # Moments of the real and the imaginary part, as torch takes them.
            pair = aten.view_as_real.default
            p, g = make(pair, p), make(pair, g)
            moments = {name: make(pair, of[name]) for name in self.moments(group)}
            of = {**of, **moments}
        first = make(aten.lerp_.Scalar, of["exp_avg"], g, of["new1"])
        second = make(aten.mul_.Tensor, of["exp_avg_sq"], of["beta2"])
        second = make(aten.addcmul_.default, second, g, g, value=of["new2"])
        if amsgrad:
            largest = of["max_exp_avg_sq"]
            second = make(aten.copy_.default, largest, make(aten.maximum.default, largest, second))
        # In place where torch divides into new memory: the same bits.
        size = make(aten.div_.Tensor, make(aten.sqrt.default, second), of["correction"])
        size = make(aten.add_.Tensor, size, of["eps"])
        make(aten.addcdiv_.default, p, first, size, value=of["minus_size"])


class _FusedAdam(_Adam):
    """torch's own kernel, one call for all parameters of a group, as its optimizer has it."""

    numbers = ("lr", "beta1", "beta2", "weight_decay", "eps")
    counts = True

    def begin(self, state: dict[str, Any], parameter: Tensor, group: Group) -> None:
        super().begin(state, parameter, group)
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)

    def values(self, group: Group, steps: float) -> tuple[float, ...]:
        return (group["lr"], *group["betas"], group["weight_decay"], group["eps"])

    def update_all(self, make: Builder, items: Sequence[Item], group: Group) -> None:
        names = (*self.moments(group)[:2], "step")
        first, second, steps = ([of[name] for _, _, of in items] for name in names)
        largest = [of["max_exp_avg_sq"] for _, _, of in items] if group["amsgrad"] else []
        make(aten._foreach_add_.Scalar, steps, 1)
        fused = aten._fused_adamw_ if self._is_decoupled(group) else aten._fused_adam_
        # A bucket's gradient is a view of what was sent, as its parameter is: the kernel takes both
        # as they lie.
        parameters, gradients = [p for p, _, _ in items], [g for _, g, _ in items]
        given = {name: items[0][2][name] for name in self.numbers}
        flags = {"amsgrad": bool(group["amsgrad"]), "maximize": bool(group["maximize"])}
        make(fused.default, parameters, gradients, first, second, largest, steps, **given, **flags)


RULES: Final[dict[type, OptimizerRule]] = {
    optim.SGD: _SGD(),
    optim.Adam: _Adam(decoupled=False),
    optim.AdamW: _Adam(decoupled=True),
}
_FUSED: Final[dict[type, OptimizerRule]] = {
    optim.Adam: _FusedAdam(decoupled=False),
    optim.AdamW: _FusedAdam(decoupled=True),
}

_REFUSED: Final = {
    "capturable": "its numbers are tensors",
    "differentiable": "its update has a history",
}


def rule_of(optimizer: optim.Optimizer) -> OptimizerRule:
    """The rule of an optimizer.

    Raises:
        CaptureError: there is none, or its options have no operators.
    """
    kind = type(optimizer)
    rule = RULES.get(kind)
    if rule is None:
        raise CaptureError(
            f"joint: {kind.__name__} is not an optimizer that a graph has operators for: there are "
            f"{', '.join(one.__name__ for one in RULES)} (not classes made from them). Run the "
            "graph without it, and step the optimizer after it"
        )
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise CaptureError("joint: the step of the optimizer was replaced by another function")
    for group in optimizer.param_groups:
        for name, why in _REFUSED.items():
            if group.get(name):
                raise CaptureError(f"joint: {kind.__name__} with {name}=True: {why}")
        for name, value in group.items():
            if isinstance(value, Tensor) or any(
                isinstance(one, Tensor) for one in (value if isinstance(value, tuple) else ())
            ):
                raise CaptureError(
                    f"joint: '{name}' of {kind.__name__} is a tensor. Make it a Python number; it "
                    "may change from step to step"
                )
    fused = [bool(group.get("fused")) for group in optimizer.param_groups]
    if not any(fused):
        return rule
    if kind not in _FUSED or not all(fused):
        raise CaptureError(
            f"joint: {kind.__name__} with fused=True (of Adam and AdamW there is the fused kernel, "
            "if all groups have it)"
        )
    return _FUSED[kind]
