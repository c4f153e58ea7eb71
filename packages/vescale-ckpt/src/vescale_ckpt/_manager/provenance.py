"""Reads what checkpoints of a run record of themselves: health, metric, order of saves."""

from collections.abc import Callable, Mapping
from typing import Any

from vescale_ckpt._save.save import HEALTHY

# Keys in a manifest's provenance: the metric, and the how manyth save into the root it was.
METRIC, ORDER = "metric", "order"
# And the time, which every save writes there.
CREATED = "created"
# What the manifest of a checkpoint says about its origin; None where it is damaged.
Provenance = dict[str, Any] | None


def is_healthy(provenance: Provenance) -> bool:
    """Return what a checkpoint says of itself, or else whether its metric is a finite number."""
    known = provenance or {}
    return bool(known.get(HEALTHY, not isinstance(known.get(METRIC), str)))


def unhealthy_in(known: Mapping[int, Provenance]) -> set[int]:
    """Return the steps of those that are not healthy."""
    return {step for step, one in known.items() if not is_healthy(one)}


def metrics_of(known: Mapping[int, Provenance]) -> dict[int, float]:
    """Return the metric of every step that was saved with one."""
    found = {step: (one or {}).get(METRIC) for step, one in known.items()}
    return {step: float(m) for step, m in found.items() if isinstance(m, (int, float))}


def order_of(provenance: Provenance) -> int:
    """Return the how manyth save it was; 0 if it does not say."""
    found = (provenance or {}).get(ORDER)
    return found if type(found) is int else 0


def by_age(known: Mapping[int, Provenance]) -> list[int]:
    """Sort steps by when they were saved: by their order, which clocks do not disturb."""
    orders: dict[int, int] = {}
    newest = last = 0
    # One without an order, which something else than a manager has saved, is as new as the newest
    # that its clock says was there.
    sound = [(str(one.get(CREATED)), step) for step, one in known.items() if one is not None]
    for _, step in sorted(sound):
        order = order_of(known[step])
        newest = max(newest, order)
        orders[step] = order or newest
    for step in sorted(known):
        # A damaged one stands where its step is among the others.
        last = orders.setdefault(step, last)
    return sorted(orders, key=lambda step: (orders[step], step))


def damaged_in(known: Mapping[int, Provenance]) -> list[int]:
    """Return the steps of those that are damaged."""
    return sorted(step for step, one in known.items() if one is None)


def newest_of(
    known: Mapping[int, Provenance], fits: Callable[[Provenance], bool] = lambda one: True
) -> int | None:
    """Return the step that was saved last, of those that are not damaged and fit."""
    sound = (step for step in reversed(by_age(known)) if known[step] is not None)
    return next((step for step in sound if fits(known[step])), None)
