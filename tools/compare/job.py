"""The comparison itself: which runs, in which order, and what is printed about them."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from vescale_parallel.train.log import json_line
from vescale_parallel.train.options import parse_mesh

from tools.compare import findings
from tools.compare.display import Display
from tools.compare.launch import Launch, follow
from tools.compare.options import ONE, CompareOptions
from tools.compare.picture import draw_curves


@dataclass(frozen=True)
class Leg:
    """One run of the comparison.

    Attributes:
        title: what tables and curves call it.
        mesh: as the trainer reads it, or `one`.
        folder: its folder in the comparison's.
        first: the step it starts from.
        last: the step it ends with.
        arguments: options of the trainer that only this run has.
    """

    title: str
    mesh: str
    folder: str
    first: int
    last: int
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class FinishedRun:
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
    reference, on_mesh, *rest = legs(options)
    sharded, later = [one for one in rest if not one.first], [one for one in rest if one.first]
    # One after the other: runs that share the cores would measure each other.
    one = _run(options, reference)
    mesh = _run(options, on_mesh)
    print("\n" + findings.loss_table(one.losses, mesh.title, mesh.losses))
    broken = report_equality(one, mesh)
    zero = [_run(options, leg) for leg in sharded]
    for run in zero:
        print(f"\n{run.title}")
        broken += report_equality(one, run)
    held = {run.title: run.events for run in (one, mesh, *zero)}
    print("\nheld between steps, MB of the rank with most\n\n" + findings.memory_table(held) + "\n")
    resumed = [_run(options, leg) for leg in later]
    if resumed:
        meshes = [_named(leg.mesh) for leg in later]
        broken += _report_resumed(one, dict(zip(meshes, resumed, strict=True)))
    _write(options.out, one, [mesh, *zero, *resumed], broken)
    for promise in broken:
        print(f"BROKEN: {promise}")
    return not broken


def legs(options: CompareOptions) -> list[Leg]:
    """The runs in order: one device to the very end, the mesh, ZeRO, the checkpoint elsewhere."""
    half, end = options.steps, options.steps + options.more_steps
    checkpoint = options.out / "mesh" / f"step-{half:08d}"
    zero = ("--zero", "3", "--digests", "--save-every", "-1")
    resume = ("--resume", str(checkpoint), "--save-every", "-1")
    return [
        Leg("one device", ONE, "one-device", 0, end, ("--digests", "--save-every", "-1")),
        Leg(options.mesh, options.mesh, "mesh", 0, half, ("--digests",)),
        *(
            Leg(f"{mesh}, zero=3", mesh, f"zero-{_slug(mesh)}", 0, half, zero)
            for mesh in options.zero_on
        ),
        *(
            Leg(f"resumed on {_named(mesh)}", mesh, f"resumed-{_slug(mesh)}", half, end, resume)
            for mesh in options.resume_on
        ),
    ]


def _named(mesh: str) -> str:
    return "one process" if mesh == ONE else mesh


def _slug(mesh: str) -> str:
    return mesh.replace("=", "").replace(",", "-")


def _run(options: CompareOptions, leg: Leg) -> FinishedRun:
    """One run of the trainer, with its progress shown."""
    processes = 1 if leg.mesh == ONE else math.prod(parse_mesh(leg.mesh).values())
    where = () if leg.mesh == ONE else ("--mesh", leg.mesh)
    # The learning rate of every run must follow the schedule of the longest.
    total = str(options.steps + options.more_steps)
    schedule = ("--steps", str(leg.last), "--decay-steps", total, "--overwrite")
    arguments = (*options.training, *where, *schedule, *leg.arguments)
    launch = Launch(leg.title, options.out / leg.folder, processes, arguments)
    with Display(leg.title, processes, leg.first, leg.last) as display:
        events = follow(launch, options.time_limit, display.show)
    return FinishedRun(leg.title, events)


def report_equality(one: FinishedRun, mesh: FinishedRun) -> list[str]:
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


def _report_resumed(one: FinishedRun, resumed: dict[str, FinishedRun]) -> list[str]:
    """Print how resumed runs continue the curve; returns the promises that do not hold."""
    curves = {mesh: run.losses for mesh, run in resumed.items()}
    print("\nresumed from the mesh's checkpoint: differences from one device, uninterrupted\n")
    print(findings.difference_table(one.losses, curves) + "\n")
    broken: list[str] = []
    for mesh, run in resumed.items():
        difference = findings.largest_difference(one.losses, run.losses)
        print(f"{f'largest difference on {mesh}:':36}{difference.relative:.1e} relative")
        broken += _whole_curve(run, difference)
    return broken


def _whole_curve(run: FinishedRun, difference: findings.Difference) -> list[str]:
    if difference.relative <= findings.WHOLE_BOUND:
        return []
    return [f"{run.title} leaves the curve at step {difference.step} ({difference.relative:.1e})"]


def _write(out: Path, one: FinishedRun, others: list[FinishedRun], broken: list[str]) -> None:
    """The curves, all logs in one file, and the result as JSON."""
    draw_curves(out / "curves.png", one.losses, {run.title: run.losses for run in others})
    with (out / "log.jsonl").open("w") as log:
        for run in (one, *others):
            for event in run.events:
                log.write(json_line({"run": run.title, **event}))
    results = {
        run.title: asdict(findings.largest_difference(one.losses, run.losses)) for run in others
    }
    (out / "results.json").write_text(
        json.dumps({"largest_difference": results, "broken": broken}, indent=2, allow_nan=False)
        + "\n"
    )
    print(f"\nwrote {out}/curves.png, log.jsonl, results.json, and the checkpoint in {out}/mesh")
