"""Ask the package index whether a package can be installed once it is published.

`python -m tools.package_index parallel` fails where a package of this workspace that it needs, or
that
an extra of it brings, has no version on the index within the range that it declares: publish that
one first. A final release may need no candidate: pip would take candidates for everybody.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from tools.packages import Package, find, siblings_in
from tools.tags import final


def needed(package: Package) -> list[str]:
    """What it requires of this workspace, extras included, each requirement once."""
    asked = [*package.requires, *(one for extra in package.offered.values() for one in extra)]
    return list(dict.fromkeys(one for one in asked if siblings_in([one])))


def on_index(requirement: str) -> bool:
    """Whether pip finds a version of that range, on the index that its settings name."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--dest", folder, requirement], capture_output=True, text=True
        )
    return done.returncode == 0


def faults(package: Package) -> Iterator[str]:
    """Why it could not be installed, in words."""
    for requirement in needed(package):
        candidate = re.search(r"\d(a|b|rc)\d", requirement) is not None
        if candidate and package.version == final(package.version):
            yield f"{package.name} {package.version} is final and needs a candidate: {requirement}"
        elif not on_index(requirement):
            yield f"the index has no {requirement}, which {package.name} needs: publish it first"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.package_index", description=__doc__)
    parser.add_argument("package")
    package = find(parser.parse_args(arguments).package)
    found = list(faults(package))
    print("".join(f"{one}\n" for one in found), end="", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
