"""Compares replays with the function: `capture(check=...)`.

In a compared call the program runs, then the function, from the same state: what the program writes
to, gradients and random generators are put back in between. The call gives what the function gives,
which ran last, so all is as after one run. Where the two differ on any rank, every rank raises. The
function and the program communicate, so all ranks compare a call or none does: ranks vote, since
one may have to record what another can replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from vescale_comm import group_of
from vescale_comm.agreement import gather_texts
from vescale_comm.nested import tensors_within

from vescale_dtensor._capture.guard.call_key import KeyedCall
from vescale_dtensor._capture.guard.equality import same
from vescale_dtensor._capture.guard.records import flatten, is_record
from vescale_dtensor._capture.nesting import run_uncompared, running_inside
from vescale_dtensor._capture.record.outputs import drop_lineage
from vescale_dtensor._capture.record.wrapper_snapshot import WrapperSnapshot
from vescale_dtensor._capture.replay.changed_state import (
    ChangedState,
    has_hooks,
    leaves_of,
    local_of,
    same_values,
)
from vescale_dtensor._capture.replay.histories import Ends, GradientCheck, History, history_of
from vescale_dtensor._capture.replay.program import Program
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import no_torch_function

Check = bool | Literal["sampled"] | None

# Early calls are compared often, since what guards do not see mostly shows at once; then rarely.
_RARELY = 1024
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_ADVICE = (
    "The function depends on something that guards do not see, and that is not what it was when "
    "the program was recorded. Make it an argument, a tensor that is written in place, or an "
    "attribute of a module, or keep it out of the captured function; check=None compares nothing"
)


@dataclass(frozen=True)
class ReplayCheck:
    """Which calls are compared with the function, and how.

    Attributes:
        every: all of them; else calls 2, 4, 8 ... 1,024, and then every 1,024th.
        required: whether a call that cannot run twice is an error; else it is left uncompared.
        turn: which one of several functions that are called one after the other: it is compared so
            many calls later, and so no two of them at once.
        gradients: whether gradients are compared as well, for the cotangents that arrive; None:
            never. It is asked when the call is made.
    """

    every: bool = False
    required: bool = False
    turn: int = 0
    gradients: Callable[[], bool] | None = None

    def next_after(self, calls: int) -> int:
        """Return the number of the next call that is compared, after so many."""
        if self.every:
            return calls + 1
        turn, start = self.turn % (_RARELY // 2), 2
        # A turn that would come after the next start waits for a longer round.
        while start <= turn or start + turn <= calls:
            start += min(start, _RARELY)
        return start + turn


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
    return _told(layouts, "" if mine else "no") == ""


def _told(layouts: Iterable[Layout] | None, mine: str) -> str:
    """What one of the ranks has to say; "" if none has. Collective, as `agreed` is."""
    meshes = [layout.mesh for layout in layouts or ()]
    # Twice: a rank that is on two meshes tells those of the first what it learned on the second.
    for mesh in [*meshes, *meshes] if len(meshes) > 1 else meshes:
        group = group_of(mesh, tuple(range(mesh.ndim)))
        with no_torch_function():  # no part of a program that a mode records
            said = gather_texts(mine, group)
        others = zip(said, group.ranks, strict=True)
        mine = mine or next((_of_rank(text, rank) for text, rank in others if text), "")
    return mine


def _of_rank(text: str, rank: int) -> str:
    return text if text.endswith(")") and "(on rank " in text else f"{text} (on rank {rank})"


def why_once(program: Program, call: KeyedCall) -> str | None:
    """Why a call can be done once only, in words; None if it can be done again."""
    with_history = (isinstance(t, Tensor) and t.requires_grad and not t.is_leaf for t in call.flat)
    if program.differentiates and any(with_history):
        return (
            "the function calls backward() through the history of an argument, "
            "which can be done only once, so it cannot run beside the replay. Pass the argument "
            "detached, call backward() outside, or capture it with check=None"
        )
    if program.differentiates and any(map(has_hooks, leaves_of(program, call.flat))):
        return (
            "the function calls backward(), and gradients of parameters have hooks, which would "
            "run twice where the function runs beside the replay. Remove the hooks, call "
            "backward() outside, or capture it with check=None"
        )
    if program.carries_history:
        return (
            "the function writes to an argument and gives it an autograd history, which would be "
            "given twice where the function runs beside the replay. Return a new tensor, or "
            "capture it with check=None"
        )
    return None


def require_repeatable(why: str | None, layouts: Sequence[Layout]) -> None:
    """Refuse what can be done once only. Collective: programs of ranks, and hooks, may differ.

    Raises:
        CaptureError: on every rank, if one of them has a reason.
    """
    told = _told(layouts, why or "")
    if told:
        raise CaptureError(f"capture(check=...): {told}")


def keeps_casts(program: Program, call: KeyedCall) -> bool:
    """Whether autocast keeps casts of leaves, whose nodes other calls of its region share."""
    given = [*leaves_of(program, call.flat), *call.flat]
    kinds = {local_of(one).device.type for one in given if isinstance(one, Tensor)}
    return torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, kinds))


@dataclass(frozen=True)
class Comparison:
    """One call whose replay is compared.

    Attributes:
        name: of the function, for messages.
        function: it.
        program: what stands for the call.
        call: it.
        layouts: of every mesh whose ranks make the call.
        check: how it is compared.
        unsteady: called with what differs from run to run of the program itself, in words.
    """

    name: str
    function: Callable[..., Any]
    program: Program
    call: KeyedCall
    layouts: Sequence[Layout]
    check: ReplayCheck
    unsteady: Callable[[str], None]

    def run(self, locals_: list[Tensor]) -> Any:
        """The result of the function, after the replay gave the same.

        Raises:
            CaptureError: the first output, tensor written to, gradient or generator that differs,
                on every rank.
        """
        flat, program = self.call.flat, self.program
        # Hooks of gradients may differ from rank to rank.
        asked = self.check.gradients is not None
        gradients = asked and agreed(self.layouts, self._compares_gradients())
        ends = Ends(flat, program.free.leaves)
        before = ChangedState(program, flat)
        # The program first: if the function ran first, it might repair the state that the guards
        # missed.
        ours, history = self._replay(locals_, ends, gradients)
        after = ChangedState(program, flat)
        # So that the function starts where the program started, and draws the same numbers.
        before.put_back()
        versions = self._versions()
        theirs = self._function()
        used = history_of(theirs, ends)
        found = (
            _difference(ours, theirs)
            or after.difference(ChangedState(program, flat))
            or self._unseen_writes(versions)
            or history.difference(used)
        )

        def repeats() -> bool:
            expected = ChangedState(program, flat)
            before.put_back()
            again, _ = self._replay(locals_, ends, False)
            unlike = _difference(ours, again) or after.difference(ChangedState(program, flat))
            expected.put_back()
            return unlike is None

        self._finish(found, repeats)
        followed = history.known and used.known and bool(history.roots)
        # Backward votes: a rank whose local part has no history would not come.
        if gradients and agreed(self.layouts, followed):
            GradientCheck(history, self._finish, self._is_watched).watch(used)
        return theirs

    def _compares_gradients(self) -> bool:
        asked = self.check.gradients
        # An outer checkpoint takes each saved tensor, and counts them.
        return (
            asked is not None
            and torch.is_grad_enabled()
            and not self.program.differentiates
            and not any(one.requires_grad for one in self.program.written(self.call.flat))
            and not self._is_watched()
            and not keeps_casts(self.program, self.call)
            and asked()
        )

    def _is_watched(self) -> bool:
        """Whether somebody else sees gradients at the ends of the graph, and would twice."""
        given = [one for one in self.call.flat if isinstance(one, Tensor)]
        ends = [*leaves_of(self.program, self.call.flat), *given]
        return any(local_of(one).retains_grad or has_hooks(one) for one in ends)

    def _replay(self, locals_: list[Tensor], ends: Ends, keeps: bool) -> tuple[Any, History]:
        """Run the program, and follow its graph; `keeps`: what backward needs is kept, too."""
        hooks: AbstractContextManager[Any] = nullcontext()
        if not keeps and not self.program.differentiates:
            # Also unseen by hooks around the call: an outer checkpoint counts what it is given.
            hooks = saved_tensors_hooks(_forget, _forgotten)
        with running_inside(), hooks:
            outputs = self.program.replay(self.call.flat, locals_, apart=keeps)
        return outputs, history_of(outputs, ends)

    def _function(self) -> Any:
        """Run the function, which leaves what a recording leaves."""
        call = self.call
        with WrapperSnapshot() as wrappers:
            for value in call.flat:
                if isinstance(value, DTensor):
                    wrappers.add_argument(value)
            for wrapper in self.program.free.wrappers:
                wrappers.add_free_tensor(wrapper)
            outputs = run_uncompared(self.function, call.args, call.kwargs)
        drop_lineage(outputs, call.flat)
        return outputs

    def _versions(self) -> list[tuple[Tensor, int]]:
        """What the program reads and does not write to, with how often it was written to."""
        given = [*self.program.free.wrappers, *self.program.free.others, *self.call.flat]
        written = {id(one) for one in self.program.written(self.call.flat)}
        locals_ = [
            local_of(one) for one in given if isinstance(one, Tensor) and id(one) not in written
        ]
        # Views of what is written have its counter.
        own = {storage_of(local_of(one)) for one in self.program.written(self.call.flat)}
        return [
            (one, one._version)
            for one in locals_
            if not one.is_inference() and storage_of(one) not in own
        ]

    def _unseen_writes(self, versions: list[tuple[Tensor, int]]) -> str | None:
        for tensor, version in versions:
            if tensor._version != version:
                return f"a write to a tensor {list(tensor.shape)}, which the replay does not make"
        return None

    def _finish(self, found: str | None, repeats: Callable[[], bool]) -> None:
        """Raise on every rank, if a rank found a difference. Collective.

        Kernels that add in no fixed order give other bits in each run: a program that does not
        repeat itself says nothing of the function.
        """
        told = _told(self.layouts, found or "")
        if not told:
            return
        steady = repeats()
        lasting = _told(self.layouts, found if found is not None and steady else "")
        if lasting:
            raise CaptureError(
                f"capture: the replay of {self.name} differs from the function in {lasting}. "
                f"{_ADVICE}"
            )
        self.unsteady(
            f"{told}: the program itself gives other bits in each run, as kernels do that add in "
            "no fixed order"
        )


def storage_of(tensor: Tensor) -> int:
    """The address of a tensor's memory; of an empty one, of it itself."""
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _forget(_: Tensor) -> None:
    return None


def _forgotten(_: None) -> Tensor:
    raise AssertionError("no backward is run of a replay that is only compared")


def _difference(ours: Any, theirs: Any) -> str | None:
    """The first output that differs, in words."""
    (mine, form), (others, other_form) = flatten(ours), flatten(theirs)
    if form != other_form:
        return f"the form of the outputs ({form} where the function gives {other_form})"
    for index, (one, two) in enumerate(zip(mine, others, strict=True)):
        what = f"output {index}" if len(mine) > 1 else "the output"
        if isinstance(one, DTensor) and isinstance(two, DTensor) and one._spec is not two._spec:
            return f"{what} ({one!r} where the function gives {two!r})"
        if type(one) is not type(two):
            return f"{what} (a {type(one).__name__}, not a {type(two).__name__})"
        if isinstance(one, Tensor):
            if not same_values(local_of(one).detach(), local_of(two).detach()):
                return f"{what}, {one if isinstance(one, DTensor) else list(one.shape)}"
            if one.requires_grad != two.requires_grad:
                return f"{what}, which requires a gradient in one of them only"
        elif isinstance(one, _PLAIN) and not is_record(one) and not same(one, two):
            return f"{what} ({one!r} where the function gives {two!r})"
    return None
