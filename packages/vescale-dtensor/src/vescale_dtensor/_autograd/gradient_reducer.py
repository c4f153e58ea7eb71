"""Reduction of gradients: the total of one, and a user's reducer for many at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.grad_property import gradient
from vescale_dtensor._autograd.leaf_gradient import LeafGradient, Reducer
from vescale_dtensor._autograd.local_use import leaf_gradient_of
from vescale_dtensor._errors import DTensorError
from vescale_dtensor._tensor.dtensor import DTensor


class GradientReducer:
    """Hands the unreduced gradients of a list of parameters to one callback, all at once."""

    def __init__(self, leaves: Sequence[LeafGradient], callback: Reducer) -> None:
        self._leaves = list(leaves)
        self._callback = callback

    def reduce(self) -> None:
        """Reduce every gradient that has not been reduced. Collective.

        Raises:
            DTensorError: the callback returned another number of totals than it got gradients.
        """
        # Which are pending follows from the program: the same list on every rank. Most are not.
        open_ = [leaf for leaf in self._leaves if leaf.partial and not leaf.is_reduced]
        found = [(leaf, leaf.pending()) for leaf in open_]
        unreduced = [(leaf, pending) for leaf, pending in found if pending is not None]
        if not unreduced:
            return
        with torch.no_grad():
            totals = list(self._callback([pending for _, pending in unreduced]))
        if len(totals) != len(unreduced):
            raise DTensorError(
                f"a gradient reducer got {len(unreduced)} pending gradients and returned "
                f"{len(totals)}; it must return one total for each, in order"
            )
        # One call for all: there are hundreds.
        with torch.no_grad():
            torch._foreach_copy_([leaf.writable() for leaf, _ in unreduced], totals)
        for leaf, _ in unreduced:
            leaf.note_total()


def gradient_total(tensor: DTensor) -> DTensor | None:
    """The complete gradient of a parameter, reduced now if it is not yet. Collective."""
    if tensor._local_tensor.is_leaf and tensor._leaf_gradient is not None:
        tensor._leaf_gradient.reduce()
    return gradient(tensor)


def reduce_gradients(parameters: Iterable[Tensor]) -> None:
    """Complete the gradients of many parameters: `gradient_total` of each, at the cost of one.

    Collective, unless all are complete. A parameter without a gradient keeps none.
    """
    done: set[int] = set()
    last: Any = None
    for parameter in parameters:
        leaf: LeafGradient | None = getattr(parameter, "_leaf_gradient", None)
        # A reducer completes those of all its parameters, so one of them is asked. Mostly all have
        # one, to which there is one weak reference: no further call for each of them.
        if leaf is None or (last is not None and leaf._reducer is last):
            continue
        reducer = leaf.reducer
        if id(reducer) in done or not isinstance(parameter, DTensor):
            continue
        if reducer is not None:
            done.add(id(reducer))
            last = leaf._reducer
        if parameter._local_tensor.is_leaf:
            leaf.reduce()


def set_gradient_reducer(parameters: Iterable[Tensor], reducer: Reducer) -> None:
    """Reduce the gradients of these parameters together.

    When the total of one of them is first needed after a backward, `reducer` is called once, on
    every rank, with the `PendingGradient` of each parameter whose gradient is unreduced, in the
    order of `parameters`; it returns the summed local tensors in the same order.

    Args:
        parameters: leaf DTensors, the same on every rank and in the same order.
        reducer: communicates; called under no_grad.

    Raises:
        DTensorError: a parameter that is no leaf DTensor, or has a reducer already.
    """
    # All are checked before one is changed: an error leaves no parameter half registered.
    leaves = [_leaf_for_reducer(p) for p in parameters]
    reducer_of_all = GradientReducer(leaves, reducer)
    for leaf in leaves:
        leaf.reducer = reducer_of_all


def _leaf_for_reducer(parameter: Tensor) -> LeafGradient:
    """The gradient state of a parameter, or the error of `set_gradient_reducer`."""
    if not isinstance(parameter, DTensor) or not parameter._local_tensor.is_leaf:
        raise DTensorError(f"set_gradient_reducer: {parameter!r} is not a leaf DTensor")
    leaf = leaf_gradient_of(parameter)
    if leaf.reducer is not None:
        raise DTensorError(f"set_gradient_reducer: {parameter!r} has a reducer already")
    return leaf
