"""Checks what a run of pytest left out, and whether its session may leave that out.

A session that is green because its tests were skipped proves nothing. So each session states the
reasons for which its tests may be skipped; a skip for another reason, or a run in which everything
was skipped, is a failure. The reasons come from pytest's own report (`--junitxml`).

Standard library only: the noxfile imports it before anything is installed.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tools.packages import PACKAGES, project_of

# Patterns that a whole reason must match. What no session can mend: the machine is as it is.
MACHINE = (
    r"(here|this machine|it) .*(GPU|CUDA).*",
    r"needs a (GPU|CUDA device).*",
    r"no (CUDA device|GPU).*",
    r".*(named pipes|network namespaces|iproute2|no fork|only Linux tells).*",
    r"inductor needs a C\+\+ compiler: no g\+\+",
    r"there is no compiler here",
)
# Of a machine that has a GPU.
FEWER = (r"needs \d+ (GPUs|CUDA devices).*", r"needs 7 GB of free memory on the device")
# What a run cannot do by its nature, whatever is installed.
NATURE = (
    r"`Function\.apply` is Python in this torch",
    r"this torch has no Muon",
    r"torch knows no \w+ before \d+\.\d+",
    r"the interpreter rounds to fp8 in numpy, which has no such dtype",
    r"an interpreted kernel is not compiled",
    r"nobody wrote this layout by hand",
    r"nothing is captured in this layout",
    r"all of it runs",
    r"takes half an hour: ask for it with --opinfo-all",
    r"there is no kernel for it",
    r"torch itself cannot draw it: .*",
    r"((PARITY|STATE)\.md was written for|the table is of) another torch.*",
    r"torch 2\.11's own schedule sends from a rank to itself, which gloo cannot",
    r"the guide's table is of torch \d.*",
)
# What proves the kernels on a CPU only: beside a GPU they are compared with torch on it.
INTERPRETED = (r"needs triton and TRITON_INTERPRET=1: nox -s kernels_interpret",)
# What other sessions run: `models`, `remote`, `frameworks`, `ecosystem` and `kernels_interpret`.
MODELS = (r"transformers is not installed",)
REMOTE = (r"(s3fs|gcsfs|moto|gcp-storage-emulator) is not installed",)
JAX = (r"jax is not installed",)
# What `ecosystem` runs, and nothing else installs.
GUESTS = (r"(accelerate|datasets|lightning|peft|trl) is not installed",)
KERNELS = (r"triton is not installed", r".*TRITON_INTERPRET.*", r"could not import 'triton'.*")
ANYWHERE = MACHINE + FEWER + NATURE
# Everything of this workspace is installed, but what those sessions bring is not.
ALONE = ANYWHERE + MODELS + REMOTE + JAX + GUESTS + KERNELS
# Only some packages are installed, and no extras, which is what such a session is about.
_EXTRAS = {project_of(one) for each in PACKAGES for some in each.extras.values() for one in some}
_OURS = {one.name for one in PACKAGES} | _EXTRAS
PARTIAL = (
    *ALONE,
    rf"({'|'.join(sorted(map(re.escape, _OURS)))}) is not installed",
    r"installed without the benchmarks",
    r"could not import 'vescale_\w+'.*",
)


@dataclass(frozen=True)
class Outcome:
    """How many tests ran, and how often each reason for a skip was given."""

    ran: int
    skipped: Counter[str]

    @property
    def total(self) -> int:
        """Tests that ran and tests that did not."""
        return self.ran + self.skipped.total()


def read(report: Path) -> Outcome:
    """What a report of `pytest --junitxml` says; expected failures count as run."""
    ran, skipped = 0, Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        found = case.find("skipped")
        if found is None or found.get("type") == "pytest.xfail":
            ran += 1
        else:
            skipped[reason(found)] += 1
    return Outcome(ran, skipped)


def reason(skip: ElementTree.Element) -> str:
    """The words of a skip, in one line."""
    said = skip.get("message", "")
    if said == "collection skipped":  # of a whole file: the text is (path, line, words), in Python
        said = ast.literal_eval(skip.text or "")[2]
    return " ".join(said.split()).removeprefix("Skipped: ")


def faults(outcome: Outcome, allowed: Iterable[str]) -> list[str]:
    """Why the run proves less than its session promises, in words; empty where it does not."""
    patterns = [re.compile(one, re.IGNORECASE) for one in allowed]
    found = [
        f"{count} skipped, for a reason that this session does not allow: {words}"
        for words, count in sorted(outcome.skipped.items())
        if not any(pattern.fullmatch(words) for pattern in patterns)
    ]
    if outcome.skipped and not outcome.ran:
        found.append(f"nothing ran: all {outcome.total} tests were skipped")
    return found


def summary(outcome: Outcome) -> str:
    """One line: how many ran, how many did not and why."""
    if not outcome.skipped:
        return f"{outcome.ran} ran, none was skipped"
    reasons = "; ".join(f"{count} x {words}" for words, count in outcome.skipped.most_common())
    return f"{outcome.ran} ran, {outcome.skipped.total()} skipped: {reasons}"
