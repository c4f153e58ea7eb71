"""Reduction of gradients: the total of one, and a user's reducer for many at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from vescale_dtensor._autograd.grad_property import gradient
from vescale_dtensor._autograd.leaf_gradient import LeafGradient, Reducer
from vescale_dtensor._autograd.local_use import leaf_gradient_of
from vescale_dtensor._errors import DTensorError
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.lineage import pause
from vescale_dtensor._torch.compat import dispatch_modes, in_backward


class GradientReducer:
    """Hands the unreduced gradients of a list of parameters to one callback, all at once.

    Args:
        leaves: their gradient states.
        callback: communicates.
        owned: whether totals are the callers', so that they may become `.grad` as they are.
    """

    def __init__(
        self, leaves: Sequence[LeafGradient], callback: Reducer, owned: bool = False
    ) -> None:
        self._leaves = list(leaves)
        self._callback = callback
        self._owned = owned

    def reduce(self, *, replaces: bool = False) -> None:
        """Reduce every gradient that has not been reduced. Collective.

        Args:
            replaces: whether a total may become `.grad` in place of the tensor that is there now.
                Nobody may have read that one and go on with it, as steps of a program do.

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
        found_leaves = [leaf for leaf, _ in unreduced]
        # All or none: totals are parts of few buffers, and one that is kept keeps its buffer.
        if (
            replaces
            and self._owned
            and not torch.is_inference_mode_enabled()  # a backward could not add to such a total
            and all(map(_can_be_replaced, found_leaves, totals))
        ):
            for leaf, total in zip(found_leaves, totals, strict=True):
                # `data`: no view, which would share its count of writes with the rest of a buffer.
                leaf.local.grad = total.data
                leaf.note_total()
            return
        # One call for all: there are hundreds.
        with torch.no_grad():
            torch._foreach_copy_([leaf.writable() for leaf in found_leaves], totals)
        for leaf in found_leaves:
            leaf.note_total()


def _can_be_replaced(leaf: LeafGradient, total: Tensor) -> bool:
    """Whether a total can be `.grad`: it is as what is there, and nobody has looked at that.

    Who has may hold it, and its memory is to hold the total then.
    """
    grad = leaf.local.grad
    assert grad is not None
    seen = leaf.described is not None or leaf.views is not None or leaf.copied
    return (
        not (seen or leaf.kept is not None or leaf.assigned is not None or grad.requires_grad)
        and (grad.dtype, grad.device, grad.shape) == (total.dtype, total.device, total.shape)
        # Strides of contiguous ones differ where a size is 1, and mean nothing there.
        and (grad.stride() == total.stride() or (grad.is_contiguous() and total.is_contiguous()))
        and type(grad) is type(total) is Tensor
    )


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
        if not parameter._local_tensor.is_leaf:
            continue
        if isinstance(reducer, GradientReducer) and is_plain_eager():
            reducer.reduce(replaces=True)
        else:
            leaf.reduce()


def is_plain_eager() -> bool:
    """Whether what runs is nobody's record: tensors may be replaced, and need not be written to.

    Not so in a recording, a part of one that its modes do not see, or what other ranks may replay:
    a program reads `.grad` in one step and uses it in later ones. Nor in a backward, which may run
    in a thread that knows of no recording.
    """
    return not (
        pause.depth
        or has_torch_function_unary(None)
        or dispatch_modes()
        or in_backward()
        or torch.compiler.is_compiling()
    )


def set_gradient_reducer(
    parameters: Iterable[Tensor], reducer: Reducer, *, owned: bool = False
) -> None:
    """Reduce the gradients of these parameters together.

    When the total of one of them is first needed after a backward, `reducer` is called once, on
    every rank, with the `PendingGradient` of each parameter whose gradient is unreduced, in the
    order of `parameters`; it returns the summed local tensors in the same order.

    Args:
        parameters: leaf DTensors, the same on every rank and in the same order.
        reducer: communicates; called under no_grad.
        owned: whether `reducer` keeps no totals and no memory of them. Then they become `.grad` as
            they are where nobody has looked at it, without a copy. Gradients that are views of one
            buffer keep it alive together: a single one that is kept keeps its buffer.

    Raises:
        DTensorError: a parameter that is no leaf DTensor, or has a reducer already.
    """
    # All are checked before one is changed: an error leaves no parameter half registered.
    leaves = [_leaf_for_reducer(p) for p in parameters]
    reducer_of_all = GradientReducer(leaves, reducer, owned)
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
