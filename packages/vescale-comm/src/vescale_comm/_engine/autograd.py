"""Collectives as linear maps: each knows its adjoint, and that is all that autograd needs."""

from abc import ABC, abstractmethod
from typing import Any, Never

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from vescale_comm._engine.primitives import Steps
from vescale_comm._engine.runner import StartedCollective, complete
from vescale_comm._errors import CommArgumentError
from vescale_comm._torch.buffers import plain


class Linear(ABC):
    """A collective of one tensor, planned: immutable, printable, not yet run.

    Seen over all members at once, a summing or moving collective is a linear map from the tuple of
    inputs to the tuple of outputs. Its gradient is the adjoint map, which is again a collective; so
    gradients of gradients need nothing more.

    A member whose input requires no gradient gets no node, and does not come to the collective of
    the backward. So inputs require a gradient on all members or on none; where calls are compared
    (`checked`, `simulate`, the execution log), this is compared with them.
    """

    __slots__ = ()

    @abstractmethod
    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Communicates. Leaves `x` as it is and returns a new tensor."""

    @abstractmethod
    def adjoint(self) -> "Linear":
        """Return the collective that carries gradients the other way."""

    def run(self, x: Tensor, *, in_graph: bool = False) -> Tensor:
        """Run the collective: by itself, or inside of the autograd node that is made for it."""
        return complete(self.steps(x), in_graph=in_graph)


def needs_gradient(x: Tensor) -> bool:
    """Return whether what is made of `x` now belongs to an autograd graph."""
    return x.requires_grad and torch.is_grad_enabled()


def apply(collective: Linear, x: Tensor) -> Tensor:
    """Run a collective, with a node in the autograd graph only where one is needed.

    A torch function mode sees it as one function of constant and tensor, as it sees torch's own.
    """
    if has_torch_function_unary(None):  # asked of no tensor: only a mode answers
        seen: Tensor = handle_torch_function(apply, (), collective, x)
        return seen
    x = plain(x)
    if needs_gradient(x):
        adjoint = collective.adjoint()
        result: Tensor = _Collective.apply(x, collective, adjoint)  # type: ignore[no-untyped-call]
        return result
    return collective.run(x)


class _Collective(torch.autograd.Function):
    """Runs a collective, or finishes one that was started; backward runs the adjoint."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, collective: Linear | StartedCollective, adjoint: Linear
    ) -> Tensor:
        """Run the collective, or finish the one that was started."""
        ctx.adjoint = adjoint
        if isinstance(collective, StartedCollective):
            return without_view(collective.finish())
        return without_view(collective.run(x, in_graph=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Run the adjoint, as a node of its own where a second derivative is wanted."""
        # `apply` and not `run`: under create_graph=True the adjoint gets a node of its own.
        return apply(ctx.adjoint, grads[0]), None, None


def without_view(result: Tensor) -> Tensor:
    """Return the result as no view: autograd forbids writes into views made in a Function."""
    if not result._is_view():
        return result
    whole: Tensor = torch.ops.aten._unsafe_view(result, result.shape)
    return whole


class StartedLinear:
    """A collective under way; its node in the graph is made when it is finished."""

    __slots__ = ("_adjoint", "_started", "_x")

    def __init__(self, collective: Linear, x: Tensor) -> None:
        # Planned first, so that a collective without a gradient says so before anything is sent.
        x = plain(x)
        self._adjoint = collective.adjoint() if needs_gradient(x) else None
        # Kept until the node is made: without it the graph would lose the input's history.
        self._x = x if self._adjoint is not None else None
        in_graph = self._adjoint is not None
        self._started = StartedCollective(collective.steps(x.detach()), in_graph=in_graph)

    def finish(self) -> Tensor:
        """Wait for it and return the result, in the graph in which the input was."""
        if self._adjoint is None:
            with torch.no_grad():
                finished: Tensor = self._started.finish()
            return finished
        # wait() may be called in another grad mode than the one that started the collective.
        with torch.enable_grad():
            result: Tensor = _Collective.apply(  # type: ignore[no-untyped-call]
                self._x, self._started, self._adjoint
            )
        return result


def no_gradient(name: str, op: str) -> Never:
    """Refuse a gradient of a reduction that is not linear."""
    raise CommArgumentError(
        f"{name} with op={op!r} has no gradient (only sum and avg have): pass x.detach(), or call "
        "it under torch.no_grad()"
    )
