"""Tensors from outside that a program uses: their state when recording began, guarded from then on.

The state is taken when a recording first meets a tensor, before the program changes anything.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.local_use import leaf_gradient_of
from vescale_dtensor._tensor.dtensor import DTensor


def state_of(holder: Tensor) -> Any:
    """What is guarded of a tensor, or of a DTensor and its local tensor."""
    if isinstance(holder, DTensor):
        local = holder._local_tensor
        # The base: a cached total gives a wrapper a twin spec, and changes nothing of the tensor.
        return holder._spec.base, local.requires_grad, local.stride()
    return (
        holder.requires_grad,
        holder.is_leaf,
        # Sparse tensors have no strides, and raise when asked.
        holder.stride() if holder.layout is torch.strided else holder.layout,
        holder.dtype,
        holder.shape,
        holder.device,
    )


def gradient_state(holder: Any) -> Any:
    """What a program finds in a leaf: no gradient, or one of some type."""
    if type(holder) is not DTensor:
        return holder.grad is None
    # Of the local tensor: asking a wrapper for its gradient may communicate.
    if holder._local_tensor.grad is None:
        return None
    # Whether it is a total and on which axes it is partial decides what an accumulation and a read
    # have to do.
    leaf = leaf_gradient_of(holder)
    return leaf.is_reduced, leaf.partial


def has_gradient(holder: Tensor) -> bool:
    """Whether a tensor is a leaf that gets a gradient."""
    return holder.requires_grad and holder.is_leaf


class FreeTensors:
    """The free tensors of a program, with their states when it began.

    Args:
        states: the tensors, and what `state_of` and `gradient_state` found.
        gradients: whether gradients matter to the program.
        forgotten: leaves whose gradients it drops before it looks at any.
    """

    def __init__(
        self,
        states: Iterable[tuple[Tensor, Any, Any]],
        gradients: bool,
        forgotten: Container[Any],
    ) -> None:
        rows = list(states)
        wrapped = [row for row in rows if isinstance(row[0], DTensor)]
        plain = [row for row in rows if not isinstance(row[0], DTensor)]
        self.wrappers: list[Any] = [holder for holder, _, _ in wrapped]
        self.others = [holder for holder, _, _ in plain]
        self._specs, self._flags, self._strides = (
            [state[i] for _, state, _ in wrapped] for i in range(3)
        )
        self._locals: list[Tensor] = []
        self._states = [state for _, state, _ in plain]
        self.leaves = [holder for holder, _, _ in rows if has_gradient(holder)]
        kept = [(holder, found) for holder, _, found in rows if has_gradient(holder)]
        # What the program drops first is not compared: it may be there or not.
        kept = [row for row in kept if getattr(row[0], "_leaf_gradient", None) not in forgotten]
        self._kept = [holder for holder, _ in kept]
        self._gradients = [gradient for _, gradient in kept] if gradients else None

    def matching_locals(self) -> list[Tensor] | None:
        """The local tensors of the wrappers, or None if anything is not as it was."""
        wrappers = self.wrappers
        locals_: list[Tensor] = [w._local_tensor for w in wrappers]
        if (
            # Specs are interned, so equal ones are one object and this compares pointers.
            [w._spec.base for w in wrappers] != self._specs
            or [t.requires_grad for t in locals_] != self._flags
            or not self._same_strides(locals_)
            or (self.others and [state_of(t) for t in self.others] != self._states)
            # Only where the recording looked at gradients: else they come and go with each step.
            or (self._gradients is not None and not self._same_gradients())
        ):
            return None
        return locals_

    def _same_strides(self, locals_: list[Tensor]) -> bool:
        """Whether strides are the same, of tensors that are not the very same as last time."""
        # A step in place keeps the local tensors; `.data = ` and some optimizers replace them.
        last = self._locals
        if len(last) == len(locals_) and all(map(is_, locals_, last)):
            return True
        if [t.stride() for t in locals_] != self._strides:
            return False
        # Held, so that identity with them means something at the next call.
        self._locals = locals_
        return True

    def _same_gradients(self) -> bool:
        """Whether each leaf has a gradient of the type that the recording found."""
        return [gradient_state(t) for t in self._kept] == self._gradients
