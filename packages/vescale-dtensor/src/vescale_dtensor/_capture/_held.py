"""Tensors that a program holds from outside: what they were like when it began, and still are.

States are taken when a recording first meets a tensor, before it changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from vescale_dtensor._convert import leaf_of
from vescale_dtensor._tensor import DTensor


def state_of(holder: Tensor) -> Any:
    """What is guarded of a tensor, or of a DTensor and its local tensor."""
    if isinstance(holder, DTensor):
        local = holder._local_tensor
        return holder._spec.itself, local.requires_grad, local.is_leaf, local.stride()
    return (
        holder.requires_grad,
        holder.is_leaf,
        holder.stride(),
        holder.dtype,
        holder.shape,
        holder.device,
    )


def gradient_state(holder: Tensor) -> Any:
    """What a program finds in a leaf: no gradient, or one of some type."""
    if not isinstance(holder, DTensor):
        return holder.grad is None
    if holder._local_tensor.grad is None:
        return None
    leaf = leaf_of(holder)
    return leaf.settled, leaf.partial


def has_gradient(holder: Tensor) -> bool:
    """Whether a tensor is a leaf that gets a gradient."""
    return holder.requires_grad and holder.is_leaf


class Held:
    """All tensors that a program holds, with their states when it began."""

    def __init__(self, states: Iterable[tuple[Tensor, Any, Any]], gradients: bool) -> None:
        rows = list(states)
        self.tensors = [holder for holder, _, _ in rows]
        self._wrappers = [h for h in self.tensors if isinstance(h, DTensor)]
        self._others = [h for h in self.tensors if not isinstance(h, DTensor)]
        wrapped = [state for holder, state, _ in rows if isinstance(holder, DTensor)]
        self._specs = [state[0] for state in wrapped]
        self._flags = [state[1:] for state in wrapped]
        self._states = [state for holder, state, _ in rows if not isinstance(holder, DTensor)]
        self.leaves = [holder for holder in self.tensors if has_gradient(holder)]
        leaves = [gradient for holder, _, gradient in rows if has_gradient(holder)]
        self._gradients = leaves if gradients else None

    def alike(self) -> bool:
        """Whether they still are as they were."""
        locals_ = [w._local_tensor for w in self._wrappers]
        return (
            [w._spec.itself for w in self._wrappers] == self._specs
            and [(t.requires_grad, t.is_leaf, t.stride()) for t in locals_] == self._flags
            and [state_of(t) for t in self._others] == self._states
            and (
                self._gradients is None
                or [gradient_state(t) for t in self.leaves] == self._gradients
            )
        )
