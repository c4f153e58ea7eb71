"""Chooses the modules that are captured as one, and reports what became of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._static.caches import train_without_caches
from vescale_parallel._static.entry import CompileEntry
from vescale_parallel._static.forward import StaticForward, static_forward, unit_check
from vescale_parallel._zero.schedule import zero_schedule_of
from vescale_parallel._zero.unit import Unit
from vescale_parallel._zero.units import ROOT, unit_names

_HOLDS_UNITS = (
    "other units are gathered while it runs, by collectives between the programs of those"
)
_COLLECTED = (
    "hooks on modules within blocks collect what those of all stages return, so they are called"
)
_PLAIN = (
    "a stage on one rank computes with plain tensors: nothing is dispatched there, and to compare "
    "the state of a program with what it was costs more than to call the modules"
)


@dataclass(frozen=True)
class CapturedUnit:
    """A module whose forward `parallelize(..., static=True)` captures as one.

    Attributes:
        name: of the module; "" is the model itself.
        programs: how many kinds of calls are recorded.
        replays: how many calls were replayed.
        refusal: why calls that have no program run eagerly, in the words of the error that
            `capture` would raise; None while there is no reason.
        compared: how many of the replays were compared with the forward itself.
        uncompared: why others, or their gradients, are not, where they should be; None if they are.
    """

    name: str
    programs: int
    replays: int
    refusal: str | None
    compared: int = 0
    uncompared: str | None = None

    def __str__(self) -> str:
        what = f"{self.name or '(the model)'}: {self.programs} programs, {self.replays} replays"
        what = f"{what}, {self.compared} compared" if self.compared else what
        if self.refusal is not None:
            return f"{what}; runs eagerly: {self.refusal}"
        return what if self.uncompared is None else f"{what}; not compared: {self.uncompared}"


def install_static(model: nn.Module, mesh: DeviceMesh, check: bool | str | None) -> None:
    """Capture the forwards of a parallelised model: of its units of ZeRO, or of model and blocks.

    Without ZeRO the model is captured as a whole. Where that is refused, its repeated blocks are
    captured one by one: inside of a captured model they just run.

    Args:
        model: the model.
        mesh: the ranks that have it: others may have another model, or none.
        check: which replays are compared with the forwards, see `parallelize`.
    """
    train_without_caches(model)
    units, names = _units_of(model)
    for turn, name in enumerate(names):
        if _holds_any(name, names) and units:
            continue
        module = model.get_submodule(name)
        # As an attribute of the instance, which is what `nn.Module.__call__` finds first.
        how = unit_check(check, turn)
        module.forward = static_forward(name, module, module.forward, units, mesh, check=how)


def install_static_blocks(
    model: nn.Module,
    names: Sequence[str],
    units: Sequence[Unit],
    mesh: DeviceMesh,
    check: bool | str | None,
) -> None:
    """Capture the forwards of the blocks that this rank has of a model in stages.

    Each block by itself: what a model does between them is to be seen, as some of it is computed
    from values of other stages. Ranks of other stages have other blocks, and replay them at other
    times: nothing is agreed on with them.

    Args:
        model: the model.
        names: of the blocks.
        units: what gives modules other parameters than the stored ones while they run.
        mesh: the ranks of the stages.
        check: which replays are compared with the forwards, see `parallelize`.
    """
    inside = [unit.name for unit in units]
    for turn, name in enumerate(names):
        if _holds_any(name, inside):
            continue
        module = model.get_submodule(name)
        how = unit_check(check, turn)
        module.forward = static_forward(name, module, module.forward, units, mesh, check=how)


def finish_static_blocks(
    model: nn.Module, names: Sequence[str], collects: Callable[[], bool], *, is_plain: bool
) -> None:
    """Hooks that captured blocks have by now are none of a user's, who may look for parameters.

    Args:
        model: the model.
        names: of the blocks, captured or not.
        collects: whether hooks within all of them have to be called for now.
        is_plain: whether they compute with plain tensors, and so always run as they are.
    """

    def paused() -> str:
        return _PLAIN if is_plain else _COLLECTED if collects() else ""

    for name in names:
        one = _static_of(vars(model.get_submodule(name)).get("forward"))
        if one is not None:
            one.know_hooks()
            one.paused = paused


def tell_compilers(model: nn.Module) -> None:
    """Let `torch.compile` of a model in stages run it as it is, and say so."""
    model.forward = CompileEntry(ROOT, model, model.forward, (), None, captures=False, check=None)


def install_compile_entries(model: nn.Module, mesh: DeviceMesh, check: bool | str | None) -> None:
    """Let `torch.compile` of a parallelised model, or of a block, capture instead of tracing it.

    Args:
        model: the model.
        mesh: the ranks that have it.
        check: which replays are compared with the forwards, see `parallelize`.
    """
    units, names = _units_of(model)
    entries = []
    for turn, name in enumerate(names):
        module = model.get_submodule(name)
        may = not (units and _holds_any(name, names))
        how = unit_check(check, turn)
        entry = CompileEntry(name, module, module.forward, units, mesh, captures=may, check=how)
        module.forward = entry
        entries.append(entry)
    # The first is the model itself.
    blocks = tuple(entries[1:])
    for entry in entries:
        # Of blocks that are compiled one by one, the compiler stops to look at more than eight.
        entry.together = blocks


def _units_of(model: nn.Module) -> tuple[list[Unit], list[str]]:
    """Return the units of ZeRO, and the names of the modules that may be captured one by one.

    With ZeRO, programs must not hold its collectives: gathers start ahead of the unit that needs
    them. So a unit with others inside is none of those: it communicates in a way that no program
    does again.
    """
    schedule = zero_schedule_of(model)
    if schedule is not None:
        return schedule.units, [unit.name for unit in schedule.units]
    return [], unit_names(model, ())


def captured_units(model: nn.Module) -> list[CapturedUnit]:
    r"""The units of a model that `parallelize(..., static=True)` returned, the outermost first.

    Programs are counted on this rank. Modules inside of a replayed one do not run, so they have no
    calls of their own. Empty where the model is not static.

    Args:
        model: what `parallelize` returned.

    Examples:
        print(*captured_units(model), sep="\n")
    """
    forwards = dict(_forwards(model))
    found = {name: one.captured for name, one in forwards.items()}
    if not found:
        return []
    schedule = zero_schedule_of(model)
    names = [*found]
    if schedule is not None:
        # Of a model in stages, blocks of which not each is a unit.
        units = [unit.name for unit in schedule.units]
        names = [*units, *(name for name in names if name not in units)]
    return [
        CapturedUnit(
            name,
            len(one.programs),
            one.replays,
            forwards[name].why_eager(),
            one.comparisons,
            one.uncompared,
        )
        if (one := found.get(name)) is not None
        else CapturedUnit(name, 0, 0, _HOLDS_UNITS)
        for name in names
    ]


def _forwards(model: nn.Module) -> Iterator[tuple[str, StaticForward]]:
    for name, module in model.named_modules():
        one = _static_of(vars(module).get("forward"))
        if one is not None:
            # What torch.compile returns of a block holds the block by a name of its own.
            yield ".".join(part for part in name.split(".") if part != "_orig_mod"), one


def _static_of(forward: Any) -> StaticForward | None:
    """The captured forward within what a module has for its `forward`."""
    # A module that is computed again has another one around it, and one of a stage as well.
    while forward is not None and not isinstance(forward, StaticForward):
        inner = vars(forward).get("forward") if hasattr(forward, "__dict__") else None
        forward = inner or getattr(forward, "__wrapped__", None)
    return forward


def _holds_any(name: str, names: list[str]) -> bool:
    """Whether a module has one of the others inside."""
    inside = f"{name}." if name != ROOT else ""
    return any(other != name and other.startswith(inside) for other in names)
