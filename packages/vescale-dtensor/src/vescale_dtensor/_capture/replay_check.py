"""`capture(check=True)`: runs the function beside each replay and compares everything.

Both must start from the same state, so what the program writes to, gradients and random generators
are restored in between. Where the two differ on any rank, every rank raises. The function and the
program communicate, so all ranks compare a call or none does: ranks vote, since one may have to
record what another can replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from vescale_comm import all_reduce, group_of
from vescale_comm.nested import tensors_within

from vescale_dtensor._autograd.local_use import leaf_gradient_of
from vescale_dtensor._capture.call_key import KeyedCall
from vescale_dtensor._capture.free_tensors import has_gradient
from vescale_dtensor._capture.live_calls import Kept
from vescale_dtensor._capture.program import Program
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import (
    generator_states,
    has_step_hooks,
    set_generator_states,
)


class SeenLayouts(TorchFunctionMode):
    """Notes the meshes of the DTensors that torch functions are called with in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Layout] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_within((args, kwargs or {})):
            if isinstance(tensor, DTensor):
                layout = tensor._spec.layout
                self.found.setdefault(id(layout.mesh), layout)
        return func(*args, **(kwargs or {}))


def in_order(found: Mapping[int, Layout]) -> list[Layout]:
    """One layout for each mesh, in an order that is the same on all ranks."""
    return sorted(found.values(), key=lambda one: (one.mesh.mesh.flatten().tolist(), str(one.mesh)))


def agreed(layouts: Sequence[Layout] | None, mine: bool) -> bool:
    """Whether all ranks say yes. Collective: every rank takes part for every mesh."""
    # Twice: a rank that is on two meshes tells those of the first what it learned on the second.
    for layout in [*(layouts or ()), *(layouts or ())]:
        group = group_of(layout.mesh, tuple(range(layout.mesh.ndim)))
        if group.size > 1:
            flag = torch.tensor(float(mine), device=layout.mesh.device_type)
            mine = bool(all_reduce(flag, group, op="min"))
    return mine


def compared(
    function: Callable[..., Any], program: Program, call: KeyedCall, layouts: Sequence[Layout]
) -> Any:
    """The result of a replay, after the function gave the same.

    Raises:
        CaptureError: the first output, tensor written to, gradient or generator that differs; or
            the call cannot be run twice.
    """
    _check_repeatable(program, call, layouts)
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
    _raise_together(found, layouts)
    return ours


def _check_repeatable(program: Program, call: KeyedCall, layouts: Sequence[Layout]) -> None:
    """Refuse what can be done once only. Collective: programs of ranks, and hooks, may differ.

    Raises:
        CaptureError: on every rank, if on one of them a backward inside goes on into the history of
            an argument, or an optimizer that is called again as it is has hooks.
    """
    found = _why_once(program, call)
    if not agreed(layouts, found is None):
        other = "another rank cannot run this call beside its replay: its error says why"
        raise CaptureError(f"capture(check=...): {found or other}")


def _why_once(program: Program, call: KeyedCall) -> str | None:
    """Why a call can be done once only, in words; None if it can be done again."""
    with_history = (isinstance(t, Tensor) and t.requires_grad and not t.is_leaf for t in call.flat)
    if program.differentiates and any(with_history):
        return (
            "the function calls backward() through the history of an argument, "
            "which can be done only once, so it cannot run beside the replay. Pass the argument "
            "detached, call backward() outside, or capture it without check"
        )
    owners = (owner for call in program.live for owner in (call.owner, *call.more))
    if any(isinstance(owner, Optimizer) and has_step_hooks(owner) for owner in owners):
        # What they change is the user's, anywhere, so it cannot be put back.
        return (
            "an optimizer that reads values (a step count in Python) has hooks "
            "around its step, which would run twice where the function runs beside the replay. "
            "Remove the hooks, make the optimizer fused, or capture it without check"
        )
    return None


class _State:
    """Copies of all that a program changes."""

    def __init__(self, program: Program, flat: list[Any]) -> None:
        self.tensors = [_local(t) for t in program.written(flat)]
        self.values = [t.detach().clone() for t in self.tensors]
        self.kept = Kept(program.live)
        self.generators = generator_states()
        leaves = _leaves(program, flat)
        self.states = [leaf_gradient_of(w) if isinstance(w, DTensor) else None for w in leaves]
        self.reduced = [state is not None and state.is_reduced for state in self.states]
        self.leaves = [_local(leaf) for leaf in leaves]
        self.gradients = [_gradient(leaf) for leaf in self.leaves]

    def put_back(self) -> None:
        """Make everything what it was. Counts no versions: autograd saw these values."""
        for tensor, value in zip(self.tensors, self.values, strict=True):
            # Tensors of inference mode have no history to keep the write from.
            (tensor if tensor.is_inference() else tensor.data).copy_(value)
        self.kept.put_back()
        set_generator_states(self.generators)
        rows = zip(self.leaves, self.states, self.reduced, self.gradients, strict=True)
        for leaf, state, reduced, gradient in rows:
            # A clone: what runs next accumulates in place, and this copy is compared afterwards.
            leaf.grad = None if gradient is None else gradient.clone()
            if state is not None:
                state.is_reduced = reduced
                state.hook_accumulation()  # the first run may have used it up

    def difference(self, other: _State) -> str | None:
        """What differs from another state, in words."""
        for index, (one, two) in enumerate(zip(self.values, other.values, strict=True)):
            if not _same(one, two):
                return f"tensor {index} of those written to"
        ours, theirs = self.kept.values, other.kept.values
        if len(ours) != len(theirs) or not all(map(_same, ours, theirs)):
            return "the state of an optimizer, a GradScaler or an average"
        for index, (mine, its) in enumerate(zip(self.gradients, other.gradients, strict=True)):
            if mine is not its and (mine is None or its is None or not _same(mine, its)):
                return f"the gradient of leaf {index}"
        if self.generators != other.generators:
            return "where the random generators stand afterwards"
        return None


def _leaves(program: Program, flat: list[Any]) -> list[Tensor]:
    """The leaves whose gradients a call may add to: from outside, and among the arguments."""
    # Twice is one: the gradient is put back once.
    found = {id(t): t for t in program.free.leaves}
    found |= {id(t): t for t in flat if isinstance(t, Tensor) and has_gradient(t)}
    # Those of a step whose backward is elsewhere.
    owners = [one for call in program.live for one in (call.owner, *call.more)]
    groups = [g for one in owners if isinstance(one, Optimizer) for g in one.param_groups]
    found |= {id(t): t for group in groups for t in group["params"] if has_gradient(t)}
    return list(found.values())


def _local(tensor: Tensor) -> Tensor:
    """The tensor in which this rank's values are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _gradient(local: Tensor) -> Tensor | None:
    """A copy of the gradient of a leaf; None if it has none."""
    return None if local.grad is None else local.grad.detach().clone()


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


def _raise_together(found: str | None, layouts: Sequence[Layout]) -> None:
    """Raise on every rank, if a rank found a difference. Collective."""
    if not agreed(layouts, found is None):
        raise CaptureError(
            f"capture(check=True): the replay differs from the function in "
            f"{found or 'something that another rank holds'}. The function depends on Python state "
            "that guards do not see: make it an argument, or keep it out of the captured function"
        )
