"""Chooses of how many units gradients may be reduced at a time while backward goes on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from vescale_parallel._common.messages import count, human_bytes
from vescale_parallel._zero.units import ROOT

AUTO: Final = "auto"
"""The word of a plan for: as many as take no memory that matters."""

FREE_BYTES: Final = 4 << 20
"""So much for all gradients that are on their way is no memory that matters.

Small units are those whose reductions are worth hiding: they wait for each other, and not for the
wire. Where units are large, a unit more of gradients is a peak that a device may not have.
"""


@dataclass(frozen=True)
class ReduceAhead:
    """How many units of a model, and why.

    Attributes:
        units: gradients of so many are reduced while backward computes those before; 0: it waits.
        packed_bytes: the most that they take meanwhile, beside what is kept in any case.
        is_chosen: whether the plan left it open.
    """

    units: int
    packed_bytes: int
    is_chosen: bool

    def text(self) -> str:
        """The line that `explain` prints."""
        free = human_bytes(FREE_BYTES)
        if self.units:
            what = (
                f"gradients of up to {count(self.units, 'unit')} are reduced while backward "
                f"computes, in {human_bytes(self.packed_bytes)} at most"
            )
            why = f"as many as stay below {free}"
        else:
            what, why = "backward waits for each reduction", f"one more would take over {free}"
        said = f"'{AUTO}': {why}" if self.is_chosen else f"{self.units}"
        return f"{what} (reduce_ahead={said})"


class ReducedBuffer(Protocol):
    """What of a flat buffer matters here."""

    @property
    def unit(self) -> str: ...
    @property
    def zero(self) -> int: ...
    @property
    def trainable(self) -> bool: ...
    @property
    def packed_bytes(self) -> int: ...


def reduce_ahead_of(said: int | None, buffers: Iterable[ReducedBuffer]) -> ReduceAhead | None:
    """Return how many units may be on their way; None: none can be, and the plan does not say.

    Args:
        said: by the plan; None: it leaves it open.
        buffers: all of the model.
    """
    sizes = _sizes(buffers)
    if not sizes and said is None:
        return None
    units = fitting(sizes) if said is None else said
    # The largest ones: which units are on their way together changes as backward goes on.
    return ReduceAhead(units, sum(sizes[:units]), said is None)


def _sizes(buffers: Iterable[ReducedBuffer]) -> list[int]:
    """Bytes of packed gradients, a number for each unit that can be reduced ahead."""
    found: dict[str, int] = {}
    for one in buffers:
        # The root comes last in backward: nothing is computed while it is reduced.
        if one.trainable and one.unit != ROOT:
            # Of level 1 that memory is kept from step to step, whatever is reduced when.
            found[one.unit] = found.get(one.unit, 0) + one.packed_bytes * (one.zero > 1)
    return sorted(found.values(), reverse=True)


def fitting(sizes: Sequence[float]) -> int:
    """How many units, whichever they are, take no more than `FREE_BYTES` together.

    Args:
        sizes: bytes of the packed gradients of each, largest first.
    """
    total = 0.0
    for number, size in enumerate(sizes):
        total += size
        if total > FREE_BYTES:
            return number
    return len(sizes)
