"""Finds parameters in a part of the model that is computed again in backward."""

from collections.abc import Mapping, Sequence

from vescale_parallel._cost.pieces import Piece, unit_of
from vescale_parallel._cost.settings import Workload


def regions_of(pieces: Sequence[Piece], work: Workload) -> Mapping[str, tuple[str, ...]]:
    """Return regions by name, and the families of operators whose results each keeps."""
    if work.recompute:
        return {unit: () for one in pieces if (unit := unit_of(one.name))}
    return work.regions


def region_of(name: str, regions: Mapping[str, tuple[str, ...]]) -> str | None:
    """Return the region that a parameter is in."""
    parts = name.split(".")
    found = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return next((one for one in found if one in regions), None)
