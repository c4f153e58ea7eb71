"""Words of a plan that are looked at before any is parsed."""

from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any, get_args

from vescale_dtensor import AttentionWay

from vescale_parallel._errors import PlanError
from vescale_parallel._notation.layout import parse_layout


def require_batch(batch: str | None, is_: object) -> None:
    if is_ not in ("global", "local"):
        raise PlanError(f"plan batch_is: expected 'global' or 'local', got {is_!r}.")
    if is_ == "local" and (batch is None or len({dim for _, dim in parse_layout(batch).dims}) != 1):
        raise PlanError(
            f"plan batch_is 'local' needs a batch whose rows are shared, as 'dp:0': got {batch!r}."
        )


def require_sequence(way: object, batch: str | None) -> None:
    known = get_args(AttentionWay)
    if way not in known:
        raise PlanError(f"plan sequence: expected one of {list(known)}, got {way!r}.")
    dims = {dim for _, dim in parse_layout(batch).dims} if batch is not None else {None}
    if way != "auto" and dims <= {0}:
        raise PlanError(
            f"plan sequence {way!r} is about sequences that ranks share, and batch={batch!r} "
            "shards none: add an axis that shards their dim, as in batch='dp:0, cp:1'."
        )


def default_of(one: Any) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def copied_rules(what: str, rules: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the rules, so that editing the caller's mapping does not edit the plan."""
    if not isinstance(rules, Mapping):
        raise PlanError(
            f"plan {what}: expected a mapping of glob to layout, got {type(rules).__name__}."
        )
    for glob in rules:
        if not isinstance(glob, str):
            raise PlanError(f"plan {what}: a glob is a string, got {glob!r}.")
    return dict(rules)
