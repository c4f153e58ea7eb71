"""Collectives as linear maps: each knows its adjoint, and that is all that autograd needs."""

from abc import ABC, abstractmethod
from typing import Any, Never

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from vescale_comm._errors import CommArgumentError


class Linear(ABC):
    """A collective of one tensor, planned: immutable, printable, not yet run.

    Taken over all members at once, a summing or moving collective is a linear map from the tuple of
    inputs to the tuple of outputs. Its gradient is the adjoint map, which is again a collective; so
    gradients of gradients need nothing more.
    """

    __slots__ = ()

    @abstractmethod
    def run(self, x: Tensor) -> Tensor:
        """Communicates. Leaves `x` as it is and returns a new tensor."""

    @abstractmethod
    def adjoint(self) -> "Linear":
        """Returns the collective that carries gradients the other way."""


def apply(collective: Linear, x: Tensor) -> Tensor:
    """Runs a collective, with a node in the autograd graph only where one is needed.

    A torch function mode sees it as one function of constant and tensor, as it sees torch's own.
    """
    if has_torch_function_unary(None):  # asked of no tensor: only a mode answers
        seen: Tensor = handle_torch_function(apply, (), collective, x)
        return seen
    if x.requires_grad and torch.is_grad_enabled():
        result: Tensor = _Collective.apply(x, collective)  # type: ignore[no-untyped-call]
        return result
    return collective.run(x)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Linear) -> Tensor:
        # Planned here, so that a collective without a gradient says so now and not in backward.
        ctx.adjoint = collective.adjoint()
        return collective.run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return apply(ctx.adjoint, grads[0]), None


def no_gradient(name: str, op: str) -> Never:
    """Refuses a gradient of a reduction that is not linear."""
    raise CommArgumentError(
        f"{name} with op={op!r} has no gradient (only sum and avg have): pass x.detach(), or call "
        "it under torch.no_grad()"
    )
