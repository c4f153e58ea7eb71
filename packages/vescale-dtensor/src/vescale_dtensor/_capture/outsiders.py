"""What code could ask of tensors that are no arguments of a program, and of arguments.

Python code may branch on the shape of a tensor that no step uses, on `x.grad is None` of an
argument; and an argument may be a tensor that the function has from outside as well, which the
program then reads from the argument. No step of a program shows that.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

from torch import Tensor

from vescale_dtensor._capture.call_key import KeyedCall
from vescale_dtensor._capture.free_tensors import FreeTensors, state_of
from vescale_dtensor._capture.outside import OutsideTensors
from vescale_dtensor._tensor.dtensor import DTensor


class Given:
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

    def __init__(self, tensors: OutsideTensors, gradients: bool, given: Given) -> None:
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
