"""A module's `forward`, captured: what ZeRO gathers anew for each call is passed as arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cached_property, update_wrapper
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_dtensor import Captured, ReplayCheck, capture, untraced

from vescale_parallel._common.pickle_refusal import NotPickled
from vescale_parallel._common.torch_compat import in_backward
from vescale_parallel._static import speed
from vescale_parallel._static.caches import holds_cache
from vescale_parallel._static.speed import ReplaySpeed
from vescale_parallel._zero.saved_tensors import is_checkpointed_now
from vescale_parallel._zero.unit import Places, Unit, UnitParameter
from vescale_parallel._zero.unit import put_all as _put_all

Part = tuple[UnitParameter, Places]
"""A parameter of a unit of ZeRO, and the places in one module."""

_CACHED = "calls are given a cache of keys and values, which its modules write to"


class StaticForward(NotPickled):
    """Takes the place of a module's `forward`, as an attribute of the module.

    Attributes:
        name: of the module in the model.
        module: it.
        forward: what it computes by.
        mesh: whose ranks call it; None: all ranks do.
        check: which replays are compared with the forward itself; None: none.
        paused: why it runs as it is for now, as where hooks within it have to be called; "" where
            it does not.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        units: Sequence[Unit],
        mesh: DeviceMesh | None = None,
        *,
        check: ReplayCheck | None = None,
        hooks: int | None = None,
    ) -> None:
        # First, as it brings attributes along. So that who looks at its signature sees the model's.
        update_wrapper(self, forward)
        self.name, self.module, self.forward, self.mesh = name, module, forward, mesh
        self.check = check
        self.paused: Callable[[], str] = _never
        self.speed = ReplaySpeed(mesh)
        self._had_cache = False
        self._units = tuple(units)
        self._hooks = _count_hooks(module) if hooks is None else hooks

    # At the first use: while a model is copied, the copies of its modules have no parts yet.
    @cached_property
    def _parts(self) -> list[Part]:
        # A tied parameter has places in several modules: those outside of this one keep what they
        # hold.
        inside = set(map(id, self.module.modules()))
        return [
            (held, places)
            for unit in self._units
            for held in unit.held
            if (places := tuple(place for place in held.places if id(place[0]) in inside))
        ]

    @cached_property
    def _firsts(self) -> list[tuple[nn.Module, str]]:
        """For each part, the first module that holds it, and under which name."""
        return [places[0] for _, places in self._parts]

    @cached_property
    def _stored(self) -> list[Tensor]:
        """For each part, what is stored."""
        return [held.stored for held, _ in self._parts]

    @cached_property
    def _numbers(self) -> dict[int, list[tuple[int, int]]]:
        """By the id of a unit, the numbers of its parameters among the parts, and there."""
        at = {id(held): (unit, i) for unit in self._units for i, held in enumerate(unit.held)}
        found: dict[int, list[tuple[int, int]]] = {}
        for index, (held, _) in enumerate(self._parts):
            unit, number = at[id(held)]
            found.setdefault(id(unit), []).append((index, number))
        return found

    def know_hooks(self) -> None:
        """The hooks that the module has by now look for no parameters."""
        self._hooks = _count_hooks(self.module)

    @property
    def takes_parameters(self) -> bool:
        """Whether nothing else looks for gathered parameters of the module when it is called."""
        return _count_hooks(self.module) == self._hooks and not self._runs_modules()

    def _runs_modules(self) -> bool:
        """Whether the next call runs the forward as it is."""
        return bool(self.runs_as_it_is()) or (
            self.speed.is_eager_next and self._is_counted() and self.captured.is_together
        )

    def runs_as_it_is(self) -> str:
        """Why no call is captured or replayed for now, in words; "" where calls are."""
        return self.paused() or self.speed.verdict

    def why_eager(self) -> str | None:
        """Why calls run eagerly that have no program, in words; None while there is no reason."""
        captured = self.captured
        said = self.runs_as_it_is() or captured.refusal
        return said or (_CACHED if self._had_cache and not captured.programs else None)

    def _is_counted(self) -> bool:
        """Whether a call is one of training that every rank makes. A recomputation is none."""
        # Not by grad mode: a reentrant checkpoint runs the forward without.
        return self.module.training and not in_backward()

    @cached_property
    def captured(self) -> Captured:
        """The forward, captured; what cannot be recorded runs as in eager mode."""
        function = _with_parameters(self.name, self.module, self.forward, self._parts)
        return capture(function, refused="run", mesh=self.mesh, check=self.check)

    def __deepcopy__(self, memo: dict[int, Any]) -> StaticForward:
        """The forward of a copied module, with no programs yet."""
        made = StaticForward.__new__(StaticForward)
        memo[id(self)] = made  # first: its module and its unit lead back here
        module, units = deepcopy(self.module, memo), deepcopy(self._units, memo)
        forward = deepcopy(self.forward, memo)  # a method is bound to the copy
        # The copied module may have no hooks yet, nor an attribute for them.
        how: Any = {"check": self.check, "hooks": self._hooks}
        StaticForward.__init__(made, self.name, module, forward, units, self.mesh, **how)
        return made

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute; the modules hold the same parameters before and after."""
        if self.runs_as_it_is():
            return self.forward(*args, **kwargs)
        if not self.speed.is_decided:
            if self._is_counted() and self.captured.is_together:
                return self._timed(args, kwargs)
            if self.speed.takes_turns and any(unit.is_swapped for unit in self._own_units()):
                # Backward computes again what ran as it is.
                return self._as_it_is(args, kwargs)
        return self._compute(args, kwargs)

    def _own_units(self) -> list[Unit]:
        return [unit for unit in self._units if id(unit) in self._numbers]

    def _as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward with what the modules hold."""
        return self.captured.run(*[None] * len(self._parts), *args, **kwargs)

    def _timed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that counts for the decision between programs and the forward."""
        captured, own = self.captured, self.speed
        eager = own.is_eager_next and not any(unit.is_lent for unit in self._own_units())
        before = captured.replays, captured.comparisons, len(captured.programs)
        start = speed.now()
        outputs = self._as_it_is(args, kwargs) if eager else self._compute(args, kwargs)
        took = speed.now() - start
        after = captured.replays, captured.comparisons, len(captured.programs)
        replayed = after == (before[0] + 1, *before[1:])
        own.note(took, eager=eager, is_sample=eager or replayed)
        if own.is_due:
            own.decide("" if captured.programs else captured.refusal or "")
        return outputs

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay, record, or run what cannot be recorded."""
        if not self._parts:
            return self._call((), args, kwargs)
        # What the modules hold right now: gathered parameters if another forward of the same unit,
        # or a user's hook, runs around this one.
        used: list[Any] = [module._parameters[name] for module, name in self._firsts]
        given: list[Any] = [None] * len(used)
        swapped = not all(map(is_, used, self._stored))
        if swapped:
            # None: not gathered at the moment, so guarded like any parameter.
            pairs = zip(used, self._stored, strict=True)
            given = [None if one is stored else one for one, stored in pairs]
        # A lent unit keeps its gathered parameters outside of the modules, so `used` has not seen
        # them.
        lent = [unit for unit in self._units if unit.is_lent and id(unit) in self._numbers]
        for unit in lent:
            fulls = unit.fulls()
            for index, number in self._numbers[id(unit)]:
                given[index] = fulls[number]
        if not swapped:
            return self._run(lent, given, args, kwargs)
        # Guards of a program compare the parameters of modules by identity: with the gathered ones,
        # which are new tensors at each call, no program would ever fit.
        put_all(self._parts, self._stored)
        try:
            return self._run(lent, given, args, kwargs)
        finally:
            put_all(self._parts, used)

    def _run(self, lent: Sequence[Unit], given: list[Any], args: Any, kwargs: Any) -> Any:
        # A replay does not run the modules, so units that are freed by what their modules do have
        # to be told whether they did; and they do where it is compared with them.
        captured = self.captured
        before = captured.replays - captured.comparisons
        outputs = self._call(given, args, kwargs)
        if captured.replays - captured.comparisons == before:
            for unit in lent:
                unit.ran_modules = True
        return outputs

    def _call(self, given: Sequence[Any], args: Any, kwargs: Any) -> Any:
        captured = self.captured
        if holds_cache(args, kwargs):
            # Once refused no other call would be recorded: one without a cache may come.
            self._had_cache = True
            return captured.run(*given, *args, **kwargs)
        return captured(*given, *args, **kwargs)


