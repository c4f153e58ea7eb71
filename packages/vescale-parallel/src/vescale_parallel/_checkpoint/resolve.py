"""Resolves rules of recomputation to regions of a model, or says what is wrong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from torch import nn

from vescale_parallel._checkpoint.rules import CheckpointRules, Kind
from vescale_parallel._common.messages import listed
from vescale_parallel._notation.glob import first_match
from vescale_parallel._zero.units import unit_names

REPEATED: Final = "repeated blocks"
"""The rule of regions that no glob names."""
REST: Final = "*"
"""The glob of modules that no other matches; "none" for them says nothing of what is inside."""


@dataclass(frozen=True)
class RegionRow:
    """A module that is computed again in backward.

    Attributes:
        module: its name.
        rule: the glob that chose it, or that it is one of the repeated blocks.
        kind: how it is recomputed, as the plan says it.
        saved: operators whose results are kept.
    """

    module: str
    rule: str
    kind: str
    saved: tuple[str, ...]


def regions_of(rules: CheckpointRules, model: nn.Module) -> tuple[list[RegionRow], list[str]]:
    """Return the regions in the order of the model, and what is wrong with the rules."""
    if rules.blocks is not None:
        return _blocks(rules, rules.blocks, model)
    found = list(_outermost(rules, model, "", set()))
    idle = [
        glob
        for glob, kind in rules.globs.items()
        if kind is not None and glob != REST and all(row.rule != glob for row in found)
    ]
    problems = [
        f"checkpoint rule '{glob}' never applies: its modules are inside of others that are "
        f"recomputed, or are lists, which do not run. Recomputed are "
        f"{listed(row.module for row in found) or 'none'}."
        for glob in idle
        if any(first_match(rules.globs, name) == glob for name, _ in model.named_modules())
    ]
    return found, problems


def _blocks(
    rules: CheckpointRules, kind: Kind, model: nn.Module
) -> tuple[list[RegionRow], list[str]]:
    # Without the first, which is the model itself.
    blocks = _once(model, unit_names(model, ())[1:])
    if not blocks:
        return [], [
            "checkpoint: the model has no repeated blocks (members of one type of a list). Name "
            "modules, as {'encoder.*': 'full'}."
        ]
    chosen = blocks[:: rules.every]
    return [RegionRow(name, REPEATED, kind.text, kind.saved) for name in chosen], []


def _once(model: nn.Module, names: Sequence[str]) -> list[str]:
    # One module under two names runs one forward.
    # From behind, so that of several names the first is the one that stays.
    found = {id(model.get_submodule(name)): name for name in reversed(names)}
    chosen = set(found.values())
    return [name for name in names if name in chosen]


def _outermost(
    rules: CheckpointRules, module: nn.Module, prefix: str, seen: set[int]
) -> Iterator[RegionRow]:
    """Regions within regions would compute their inside a third time."""
    for own, child in module.named_children():
        name = f"{prefix}.{own}" if prefix else own
        if id(child) in seen:
            continue
        seen.add(id(child))
        # Lists do not run, whatever matches them; their members do.
        runs = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        glob = first_match(rules.globs, name) if runs else None
        kind = rules.globs[glob] if glob is not None else None
        if glob is not None and kind is not None:
            yield RegionRow(name, glob, kind.text, kind.saved)
        # By any other glob "none" is about all that is inside as well.
        elif glob is None or glob == REST:
            yield from _outermost(rules, child, name, seen)
