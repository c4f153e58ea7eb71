"""The result of `check_rule`: what was tried, how it ran, and the text of a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vescale_dtensor._layout.notation import short_dtype
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.placements import Partial
from vescale_dtensor._planning.plan import OpPlan
from vescale_dtensor.rules._check_layouts import Combination
from vescale_dtensor.rules._check_trial import Mode, Sample


@dataclass(frozen=True)
class Trial:
    """One layout of one sample.

    Attributes:
        sample: index of the sample.
        mesh: sizes of the mesh axes.
        placements: for each operand, one per mesh axis.
    """

    sample: int
    mesh: tuple[int, ...]
    placements: Combination


@dataclass(frozen=True)
class Outcome:
    """How a trial ran.

    Attributes:
        trial: the layout.
        by: `rule`, or `fallback` if no rule applied and the operands were replicated.
        sharded: whether the op ran on local tensors that differ from rank to rank.
        redistributes: whether an operand had to be redistributed.
    """

    trial: Trial
    by: str
    sharded: bool
    redistributes: bool


@dataclass(frozen=True)
class RuleReport:
    """What `check_rule` tried; all of it agreed with one device. Its `str` is a summary.

    Attributes:
        name: of the function.
        outcomes: one per trial.
        possible: sizes of a mesh -> how many layouts there are; those tried are in `outcomes`.
        gradients: whether gradients were compared too.
        seed: determined the layouts and values.
    """

    name: str
    outcomes: tuple[Outcome, ...]
    possible: dict[tuple[int, ...], int]
    gradients: bool
    seed: int

    @property
    def sharded(self) -> int:
        """Number of trials that ran on sharded or partial operands. Zero: the rule is useless."""
        return sum(outcome.sharded for outcome in self.outcomes)

    @property
    def fallbacks(self) -> int:
        """Number of trials in which no rule applied."""
        return sum(outcome.by == "fallback" for outcome in self.outcomes)

    def __str__(self) -> str:
        ways = "forward and backward" if self.gradients else "forward"
        lines = [f"{self.name}: {len(self.outcomes)} layouts agree with one device, {ways}"]
        for mesh, possible in self.possible.items():
            here = [outcome for outcome in self.outcomes if outcome.trial.mesh == mesh]
            drawn = "all" if possible == len(here) else f"of {possible}, seed {self.seed}"
            lines.append(f"  mesh {mesh}: {len(here)} layouts ({drawn}); {_counted(here)}")
        return "\n".join(lines)


def _counted(outcomes: Sequence[Outcome]) -> str:
    """How trials ran, in numbers."""
    sharded = sum(outcome.sharded for outcome in outcomes)
    moved = sum(outcome.redistributes for outcome in outcomes)
    fell_back = sum(outcome.by == "fallback" for outcome in outcomes)
    return f"{sharded} ran sharded, {moved} redistributed operands, {fell_back} fell back"


def failure_text(
    name: str, trial: Trial, sample: Sample, mode: Mode, plans: Sequence[OpPlan], words: str
) -> str:
    """The message of a `RuleCheckError`: what differs, where, and how to run it again.

    Args:
        name: of the function.
        trial: the layout that failed.
        sample: its arguments.
        mode: the code path that failed.
        plans: the plans that ran.
        words: what differs.
    """
    pairs = zip(sample.operands, trial.placements, strict=True)
    placements = ", ".join(_spelled(each) for each in trial.placements)
    lines = [
        f"{name} differs from one device.",
        *(f"  {line}" for line in words.splitlines() if line),
        f"  sample {trial.sample}, {mode.name}, mesh {trial.mesh}",
        *(
            f"  operand {i}: {_described(x)} as {_spelled(each)}"
            for i, (x, each) in enumerate(pairs)
        ),
        *(f"  planned by rule {plan}" for plan in plans),
        f"Again: check_rule(..., meshes=[{trial.mesh}], placements=[[{placements}]])",
    ]
    return "\n".join(lines)


def _described(x: Tensor) -> str:
    return f"{short_dtype(x.dtype)}{list(x.shape)}"


def _spelled(placements: Sequence[Placement]) -> str:
    """Placements as they are written in a program, to copy from the message."""
    words = [f'Partial("{p.reduce_op}")' if isinstance(p, Partial) else repr(p) for p in placements]
    return f"[{', '.join(words)}]"