def static_forward(
    name: str,
    module: nn.Module,
    forward: Callable[..., Any],
    units: Sequence[Unit],
    mesh: DeviceMesh | None = None,
    *,
    check: ReplayCheck | None = None,
) -> StaticForward:
    """Return the static form of a module's forward, which the module's unit of ZeRO knows."""
    made = StaticForward(name, module, forward, units, mesh, check=check)
    for unit in units:
        # The unit asks its forward whether gathered parameters may be lent to it.
        if unit.name == name:
            unit.forward = made
    return made


def unit_check(said: bool | str | None, turn: int) -> ReplayCheck | None:
    """How replays of one of several units are compared: also what their backward gives.

    Args:
        said: "sampled", True for every call, or None.
        turn: its place among the units, which are compared one after the other.
    """
    if not said:
        return None
    return ReplayCheck(every=said is True, turn=turn, gradients=_backward_comes_once)


def _backward_comes_once() -> bool:
    # A checkpoint around the unit computes again what backward asks for: there is a graph of its
    # own then, and saved tensors are counted.
    return not is_checkpointed_now()


def _with_parameters(
    name: str, module: nn.Module, forward: Callable[..., Any], parts: Sequence[Part]
) -> Callable[..., Any]:
    """The function that is captured: a forward whose first arguments are gathered parameters."""
    count = len(parts)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Named, so that a recording meets it before the parameters change places.
        assert module is not None
        # By position: names could be those of the forward's own arguments.
        given, args = args[:count], args[count:]
        if all(one is None for one in given):
            return forward(*args, **kwargs)
        stored = [held.stored for held, _ in parts]
        pairs = zip(given, stored, strict=True)
        put_all(parts, [other if one is None else one for one, other in pairs])
        try:
            return forward(*args, **kwargs)
        finally:
            put_all(parts, stored)

    # What warnings call it.
    run.__qualname__ = f"{type(module).__qualname__}.forward of {name or 'the model'}"
    return run


def _count_hooks(module: nn.Module) -> int:
    # Those that come later are a user's, who may look for the parameters.
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


def _never() -> str:
    return ""


def put_all(parts: Sequence[Part], tensors: Sequence[Tensor]) -> None:
    """Let the modules hold these tensors."""
    _put_all([places for _, places in parts], tensors)
