"""The comparison itself: which runs, in which order, and what is printed about them."""

import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vescale_parallel.compare import findings
from vescale_parallel.compare.launch import Launch, follow
from vescale_parallel.compare.options import ONE, CompareOptions
from vescale_parallel.compare.picture import draw_curves
from vescale_parallel.train.log import Bar
from vescale_parallel.train.options import parse_mesh


@dataclass(frozen=True)
class Finished:
    """A run that ended well."""

    title: str
    events: findings.Events

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step."""
        return findings.losses(self.events)


def compare(options: CompareOptions) -> bool:
    """Run everything, print and write what was found; True when every promise was kept."""
    options.out.mkdir(parents=True, exist_ok=True)
    total = options.steps + options.more_steps
    one = _run(options, ONE, "one-device", 0, total, ("--digests", "--save-every", "-1"))
    mesh = _run(options, options.mesh, "mesh", 0, options.steps, ("--digests",))
    print("\n" + findings.loss_table(one.losses, {mesh.title: mesh.losses}, list(mesh.losses)))
    broken = _report_equality(one, mesh)
    checkpoint = options.out / "mesh" / f"step-{options.steps:08d}"
    resumed = [
        _run(options, where, f"resumed-{_slug(where)}", options.steps, total, _resume(checkpoint))
        for where in options.resume_on
    ]
    if resumed:
        broken += _report_resumed(one, resumed)
    _write(options.out, one, [mesh, *resumed], broken)
    for promise in broken:
        print(f"BROKEN: {promise}")
    return not broken


def _resume(checkpoint: Path) -> tuple[str, ...]:
    return ("--resume", str(checkpoint), "--save-every", "-1")


def _slug(mesh: str) -> str:
    return mesh.replace("=", "").replace(",", "-")


def _run(
    options: CompareOptions, mesh: str, folder: str, first: int, last: int, more: tuple[str, ...]
) -> Finished:
    """One run of the trainer, with its progress shown."""
    processes = 1 if mesh == ONE else math.prod(parse_mesh(mesh).values())
    resumed = "resumed on " if first else ""
    title = resumed + ("one device" if mesh == ONE else mesh)
    total = str(options.steps + options.more_steps)
    schedule = ("--steps", str(last), "--decay-steps", total, "--overwrite")
    where = () if mesh == ONE else ("--mesh", mesh)
    launch = Launch(
        title, options.out / folder, processes, (*options.training, *where, *schedule, *more)
    )
    with _Display(title, processes, first, last) as display:
        events = follow(launch, options.time_limit, display.show)
    return Finished(title, events)


class _Display:
    """Progress of a child: a bar on a terminal, one line at the end elsewhere."""

    def __init__(self, title: str, processes: int, first: int, last: int) -> None:
        self._title = f"{title} ({processes} process{'es' if processes > 1 else ''})"
        self._bar = Bar(self._title, last, first) if sys.stderr.isatty() else None
        self._last: Mapping[str, Any] | None = None
        self._rate = 0.0
        self._started = time.perf_counter()

    def __enter__(self) -> "_Display":
        return self

    def show(self, events: list[dict[str, Any]]) -> None:
        """Show the newest step of the log."""
        steps = [event for event in events if event["event"] == "step"]
        if not steps:
            return
        # The median leaves out the first steps, where tables and plans are made.
        rates = sorted(event["tokens_per_second"] for event in steps)
        self._last, self._rate = steps[-1], rates[len(rates) // 2]
        if self._bar is not None:
            self._bar.update(self._last["step"], self._last["loss"], self._rate)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._last is not None:
            seconds = time.perf_counter() - self._started
            print(
                f"{self._title}: step {self._last['step']}, loss {self._last['loss']:.4f}, "
                f"{self._rate:,.0f} tokens/s, {seconds:.0f} s in all",
                flush=True,
            )


def _report_equality(one: Finished, mesh: Finished) -> list[str]:
    """Print the three facts; returns the promises that do not hold."""
    parameters = findings.compare_digests("parameters", one.events, mesh.events)
    masks = findings.compare_digests("dropout", one.events, mesh.events)
    whole = findings.largest_difference(one.losses, mesh.losses)
    first = findings.largest_difference(findings.early(one.losses), mesh.losses)
    facts = {
        "initial parameters bitwise equal": f"{_yes(parameters)} (sha256 {parameters.first[:16]})",
        "dropout masks bitwise equal": f"{_yes(masks)} ({masks.count} masks of the first step)",
        "largest loss difference": f"{whole.relative:.1e} relative, at step {whole.step} "
        f"({first.relative:.1e} over the first {findings.EARLY_STEPS})",
    }
    print("\n" + "\n".join(f"{what + ':':34}{fact}" for what, fact in facts.items()))
    broken = [] if parameters.equal else ["the initial parameters differ"]
    if not masks.equal:
        broken.append(f"dropout masks differ: {', '.join(masks.differing) or 'none were seen'}")
    if first.relative > findings.EARLY_BOUND:
        broken.append(f"losses differ by more than {findings.EARLY_BOUND} in the first steps")
    return broken + _whole_curve(mesh, whole)


def _yes(digests: findings.Digests) -> str:
    return "yes" if digests.equal else "NO"


def _report_resumed(one: Finished, resumed: list[Finished]) -> list[str]:
    """Print how resumed runs continue the curve; returns the promises that do not hold."""
    curves = {run.title.removeprefix("resumed on "): run.losses for run in resumed}
    print("\nthe checkpoint, resumed on other meshes:\n")
    print(findings.loss_table(one.losses, curves, list(resumed[0].losses)))
    broken: list[str] = []
    for run in resumed:
        difference = findings.largest_difference(one.losses, run.losses)
        print(f"{run.title}: largest difference {difference.relative:.1e} relative")
        broken += _whole_curve(run, difference)
    return broken


def _whole_curve(run: Finished, difference: findings.Difference) -> list[str]:
    if difference.relative <= findings.WHOLE_BOUND:
        return []
    return [f"{run.title} leaves the curve at step {difference.step} ({difference.relative:.1e})"]


def _write(out: Path, one: Finished, others: list[Finished], broken: list[str]) -> None:
    """The curves, all logs in one file, and the result as JSON."""
    draw_curves(out / "curves.png", one.losses, {run.title: run.losses for run in others})
    with (out / "log.jsonl").open("w") as log:
        for run in (one, *others):
            for event in run.events:
                log.write(json.dumps({"run": run.title, **event}) + "\n")
    results = {
        run.title: asdict(findings.largest_difference(one.losses, run.losses)) for run in others
    }
    (out / "results.json").write_text(
        json.dumps({"largest_difference": results, "broken": broken}, indent=2) + "\n"
    )
    print(f"\nwrote {out}/curves.png, log.jsonl, results.json, and the checkpoint in {out}/mesh")
