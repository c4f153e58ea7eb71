"""`capture(check=True)`: runs the function beside each replay and compares everything.

Both must start from the same state, so what the program writes to, gradients and random generators
are restored in between. Where the two differ on any rank, every rank raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from vescale_comm import all_reduce, group_of

from vescale_dtensor._autograd.local_use import leaf_gradient_of
from vescale_dtensor._capture.call_key import KeyedCall
from vescale_dtensor._capture.program import Program
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import generator_states, set_generator_states


def compared(function: Callable[..., Any], program: Program, call: KeyedCall) -> Any:
    """The result of a replay, after the function gave the same.

    Raises:
        CaptureError: the first output, tensor written to, gradient or generator that differs.
    """
    # The program first: if the function ran first, it might repair the state that the guards
    # missed.
    state = _State(program, call.flat)
    ours = program.replay(call.flat)
    after = _State(program, call.flat)
    # So that the function starts where the program started, and draws the same numbers.
    state.put_back()
    theirs = function(*call.args, **call.kwargs)
    expected = _State(program, call.flat)
    # The caller gets the results of the program, so the state has to be that of the program.
    after.put_back()
    found = _difference(ours, theirs) or after.difference(expected)
    _raise_together(found, program, call)
    return ours


class _State:
    """Copies of all that a program changes."""

    def __init__(self, program: Program, flat: list[Any]) -> None:
        self.tensors = [_local(t) for t in program.written(flat)]
        self.values = [t.detach().clone() for t in self.tensors]
        self.generators = generator_states()
        self.leaves = [leaf_gradient_of(w) for w in program.free.leaves if isinstance(w, DTensor)]
        self.reduced = [leaf.is_reduced for leaf in self.leaves]
        self.gradients = [_gradient(leaf.local()) for leaf in self.leaves]

    def put_back(self) -> None:
        """Make everything what it was. Counts no versions: autograd saw these values."""
        for tensor, value in zip(self.tensors, self.values, strict=True):
            tensor.data.copy_(value)
        set_generator_states(self.generators)
        rows = zip(self.leaves, self.reduced, self.gradients, strict=True)
        for leaf, reduced, gradient in rows:
            local = leaf.local()
            leaf.is_reduced = reduced
            if local is not None:
                # A clone: what runs next accumulates in place, and this copy is compared
                # afterwards.
                local.grad = None if gradient is None else gradient.clone()
            leaf.hook_accumulation()  # the first run may have used it up

    def difference(self, other: _State) -> str | None:
        """What differs from another state, in words."""
        for index, (one, two) in enumerate(zip(self.values, other.values, strict=True)):
            if not _same(one, two):
                return f"tensor {index} of those written to"
        for index, (mine, its) in enumerate(zip(self.gradients, other.gradients, strict=True)):
            if mine is not its and (mine is None or its is None or not _same(mine, its)):
                return f"the gradient of parameter {index}"
        if self.generators != other.generators:
            return "where the random generators stand afterwards"
        return None


def _local(tensor: Tensor) -> Tensor:
    """The tensor in which this rank's values are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _gradient(local: Tensor | None) -> Tensor | None:
    """A copy of the gradient of a leaf; None if it has none."""
    return None if local is None or local.grad is None else local.grad.detach().clone()


def _difference(ours: Any, theirs: Any) -> str | None:
    """The first output that differs, in words."""
    (mine, form), (others, other_form) = tree_flatten(ours), tree_flatten(theirs)
    if form != other_form:
        return f"the form of the outputs ({form} where the function gives {other_form})"
    for index, (one, two) in enumerate(zip(mine, others, strict=True)):
        what = f"output {index}" if len(mine) > 1 else "the output"
        if isinstance(one, DTensor) and isinstance(two, DTensor) and one._spec is not two._spec:
            return f"{what} ({one!r} where the function gives {two!r})"
        if type(one) is not type(two):
            return f"{what} (a {type(one).__name__}, not a {type(two).__name__})"
        if isinstance(one, Tensor):
            if not _same(_local(one).detach(), _local(two).detach()):
                return f"{what}, {one if isinstance(one, DTensor) else list(one.shape)}"
        elif one is not two and one != two:
            return f"{what} ({one!r} where the function gives {two!r})"
    return None


def _same(one: Tensor, two: Tensor) -> bool:
    """Bit for bit, but any NaN is any other."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    both_nan = (one != one) & (two != two)
    return bool(((one == two) | both_nan).all())


def _raise_together(found: str | None, program: Program, call: KeyedCall) -> None:
    """Raise on every rank, if a rank found a difference. Collective."""
    anywhere = found is not None
    # Every rank takes part for every mesh, whatever it found, or the others would wait.
    for layout in program.layouts():
        group = group_of(layout.mesh, tuple(range(layout.mesh.ndim)))
        if group.size > 1:
            flag = torch.tensor(float(anywhere), device=layout.mesh.device_type)
            anywhere = bool(all_reduce(flag, group, op="max"))
    if anywhere:
        raise CaptureError(
            f"capture(check=True): the replay differs from the function in "
            f"{found or 'something that another rank holds'}. The function depends on Python state "
            "that guards do not see: make it an argument, or keep it out of the captured function"
        )
