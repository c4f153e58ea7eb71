"""Resolves which modules compute on each rank's own rows, or says what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vescale_parallel._common.messages import listed
from vescale_parallel._errors import PlanError
from vescale_parallel._notation.glob import expand_braces, matches
from vescale_parallel._notation.rows import ParameterRow


def globs_of(said: str | Sequence[str] | None) -> tuple[str, ...]:
    """Read what a plan says.

    Raises:
        PlanError: a glob cannot be read.
    """
    globs: object = () if said is None else (said,) if isinstance(said, str) else said
    if not isinstance(globs, list | tuple) or not all(isinstance(one, str) for one in globs):
        raise PlanError(f"plan local_rows: expected a glob, or a list of them, got {said!r}.")
    for glob in globs:
        expand_braces(glob)
    return tuple(globs)


def named_modules(globs: Sequence[str], model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the outermost modules that globs name, and the globs that name none."""
    names = [name for name, _ in model.named_modules() if name]
    chosen = [name for name in names if any(matches(glob, name) for glob in globs)]
    dead = [glob for glob in globs if not any(matches(glob, name) for name in names)]
    outer = [n for n in chosen if not any(n.startswith(f"{one}.") for one in chosen)]
    return outer, dead


def local_rows_problems(
    names: Sequence[str],
    model: nn.Module,
    shared: Sequence[str],
    parameters: Sequence[ParameterRow],
) -> list[str]:
    """What is wrong with modules that a plan lets compute on own rows.

    Args:
        names: of these modules.
        model: of which they are.
        shared: names of modules of experts that ranks share.
        parameters: of the plan, resolved.
    """
    problems = []
    for name in names:
        module, inside = model.get_submodule(name), f"{name}."
        whole = [f"{inside}{n}".rstrip(".") for n, one in module.named_modules() if _of_batch(one)]
        if whole:
            problems.append(
                f"local_rows '{name}': {listed(whole)} take statistics of all rows, or draw other "
                "random numbers for rows of a part. Leave it gathered, or name what is around them."
            )
        if exchanged := [one for one in shared if f"{one}.".startswith(inside)]:
            problems.append(
                f"local_rows '{name}': the experts {listed(exchanged)} are shared by ranks, which "
                "send each other rows. Their rows are each rank's own without it."
            )
        units = dict.fromkeys(r.unit for r in parameters if r.zero and r.unit.startswith(inside))
        if units:
            problems.append(
                f"local_rows '{name}' with zero: {listed(units)} inside would be gathered alone. "
                f"Name units around it: Zero(units={(name,)!r})."
            )
    return problems


def _of_batch(module: nn.Module) -> bool:
    # By name: libraries have dropouts and batch norms of their own.
    kind = type(module).__name__
    drops = kind.endswith("Dropout") and getattr(module, "p", 0) != 0
    return drops or "BatchNorm" in kind
