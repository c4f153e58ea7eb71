"""The tensors from outside that code can get at, and their states, which are guarded.

A tensor that a recording uses was made by one of its steps or is one of these. Any other was made
where the recorder could not see it, and a replay would silently use its old values: refused. Of
those that a program uses the state is taken when the recording first meets them, before anything
changes. Of the others Python code may ask for a shape, or whether there is a gradient (also of
arguments), and branch on it: no step shows that, so they are guarded as well.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.local_use import leaf_gradient_of
from vescale_dtensor._capture.guard.call_key import KeyedCall
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


class OutsideTensors:
    """The tensors that a recording met from outside; they stay alive as long as it runs."""

    def __init__(self) -> None:
        # By id, with the tensor held: DTensors compare by element, and a freed id could come again.
        self._known: dict[int, Tensor] = {}
        self._wrappers: dict[int, DTensor] = {}

    def add(self, tensor: Tensor) -> None:
        """Take in a tensor, and the local tensor that it wraps."""
        self._known[id(tensor)] = tensor
        if isinstance(tensor, DTensor):
            local = tensor._local_tensor
            self._known[id(local)] = local
            # The first one met, until a call shows which one the function uses.
            self._wrappers.setdefault(id(local), tensor)

    def holders(self) -> list[Tensor]:
        """All tensors as code has them: DTensors, not their local tensors."""
        locals_ = {id(t._local_tensor) for t in self._known.values() if isinstance(t, DTensor)}
        return [t for t in self._known.values() if id(t) not in locals_]

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def prefer(self, wrapper: DTensor) -> None:
        """Take this wrapper for its local tensor, where there are several."""
        if wrapper in self:
            self._wrappers[id(wrapper._local_tensor)] = wrapper

    def wrapper_of(self, local: Tensor) -> DTensor | None:
        """The DTensor that has this local tensor."""
        # The wrapper may have been given another local tensor since.
        wrapper = self._wrappers.get(id(local))
        return wrapper if wrapper is not None and wrapper._local_tensor is local else None


class ArgumentTensors:
    """The tensors among the arguments of a call, before the function ran.

    Args:
        call: it.
    """

    def __init__(self, call: KeyedCall) -> None:
        self.flat = call.flat
        self.places = [i for i, value in enumerate(call.flat) if isinstance(value, Tensor)]
        self.gradients = [_gradient_state(call.flat[i]) for i in self.places]


class Outsiders:
    """What code could ask of tensors from outside, and of arguments.

    Args:
        tensors: those from outside.
        gradients: whether code asked for any.
        given: the arguments of the call.
    """

    def __init__(self, tensors: OutsideTensors, gradients: bool, given: ArgumentTensors) -> None:
        # Held, so that no other tensor gets the address of one.
        self._others = tensors.holders()
        self._met = {id(tensor): tensor for tensor in self._others}
        self._places = given.places
        self._identities = [self._met.get(id(given.flat[i])) for i in given.places]
        self._gradients = gradients
        self._leaves = list(zip(given.places, given.gradients, strict=True)) if gradients else []
        self._states: list[Any] = []
        self._unused = FreeTensors((), gradients=False, forgotten=())

    def leave_to(self, free: Iterable[Tensor]) -> None:
        """Leave these tensors to `FreeTensors`: those that a step of the finished program uses."""
        # Not those of the recording: a step whose result decides a branch is dead code afterwards.
        used = set(map(id, free))
        self._others = [tensor for tensor in self._others if id(tensor) not in used]
        # After the run: what the function itself changed of a tensor was a step that used it.
        rows = [(one, state_of(one), None) for one in self._others]
        # Compared as those are that the program uses: without a call for each.
        self._unused = FreeTensors(rows, gradients=False, forgotten=())
        if self._gradients:
            self._states = [_gradient_state(tensor) for tensor in self._others]

    def hold(self, call: KeyedCall) -> bool:
        """Whether all of it is as it was, for a call."""
        met, flat = self._met, call.flat
        return (
            all(map(is_, map(met.get, map(id, [flat[i] for i in self._places])), self._identities))
            and self._unused.matching_locals() is not None
            and (not self._gradients or self._same_gradients(flat))
        )

    def _same_gradients(self, flat: list[Any]) -> bool:
        """Whether the leaves that have a gradient are the same."""
        others = [_gradient_state(tensor) for tensor in self._others]
        return others == self._states and all(
            _gradient_state(flat[i]) == state for i, state in self._leaves
        )


def _gradient_state(tensor: Tensor) -> Any:
    """Whether a leaf has a gradient; None of what is no leaf, and warns when asked."""
    # Of the local tensor: asking a wrapper for its gradient may communicate.
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return (local.grad is None) if local.is_leaf else None
