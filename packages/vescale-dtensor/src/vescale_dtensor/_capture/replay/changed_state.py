"""Copies of all that a program changes, to go back to, and to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.local_use import leaf_gradient_of
from vescale_dtensor._capture.guard.free_tensors import has_gradient
from vescale_dtensor._capture.replay.program import Program
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import generator_states, set_generator_states


class ChangedState:
    """What a program writes to, gradients and random generators at one moment.

    Args:
        program: it.
        flat: the arguments of its call.
    """

    def __init__(self, program: Program, flat: list[Any]) -> None:
        self.tensors = [local_of(t) for t in program.written(flat)]
        self.values = [t.detach().clone() for t in self.tensors]
        self.generators = generator_states()
        self.own = [(one, one.get_state()) for one in program.generators]
        leaves = leaves_of(program, flat)
        self.states = [leaf_gradient_of(w) if isinstance(w, DTensor) else None for w in leaves]
        self.kinds = [None if s is None else (s.is_reduced, s.assigned) for s in self.states]
        self.leaves = [local_of(leaf) for leaf in leaves]
        self.gradients = [leaf.grad for leaf in self.leaves]
        # Nothing else changes gradients: else they are no memory of this check's.
        adds = program.has_gradients
        self.totals = [
            one.detach().clone() if adds and one is not None else one for one in self.gradients
        ]

    def put_back(self) -> None:
        """Make everything what it was. Counts no versions: autograd saw these values."""
        for tensor, value in zip(self.tensors, self.values, strict=True):
            _write(tensor, value)
        set_generator_states(self.generators)
        for generator, state in self.own:
            generator.set_state(state)
        rows = zip(self.leaves, self.gradients, self.totals, strict=True)
        for leaf, gradient, total in rows:
            if gradient is not None and total is not None and total is not gradient:
                if gradient._is_zerotensor():  # symbolic zeros, which cannot be written to
                    gradient = total
                else:
                    _write(gradient, total)
            if leaf.grad is not gradient:
                # The very tensor that was there: others may hold it.
                leaf.grad = gradient
        for accumulated, kind in zip(self.states, self.kinds, strict=True):
            if accumulated is not None and kind is not None:
                accumulated.restore(*kind)

    def difference(self, other: ChangedState) -> str | None:
        """What differs from another state, in words."""
        for index, (one, two) in enumerate(zip(self.values, other.values, strict=True)):
            if not same_values(one, two):
                return f"tensor {index} of those written to, {list(one.shape)}"
        for index, (mine, its) in enumerate(zip(self.totals, other.totals, strict=True)):
            if mine is not its and (mine is None or its is None or not same_values(mine, its)):
                return f"the gradient of leaf {index}, {list(self.leaves[index].shape)}"
        own = zip(self.own, other.own, strict=True)
        unlike = any(not torch.equal(one, two) for (_, one), (_, two) in own)
        if unlike or self.generators != other.generators:
            return "where the random generators stand afterwards"
        return None


def local_of(tensor: Tensor) -> Tensor:
    """The tensor in which this rank's values are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def has_hooks(tensor: Tensor) -> bool:
    """Whether functions of the user's run when a gradient comes to a tensor."""
    local: Any = local_of(tensor)
    return bool(local._backward_hooks or getattr(local, "_post_accumulate_grad_hooks", None))


def same_values(one: Tensor, two: Tensor) -> bool:
    """Bit for bit, but any NaN is any other."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    both_nan = (one != one) & (two != two)
    return bool(((one == two) | both_nan).all())


def _write(tensor: Tensor, value: Tensor) -> None:
    # Tensors of inference mode have no history to keep the write from.
    with torch.no_grad():
        (tensor if tensor.is_inference() else tensor.data).copy_(value)


def leaves_of(program: Program, flat: list[Any]) -> list[Tensor]:
    """The leaves whose gradients a call may add to: from outside, and among the arguments."""
    # Twice is one: the gradient is put back once.
    found = {id(t): t for t in program.free.leaves}
    found |= {id(t): t for t in flat if isinstance(t, Tensor) and has_gradient(t)}
    return list(found.values())
