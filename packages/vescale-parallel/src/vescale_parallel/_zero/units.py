"""Groups modules that are gathered as one, with their parameters, from names alone."""

from collections.abc import Sequence

from torch import nn

from vescale_parallel._notation.glob import matches

ROOT = ""
"""The name of the unit that holds what no other does: the model itself."""


def unit_names(model: nn.Module, globs: Sequence[str]) -> list[str]:
    """Return names of the modules that are units, the root first.

    Args:
        model: the model.
        globs: which modules; none: the repeated blocks of the model.
    """
    modules = dict(model.named_modules())
    if globs:
        chosen = [name for name in modules if name and any(matches(g, name) for g in globs)]
    else:
        chosen = [name for name in modules if name and _is_repeated(name, modules)]
        # The outermost: blocks within blocks would be gathered in too many small collectives.
        chosen = [name for name in chosen if not any(_inside(name, one) for one in chosen)]
    return [ROOT, *(name for name in chosen if any(True for _ in modules[name].parameters()))]


def _is_repeated(name: str, modules: dict[str, nn.Module]) -> bool:
    """Return whether a module is one of at least two alike in a list of modules."""
    parent = modules.get(name.rpartition(".")[0])
    if not isinstance(parent, nn.ModuleList | nn.Sequential) or len(parent) < 2:
        return False
    return len({type(one) for one in parent}) == 1


def unit_of(names: Sequence[str], units: Sequence[str]) -> str:
    """Return the unit of a parameter: the innermost that holds all its names, else the root."""
    owners = {max((u for u in units if _inside(name, u)), key=len) for name in names}
    # Modules of two units that share a parameter both find it in the root, which is gathered as
    # long as any of them runs.
    return owners.pop() if len(owners) == 1 else ROOT


def _inside(name: str, unit: str) -> bool:
    return not unit or (name != unit and name.startswith(f"{unit}."))
