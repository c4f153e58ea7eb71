"""Find the lowest declared versions that can be had here, and write them as constraints.

A floor that cannot be had is raised to the next version that can, and the reason is printed. For
torch on Linux only CPU builds count, so that no run of this pulls gigabytes of CUDA libraries.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.packages import TEST_TOOLS, project_of, third_party

UNTESTED_HERE = ("triton",)  # needed by GPU kernels only


def available(project: str) -> list[str]:
    """Versions of the project with a wheel for this Python and platform, newest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--only-binary", ":all:", project]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    match = re.search(r"Available versions: (.+)", listed)
    return match[1].split(", ") if match else []


def is_small(project: str, version: str) -> bool:
    """Whether installing it pulls no CUDA libraries."""
    return project != "torch" or not sys.platform.startswith("linux") or "+cpu" in version


def lowest(requirement: str, versions: Iterable[str]) -> tuple[str, str | None]:
    """The lowest version that can be had, and why it is not the declared floor (None if it is)."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    wanted = Requirement(requirement)
    fitting = sorted((one for one in versions if one in wanted.specifier), key=Version)
    usable = [one for one in fitting if is_small(wanted.name, one)]
    if not usable:
        raise ValueError(f"no version of {requirement} can be had here")
    (floor,) = (Version(one.version) for one in wanted.specifier if one.operator == ">=")
    if Version(usable[0]).release[: len(floor.release)] == floor.release:
        return usable[0], None
    if usable[0] != fitting[0]:
        return usable[0], "the lower builds offered here bring CUDA libraries"
    return usable[0], "no wheel of a lower version for this Python and platform"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.floors", description=__doc__)
    parser.add_argument("output", type=Path, help="the constraints file to write")
    options = parser.parse_args(arguments)
    lines = []
    for requirement in [*third_party(extras=True), *TEST_TOOLS]:
        project = project_of(requirement)
        if project in UNTESTED_HERE:
            continue
        version, reason = lowest(requirement, available(project))
        print(f"{requirement:24s} -> {version}{f'  (raised: {reason})' if reason else ''}")
        lines.append(f"{project}=={version}\n")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
