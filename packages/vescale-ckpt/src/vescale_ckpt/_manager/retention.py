"""Policy that chooses which checkpoints of a run are kept: a pure function of those that exist."""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral


@dataclass(frozen=True)
class Policy:
    """What to keep; a checkpoint that any of these wants is kept, and with none of them all are."""

    last: int | None = None
    every: int | None = None
    best: int | None = None
    # "min" or "max": which metric is the better one.
    mode: str = "min"

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            # No step is a multiple of nan: all that should be kept would be deleted.
            if value is not None and not (isinstance(value, Integral) and int(value) >= 1):
                raise ValueError(
                    f"keep_{name} must be at least 1 or None, and an integer, not {value!r}"
                )
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', not {self.mode!r}")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever to be removed."""
        return self.last is self.every is self.best is None

    def kept(
        self,
        steps: Sequence[int],
        just_saved: int,
        metrics: Mapping[int, float],
        unhealthy: Container[int] = (),
    ) -> set[int]:
        """Return which of `steps`, oldest save first, to keep.

        `just_saved` always is: it may be the only good one.

        An unhealthy one counts for nothing: it pushes out no other, and goes with the next save.
        """
        if self.keeps_all:
            return {*steps, just_saved}
        bad = just_saved in unhealthy
        # By when they were saved and not by step: after a restart from step 50 the old step 100
        # must not push out the new 60, nor 60 when 70 is saved.
        steps = [step for step in steps if step not in unhealthy]
        older = [step for step in reversed(steps) if step != just_saved]
        found = {just_saved, *older[: (self.last or 1) - (not bad)]}
        if self.every is not None:
            found.update(step for step in steps if step % self.every == 0)
        if self.best is not None:
            found.update(self._ranked(steps, metrics)[: self.best])
        return found

    def _ranked(self, steps: Sequence[int], metrics: Mapping[int, float]) -> list[int]:
        # A loss of nan is never the best. Of equal ones the newest is: the sort is stable.
        known = [s for s in reversed(steps) if s in metrics and not math.isnan(metrics[s])]
        sign = 1 if self.mode == "min" else -1
        return sorted(known, key=lambda step: sign * metrics[step])
