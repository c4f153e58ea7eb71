"""`check_rule`: compares a rule with one device, in many layouts, forward and backward.

Each layout is a `Trial`, run on simulated ranks, which are threads of this process. `_Work` holds
what one device gives and runs trials; `_check_layouts` makes the layouts, `_check_trial` compares,
and `_check_report` formats the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from types import FunctionType
from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from vescale_comm import DeadlockError, SimulationError, simulate

from vescale_dtensor._dispatch.observers import CallObserver
from vescale_dtensor._dispatch.registry import handlers, known_rules
from vescale_dtensor._errors import RuleCheckError
from vescale_dtensor._layout.derived_placements import as_placement
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OpPlan, function_name
from vescale_dtensor._tensor.observers import observing
from vescale_dtensor.rules._check_layouts import Combination, combinations
from vescale_dtensor.rules._check_report import Outcome, RuleReport, Trial, failure_text
from vescale_dtensor.rules._check_trial import (
    Difference,
    ExpectedResult,
    Mode,
    Sample,
    expected_of,
    run_on_mesh,
)
from vescale_dtensor.rules._registration import functions_of


class _Path(CallObserver):
    """Observes what answers for the calls of one function on one rank."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self._func = func
        known = [each for each in functions_of(func) if each in known_rules()]
        # None: a Python function that calls others, so that all plans and fallbacks count.
        self._functions = known or None
        # Observers see the calls of all threads, and each simulated rank is a thread.
        self._thread = threading.get_ident()
        self.plans: list[OpPlan] = []
        self.fell_back_to: list[str] = []

    def on_plan(self, call: OpCall, plan: OpPlan) -> None:
        """Note the plan of a call."""
        if self._is_ours(call):
            self.plans.append(plan)

    def on_fallback(self, call: OpCall) -> None:
        """Note the name of a function for which no rule applied."""
        if self._is_ours(call):
            self.fell_back_to.append(function_name(call.func))

    def _is_ours(self, call: OpCall) -> bool:
        mine = threading.get_ident() == self._thread
        return mine and (self._functions is None or call.func in self._functions)

    def watch(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and note what answers."""
        with observing(self):
            return self._func(*args, **kwargs)

    def outcome(self, trial: Trial) -> Outcome:
        """How the trial ran, from what was noted."""
        uses = [use for plan in self.plans for use in plan.uses]
        return Outcome(
            trial,
            "fallback" if self.fell_back_to or not self.plans else "rule",
            any(use.layout.replicated != use.layout.active for use in uses),
            any(plan.redistributes for plan in self.plans),
        )


def check_rule(
    func: Callable[..., Any],
    samples: Iterable[Any],
    *,
    meshes: Sequence[Sequence[int]] = ((4,), (2, 2)),
    placements: Sequence[Sequence[Sequence[object]]] | None = None,
    gradients: bool = True,
    seed: int = 0,
    most: int = 50,
    rtol: float | None = None,
    atol: float | None = None,
) -> RuleReport:
    """Run a function in many layouts and compare everything with one device.

    Each layout runs in this process, on threads that `vescale_comm.simulate` makes ranks of. It
    runs four times, on four code paths: a first call, an equal call (by the compiled call), one on
    operands that are not leaves, and one without grad. Compared are results, global shapes, dtypes,
    strides, operands that were written to, and gradients. Layouts are all combinations of the
    placements of each operand: replicated, sharded on each dim (as `torch.chunk` does, so 5 over 4
    ranks leaves one empty), sharded unevenly, and partial.

    Args:
        func: a function with a rule, or any function that calls some.
        samples: arguments to call it with: each a tuple of them, or a `Sample` if some are named.
            Include extents of one and zero, and some that no mesh axis divides. Gradients are
            compared of operands that require grad; if none does, of all floating ones.
        meshes: sizes of the axes of each mesh to try.
        placements: layouts to try instead: each a list of operands, with a placement per mesh axis
            for each operand. A layout runs on the meshes that have as many axes.
        gradients: whether to compare gradients. Cotangents are small integers.
        seed: determines layouts, partial values, cotangents and torch's random numbers.
        most: layouts to try of one sample on one mesh; if there are more, some are drawn.
        rtol: relative tolerance; default: as `torch.testing.assert_close` has.
        atol: absolute tolerance, likewise.

    Returns:
        What ran, and how. Look at `sharded`: a rule that always replicates is always right.

    Raises:
        RuleCheckError: some layout differs from one device. It names the simplest such: the mesh,
            the layout of every operand, which output or gradient, and by how much. Also raised if
            no rule ever answered.

    Examples:
        check_rule(torch.hypot, [(torch.randn(5, 4), torch.randn(4))])
    """
    name = _name_with_a_rule(func)
    tolerance = {"rtol": rtol, "atol": atol}
    work = _Work(func, [Sample.of(s) for s in samples], gradients, seed, tolerance)
    possible: dict[tuple[int, ...], int] = {}
    outcomes: list[Outcome] = []
    for sizes in map(tuple, meshes):
        trials, possible[sizes] = _trials(work.samples, sizes, placements, most, seed)
        outcomes += work.run(name, sizes, trials)
    if all(outcome.by == "fallback" for outcome in outcomes):
        raise RuleCheckError(
            f"no rule answered for {name} in any of {len(outcomes)} layouts. Where operands are "
            "replicated first, results are right; see why the strategy gives None."
        )
    return RuleReport(name, tuple(outcomes), possible, gradients, seed)


def _name_with_a_rule(func: Callable[..., Any]) -> str:
    """The function's name, for messages.

    Raises:
        RuleCheckError: it has no rule, and is no Python function, which might call one that has.
    """
    named = functions_of(func)
    name = function_name(getattr(named[0], "overloadpacket", named[0]))
    known = any(each in known_rules() or each in handlers for each in named)
    if known or isinstance(func, FunctionType):
        return name
    raise RuleCheckError(f"{name} has no rule: teach one with register_rule(…) first")


def _trials(
    samples: Sequence[Sample],
    sizes: tuple[int, ...],
    placements: Sequence[Sequence[Sequence[object]]] | None,
    most: int,
    seed: int,
) -> tuple[list[Trial], int]:
    """The layouts to try on one mesh, and how many are possible.

    Raises:
        ValueError: a sample without tensors.
    """
    found: list[Trial] = []
    total = 0
    for index, sample in enumerate(samples):
        if not sample.operands:
            raise ValueError(f"check_rule: no tensor in sample {index}: {sample.args}")
        if placements is None:
            drawn, count = combinations(sample.operands, sizes, most, seed)
        else:
            drawn = _given(placements, len(sizes), len(sample.operands))
            count = len(drawn)
        found += [Trial(index, sizes, combination) for combination in drawn]
        total += count
    return found, total


def _given(
    placements: Sequence[Sequence[Sequence[object]]], axes: int, operands: int
) -> list[Combination]:
    """Those of the caller's layouts that have this number of mesh axes and of operands."""
    converted = [tuple(tuple(map(as_placement, each)) for each in one) for one in placements]
    return [
        one for one in converted if len(one) == operands and all(len(each) == axes for each in one)
    ]


@dataclass
class _Work:
    """A function and its samples, with what one device gives for each.

    Attributes:
        func: the function.
        samples: its arguments.
        gradients: whether to compare gradients.
        seed: determines all random numbers.
        tolerance: `rtol` and `atol` of `torch.testing.assert_close`.
        expected: per sample, what one device gives.
    """

    func: Callable[..., Any]
    samples: list[Sample]
    gradients: bool
    seed: int
    tolerance: dict[str, Any]
    expected: list[ExpectedResult] = field(init=False)

    def __post_init__(self) -> None:
        self.expected = []
        for index, sample in enumerate(self.samples):
            try:
                self.expected.append(expected_of(self.func, sample, self.gradients, self.seed))
            except Exception as error:
                error.add_note(f"check_rule: of sample {index}, on one device")
                raise

    def run(self, name: str, sizes: tuple[int, ...], trials: Sequence[Trial]) -> list[Outcome]:
        """Run trials on a mesh of these sizes; the outcomes are those of rank 0.

        Raises:
            RuleCheckError: one of them differs from one device.
        """
        try:
            return simulate(prod(sizes)).run(self._on_rank, sizes, trials)[0]  # type: ignore[no-any-return]
        except SimulationError as error:
            found = _first_failure(error)
            if found is None:
                raise
            sample = self.samples[found.trial.sample]
            text = failure_text(name, found.trial, sample, found.mode, found.plans, found.words)
            raise RuleCheckError(text) from found.__cause__

    def _on_rank(
        self, rank: int, world_size: int, sizes: tuple[int, ...], trials: Sequence[Trial]
    ) -> list[Outcome]:
        # All trials in one simulation: starting the threads costs more than most trials. Ranks go
        # through them in one order, so the first that fails on any rank is the simplest.
        device = self.samples[0].operands[0].device.type
        mesh = init_device_mesh(device, sizes)
        return [self._trial(trial, mesh) for trial in trials]

    def _trial(self, trial: Trial, mesh: Any) -> Outcome:
        path = _Path(self.func)
        func: Callable[..., Any] = path.watch
        for mode in _modes(self.gradients, self.expected[trial.sample].written):
            try:
                run_on_mesh(
                    func,
                    self.samples[trial.sample],
                    self.expected[trial.sample],
                    mesh,
                    trial.placements,
                    mode,
                    self.seed,
                    self.tolerance,
                )
            except Exception as error:
                raise _Failure(trial, mode, path.plans, error) from error
            # Only the first call is observed: observed calls take the slow path, and the others
            # are there to run compiled calls.
            func = self.func
        return path.outcome(trial)


def _modes(gradients: bool, written: bool) -> list[Mode]:
    """The code paths to run each layout on; `written`: whether the function writes to operands."""
    if not gradients:
        return [Mode("first call", False), Mode("an equal call", False)]
    modes = [
        Mode("first call", True),
        Mode("an equal call", True),
        Mode("operands that are no leaves", True, leaves=False),
        Mode("without gradients", False),
    ]
    # torch forbids in-place ops on leaves that require grad.
    return [Mode("first call", True, leaves=False), *modes[2:]] if written else modes


class _Failure(Exception):
    """A trial that failed on this rank, with the plans that had run."""

    def __init__(self, trial: Trial, mode: Mode, plans: list[OpPlan], error: Exception) -> None:
        super().__init__(str(error))
        self.trial, self.mode, self.plans, self.error = trial, mode, plans, error

    @property
    def words(self) -> str:
        """What went wrong."""
        if isinstance(self.error, Difference):
            return str(self.error)
        return f"raised {type(self.error).__name__}: {self.error}"


def _first_failure(error: SimulationError) -> _Failure | None:
    """The failure of the first rank that has one of its own; None: no rank failed in a trial.

    When one rank raises, the others find it missing in a collective: that is not the cause.
    """
    found = [e for _, e in sorted(error.errors.items()) if isinstance(e, _Failure)]
    return min(found, key=lambda e: isinstance(e.error, DeadlockError), default=None)
