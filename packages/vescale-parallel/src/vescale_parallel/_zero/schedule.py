"""Gathers, swaps and releases units: the only place with hooks of modules and nodes.

Forward, per unit: gather, swap in, run, swap out, release. Backward, per unit: gather and swap in
as soon as it is reached (a recomputation inside of it looks for the parameters in the modules), and
when its node has reduced the gradients, swap out and release. What is gathered ahead follows the
order of the last forward. No decision here depends on values, so all ranks gather alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any, Final

import torch
from torch import Tensor, nn
from vescale_comm.nested import named_tensors_within
from vescale_dtensor import untraced
from vescale_dtensor.storage import before_backward, keep_alive

from vescale_parallel._common.interrupts import is_running
from vescale_parallel._common.optimizer_hooks import watch_steps
from vescale_parallel._common.pickle_refusal import NotPickled
from vescale_parallel._common.torch_compat import in_backward
from vescale_parallel._errors import ParallelError
from vescale_parallel._zero.addresses import Addresses
from vescale_parallel._zero.end_of_backward import EndOfBackward
from vescale_parallel._zero.flat_buffer import FlatBuffer
from vescale_parallel._zero.gather_log import GatherLog
from vescale_parallel._zero.joint_gathers import start_together
from vescale_parallel._zero.joint_reductions import SumsTogether
from vescale_parallel._zero.saved_tensors import SavedTensors
from vescale_parallel._zero.steps import Steps
from vescale_parallel._zero.unit import Unit

_SCHEDULE: Final = "_vescale_zero_schedule"
"""The attribute of the model that holds its schedule, and is copied with it."""


class Schedule:
    """The units of a model, and what is under way.

    Attributes:
        units: the root first.
        root: the unit of the model itself.
        ahead: how many units are gathered ahead.
        joins: whether forward gathers small units together, and so more of them ahead.
        reduce_ahead: of how many units gradients are reduced while others compute.
        sums: what reduces gradients of small units together; None: each goes by itself.
        log: of gathers and reductions.
        is_alike: whether all ranks have these units; of a model in stages each has its own.
        order: the units as the last forward of the root ran them.
    """

    def __init__(
        self,
        units: list[Unit],
        ahead: int,
        log: GatherLog,
        *,
        joins: bool = False,
        reduce_ahead: int = 0,
        sums_together: bool = False,
        is_alike: bool = True,
    ) -> None:
        self.is_alike, self.joins = is_alike, joins
        self.units, self.ahead, self.reduce_ahead, self.log = units, ahead, reduce_ahead, log
        self.root = units[0]
        self.order: list[Unit] = []
        self._backwards: list[Unit] = [self.root]
        self._seen: list[Unit] = []
        # Units that backward has reached and not left.
        self._behind: list[Unit] = []
        self._backward = EndOfBackward(self._end, self._forget)
        self._owners = Addresses()
        # Of the calls that are running, the innermost last.
        self._saved: list[tuple[Unit, SavedTensors | None]] = []
        self.sums = SumsTogether(lambda: self.order) if sums_together else None
        for unit in units:
            # A unit is done in backward when its gradients arrive, which only its own node knows.
            unit.before_reduce = self._before_reduce
            unit.after_nodes = self._prepare
            if self.sums is not None:
                unit.after_start = self.sums.added
                for buffer in unit.buffers:
                    buffer.sends = self.sums.add
        self._steps = Steps(self)
        watch_steps(self._steps)
        # They keep parameters of models that are gone, and what such a step sends must not depend
        # on whether Python has freed the model yet.
        for unit in units:
            for buffer in unit.buffers:
                for parameter in buffer.parameters:
                    keep_alive(parameter, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Schedule:
        """The schedule of a copied model; nothing is under way in it."""
        made = object.__new__(Schedule)
        memo[id(self)] = made  # first: by the hooks of their modules, units lead back here
        units = [deepcopy(one, memo) for one in self.units]
        how: Any = {"joins": self.joins, "is_alike": self.is_alike}
        how |= {"reduce_ahead": self.reduce_ahead, "sums_together": self.sums is not None}
        Schedule.__init__(made, units, self.ahead, self.log, **how)
        return made

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered values at this moment, those that are kept by design left out."""
        return sum(unit.gathered_bytes for unit in self.units)

    def install(self, modules: Sequence[nn.Module]) -> None:
        """Register the hooks of each unit's module."""
        for unit, module in zip(self.units, modules, strict=True):
            # Outermost, so that hooks of users see gathered parameters, and called also when the
            # forward raised: the modules must never keep gathered parameters.
            module.register_forward_pre_hook(Before(self, unit), prepend=True)
            module.register_forward_hook(After(self, unit), always_call=True)

    def ends(self) -> dict[str, OnInterrupt]:
        """By the name of its module, what ends an interrupted call of a unit."""
        return {unit.name: OnInterrupt(self, unit) for unit in self.units}

    def before_forward(self, unit: Unit, module: nn.Module) -> None:
        """The module of a unit is about to run."""
        if unit.depth and not is_running(module):
            self.interrupted(unit)  # in a hook behind this one, of an earlier call
        if unit.depth == 0:
            if self._backward.is_under_way and not in_backward():
                self._forget()  # what a backward that raised has left behind
            try:
                self._begin(unit)
            except BaseException:
                # The forward hook knows nothing of a call that never began.
                unit.swap_out()
                self._release(unit)
                raise
        # A module that calls itself, or is called in its own recomputation, is gathered and given
        # back once.
        unit.depth += 1

    def _begin(self, unit: Unit) -> None:
        recomputes = in_backward()
        # While gathered values are in the modules, what they hold is not what is stored, and that
        # is right.
        if not (unit.is_swapped or unit.is_lent):
            unit.require_stored()
        if not recomputes and (unit is self.root or not self.root.depth):
            self.log.begin()
        if self.joins and not recomputes and unit.is_missing and unit in self.order:
            start_together(self.order[self.order.index(unit) :])
        self._gather(unit, anew=not recomputes)
        if unit is self.root and self.sums is not None and self.sums.with_root():
            # Before its own nodes, which backward then comes to first: all are summed at once.
            self._prepare(unit)
            if not recomputes:
                unit.prepare()
        # To a forward that takes gathered parameters as arguments; the modules then keep the stored
        # ones.
        unit.lend()
        # A replay of a recording computes without the modules: backward must not look for
        # parameters in them.
        unit.ran_modules = unit.is_swapped
        if not recomputes:
            # Of a unit that is called by itself nothing is learned: no end would clear it.
            if unit is self.root or self.root.depth:
                self._seen.append(unit)
            self._prefetch(unit, self.order, anew=True)
        # Last: what is pushed is popped by the forward hook, which an error here would skip.
        self._push(unit)

    def interrupted(self, unit: Unit) -> None:
        """A call of a unit's module has ended by what no hook is called behind, as Ctrl-C."""
        if not unit.depth:
            return
        ended = [unit] if unit is not self.root else [one for one in self.units if one.depth]
        while self._saved and any([one.depth for one in ended]):
            one, saved = self._saved.pop()
            if saved is not None:
                saved.pop()
            one.depth = 0
            # What was written, and cannot be stored, is no news beside the interrupt.
            with suppress(ParallelError, RuntimeError):
                one.swap_out()
            self._release(one)
        if unit is self.root:
            self._seen = []
            self._release_all()
            self._forget_prepared()

    def after_forward(self, unit: Unit, output: Any) -> None:
        """The module of a unit has run, or raised."""
        if unit.depth == 0:
            return  # a hook before ours raised: nothing was begun
        unit.depth -= 1
        if unit.depth:
            return
        # Also where the forward raised: torch keeps these hooks on a stack, and another one's would
        # be popped.
        self._pop()
        # Before parameters are given back: an output may be a parameter, or a view of one.
        returns = self._hook_outputs(unit, output)
        if unit in self._behind:
            return  # recomputed: backward needs the parameters next
        # As far as is known: torch hands over no output, and handles what was raised meanwhile.
        has_raised = output is None and sys.exc_info()[0] is not None
        try:
            unit.swap_out()
        except BaseException:
            # What was written cannot be stored: the forward has failed.
            self._give_back(unit, None, returns=False)
            if has_raised:
                return  # its own error is on its way
            raise
        self._give_back(unit, output, returns=returns)

    def _give_back(self, unit: Unit, output: Any, *, returns: bool) -> None:
        # A unit that is called by itself is given back: no end of a forward would do it later.
        kept = self._first_behind() if unit is self.root or self.root.depth else ()
        if not (in_backward() or (returns and unit in kept)):
            self._release(unit)
        if unit is self.root and not in_backward():
            # What this forward called is what is prefetched in the next: a model may take another
            # way each time, and is then only slower.
            self.order, self._seen = self._seen, []
            # The root's outputs come first in backward as well.
            inner = [one for one in reversed(self.order) if one is not self.root]
            self._backwards = [self.root, *inner]
            self._release_all(but=self._first_behind() if returns else ())
            self._forget_prepared()

    def _first_behind(self) -> list[Unit]:
        """The root, and what backward would gather with it: given back, they would only come again.

        So they take no more memory than backward takes for them.
        """
        # The root's parameters are used last as well as first, as embeddings and heads are.
        inner = [one for one in self.order if one is not self.root]
        return [self.root, *inner[max(len(inner) - self.ahead, 0) :]]

    def _hook_outputs(self, unit: Unit, output: Any) -> bool:
        """Watch for the backward of the outputs; returns whether there can be one."""
        if not torch.is_grad_enabled():
            return False
        found = False
        for tensor in named_tensors_within(output).values():
            # Not by `grad_fn`: a reentrant checkpoint whose node somebody has seen is left to the
            # engine, which refuses it.
            if tensor.requires_grad and not tensor.is_leaf:
                # A hook on the node and not on the module: outputs may be nested in anything, and
                # some go unused.
                before_backward(tensor, _OnReach(self, unit, unit.ran_modules))
                found = True
        return found

    def reached(self, unit: Unit, ran_modules: bool) -> None:
        """Backward has come to the outputs of a unit, of a call in which modules computed or not.

        Modules that did may compute again, inside of a checkpoint, and look for parameters.
        """
        self._backward.watch()
        if unit in self._behind:
            self._lend(unit, ran_modules)
            return
        # Units without a gradient of their own have no node that tells when they are done.
        for other in [one for one in self._behind if one is not self.root and not one.trains]:
            self._leave(other)
        self._behind.append(unit)
        anew = not in_backward()
        self._gather(unit, anew=anew)
        self._lend(unit, ran_modules)
        self._prefetch(unit, self._backwards, anew=anew)

    def _lend(self, unit: Unit, ran_modules: bool) -> None:
        if ran_modules and not unit.is_swapped:
            with torch.enable_grad():
                unit.swap_in()
        elif not ran_modules:
            unit.is_lent = True

    def _before_reduce(self, unit: Unit) -> None:
        self._backward.watch()
        if unit is not self.root:
            self._leave(unit)

    def _leave(self, unit: Unit) -> None:
        if unit in self._behind:
            self._behind.remove(unit)
        if unit.depth == 0:
            unit.swap_out()
            self._release(unit)

    def _end(self) -> None:
        """Backward has ended."""
        self._forget()
        self.flush()

    def flush(self) -> None:
        """Reduce what `no_sync` has kept, of units that sync now. Collective."""
        for unit in self.units:
            # One that still keeps gradients waits for its own backward.
            if unit.syncs:
                for buffer in unit.buffers:
                    if buffer.unreduced is not None:  # mostly nothing, and no call
                        buffer.flush()

    def drop_kept(self) -> None:
        """Drop what `no_sync` has kept of a step that failed: the next one starts anew."""
        for unit in self.units:
            for buffer in unit.buffers:
                buffer.drop_kept()

    def _forget(self) -> None:
        """No backward is under way: what it has gathered is given back."""
        self._backward.forget()
        if not self.root.depth:
            self._forget_prepared()
        self._behind = []
        if self.sums is not None:
            self.sums.forget()
        for unit in self.units:
            # Not what runs: a forward may take gradients itself.
            if not unit.depth and (unit.is_swapped or unit.is_lent):
                unit.swap_out()
            for buffer in unit.buffers:
                # Of a backward that raised: parts of its gradients would be added to the next
                # one's.
                buffer.drop_unreduced()
        self._release_all()

    def _gather(self, unit: Unit, *, anew: bool) -> None:
        # Never anew in backward: it would compute with other weights than its forward did.
        unit.wait(anew=anew)
        for buffer in unit.buffers:
            self._owners.note(buffer)

    def _find(self, buffer: FlatBuffer) -> Tensor:
        """Gather the buffer of a saved tensor that is asked for, if it is not."""
        self._backward.watch()
        if buffer.full is None:
            # Backward came by a way on which no hook has gathered the unit.
            buffer.wait()
            self._owners.note(buffer)
        assert buffer.full is not None
        return buffer.full

    def _release(self, unit: Unit) -> None:
        unit.release()
        for buffer in unit.buffers:
            if buffer.full is None:
                self._owners.forget(buffer)

    def _release_all(self, but: Sequence[Unit] = ()) -> None:
        for unit in self.units:
            if unit not in but and unit.depth == 0:
                for buffer in unit.buffers:
                    # Mostly nothing of it is there any more.
                    if buffer.full is not None or buffer.pending is not None:
                        self._release(unit)
                        break

    def _prefetch(self, unit: Unit, order: Sequence[Unit], *, anew: bool) -> None:
        """Start the gathers of the units that come next."""
        if unit in order:
            # By its first call: for a second one it is there already, or is gathered then.
            at = order.index(unit)
            later = order[at + 1 :]
            if self.joins and order is self.order and later and later[0].is_missing:
                start_together(later)
            for other in later[: self.ahead]:
                if not (anew and other.is_written_unseen):
                    other.start(anew=anew)

    def _prepare(self, unit: Unit) -> None:
        """Make the last nodes of the units that come next, before what this unit computes.

        Backward then reduces their gradients while it computes this one, and waits before it packs
        this one's: no more than `reduce_ahead` are under way.
        """
        if not self.reduce_ahead or in_backward() or unit not in self.order:
            return
        if unit is self.root or self.root.depth:
            at = self.order.index(unit)
            for other in self.order[at + 1 : at + 1 + self.reduce_ahead]:
                other.prepare()

    def _forget_prepared(self) -> None:
        if self.reduce_ahead:
            for unit in self.units:
                unit.forget_prepared()

    def _push(self, unit: Unit) -> None:
        if not torch.is_grad_enabled():
            self._saved.append((unit, None))
            return
        saved = SavedTensors(self._owners, self._backward, self._find)
        if saved.is_needed:
            saved.push()
        self._saved.append((unit, saved if saved.is_needed else None))

    def _pop(self) -> None:
        _, saved = self._saved.pop()
        if saved is not None:
            saved.pop()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backwards on this rank."""
        # Restored, and not set to True: calls may be nested.
        before = [unit.syncs for unit in self.units]
        for unit in self.units:
            unit.syncs = False
        try:
            yield
        finally:
            for unit, syncs in zip(self.units, before, strict=True):
                unit.syncs = syncs


class _Hook(NotPickled):
    """A hook of a module: it knows its unit, and is copied with the model."""

    def __init__(self, schedule: Schedule, unit: Unit) -> None:
        self.schedule, self.unit = schedule, unit


class Before(_Hook):
    """The forward pre-hook of a unit's module."""

    @untraced
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Gather."""
        self.schedule.before_forward(self.unit, module)


class After(_Hook):
    """The forward hook of a unit's module."""

    @untraced
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Give back."""
        self.schedule.after_forward(self.unit, output)


class OnInterrupt(_Hook):
    """Is called where the forward of a unit's module is interrupted."""

    def __call__(self) -> None:
        """Give back."""
        self.schedule.interrupted(self.unit)


class _OnReach(_Hook):
    def __init__(self, schedule: Schedule, unit: Unit, ran_modules: bool) -> None:
        super().__init__(schedule, unit)
        self.ran_modules = ran_modules

    def __call__(self) -> None:
        self.schedule.reached(self.unit, self.ran_modules)


def zero_schedule_of(model: nn.Module) -> Schedule | None:
    """Return the schedule of a model; None: `zero` is not installed."""
    schedule = getattr(model, _SCHEDULE, None)
    return schedule if isinstance(schedule, Schedule) else None


def install_schedule(model: nn.Module, schedule: Schedule) -> None:
    """Let the model have a schedule."""
    setattr(model, _SCHEDULE, schedule)
