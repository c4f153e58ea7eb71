"""Turn the list of nox sessions (`nox -l --json`, on stdin) into a GitHub matrix.

Every session tagged `ci` runs on the oldest Python; those tagged `each-python` run on all. With
`--nightly` it is those tagged `nightly`, which take longer than a change should wait. What nox
lists beside these, because they require it, CI need not run by itself.

With `--since COMMIT` only what may have changed since then is tested: the tests of the packages
that changed and of those that lean on them. A change outside of packages/ may concern everything.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from tools import parts
from tools.git import git
from tools.packages import PACKAGES, PYTHONS, ROOT, Package

# Minutes after which a session has hung, where it is not the usual ones: several times what it
# takes on the four cores of a hosted runner.
USUAL = 40
MINUTES = {"tests": 60, "floors": 120, "compat": 120, "models": 120, "torches": 150}
MINUTES |= {"ecosystem": 120, "all_parts": 120, "fuzz": 150}
# Of .github/workflows/gpu.yml, which no matrix starts: one test alone has 30.
MINUTES |= {"gpu": 90}
# Sessions that take package folders, so that they can be told what to leave out.
BY_FOLDER = ("tests",)
# Sessions of which each part is a row of its own.
BY_PART = ("all_parts",)
# Of random programs every night has others: their numbers begin with the run's.
FUZZED = "--minutes 120 --seed {run}00000"


def affected(paths: Iterable[str]) -> tuple[Package, ...]:
    """The packages whose tests a change of these files may break, in dependency order."""
    changed = set[str]()
    for path in map(PurePosixPath, paths):
        if path.parts[0] == "packages" and len(path.parts) > 2:
            changed.add(path.parts[1])
        elif len(path.parts) > 1 or path.suffix != ".md":  # documents at the top concern no package
            return PACKAGES
    for package in PACKAGES:
        leans_on = package.siblings + package.optional_siblings + package.test_siblings
        if changed.intersection(leans_on):
            changed.add(package.name)
    return tuple(package for package in PACKAGES if package.name in changed)


def matrix(
    sessions: Sequence[Mapping[str, Any]],
    packages: Sequence[Package] = PACKAGES,
    tag: str = "ci",
) -> dict[str, list[dict[str, Any]]]:
    """The value of `strategy.matrix`: one row for each session and Python."""
    spared = {f"({package.short})" for package in PACKAGES if package not in packages}
    folders = [f"packages/{package.name}/tests" for package in packages]
    rows = []
    for session in sessions:
        name = session["session"]
        if tag not in session["tags"] or name.endswith(tuple(spared)):
            continue
        arguments = [""]
        if name in BY_FOLDER and len(packages) < len(PACKAGES):
            arguments = [" ".join([*folders, "tools/tests"])]
        elif name in BY_PART:
            arguments = [str(part) for part in parts.EVERY]
        elif name == "fuzz":
            arguments = [FUZZED.format(run=os.environ.get("GITHUB_RUN_NUMBER", ""))]
        minutes = MINUTES.get(name.split("(")[0], USUAL)
        pythons = PYTHONS if "each-python" in session["tags"] else PYTHONS[:1]
        rows += [
            {"session": name, "arguments": some, "minutes": minutes, "python": python}
            for some in arguments
            for python in pythons
        ]
    return {"include": rows}


def changed_since(commit: str) -> list[str]:
    """The files of this checkout that differ from what it branched off of `commit`."""
    # A file that moved is told twice: where it was, it is missing.
    return git("diff", "--name-only", "--no-renames", f"{commit}...HEAD", folder=ROOT).splitlines()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.matrix", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--since", metavar="COMMIT", help="test what changed; default: everything")
    parser.add_argument("--nightly", action="store_true", help="the sessions that take long")
    options = parser.parse_args(arguments)
    packages = affected(changed_since(options.since)) if options.since else PACKAGES
    tag = "nightly" if options.nightly else "ci"
    print(json.dumps(matrix(json.load(sys.stdin), packages, tag)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
