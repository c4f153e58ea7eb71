"""Move a package to its next version: its version file and the heading of its changelog.

`python -m tools.bump rng release` dates the heading of the version in the checkout, ready for
the tag; `... rng minor` (or patch, major) opens the next version with an undated heading. Between
the two, `... rng rc` makes release candidates of it, 0.2.0rc1 and on; the heading stays as it is.
Where the packages that need it declare a range that leaves the new version out, the range is
stretched until it holds it: nobody could install them beside it.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tools import packages
from tools.packages import Package, find
from tools.tags import VERSION, final

PARTS = ("major", "minor", "patch")


def next_version(version: str, part: str) -> str:
    """The version after `version`: minor of 0.1.3 is 0.2.0, rc of 0.2.0rc1 is 0.2.0rc2."""
    if part == "rc":
        match = VERSION.fullmatch(version)
        last = int(match[5]) if match and match[4] == "rc" else 0
        return f"{final(version)}rc{last + 1}"
    if version != final(version):
        raise ValueError(f"{version} is a pre-release: release it first, or make another rc of it")
    numbers = [int(number) for number in version.split(".")]
    at = PARTS.index(part)
    return ".".join(map(str, [*numbers[:at], numbers[at] + 1, *([0] * (2 - at))]))


def dated(changelog: str, version: str, day: datetime.date) -> str:
    """The changelog with the heading of `version` dated."""
    heading = f"## {version} (unreleased)"
    if heading not in changelog:
        raise ValueError(f"CHANGELOG.md has no heading `{heading}`")
    return changelog.replace(heading, f"## {version} ({day.isoformat()})", 1)


def opened(changelog: str, version: str) -> str:
    """The changelog with an empty section for `version` above the others."""
    if "(unreleased)" in changelog:
        raise ValueError("CHANGELOG.md has an unreleased section: release that first")
    title, _, sections = changelog.partition("\n## ")
    return f"{title}\n## {version} (unreleased)\n\n## {sections}"


def stretched(text: str, project: str, version: str) -> str:
    """The text with each range of the project such that it holds the version.

    The lower end stays where it is, so that a package goes on to be tried beside the release
    before; only before a first release it is a candidate, 0.1.0rc1, and afterwards that release.
    """
    major, minor, patch = (int(one) for one in final(version).split("."))
    upper = f"{major + 1}" if major else f"0.{minor + 1}"

    def wider(match: re.Match[str]) -> str:
        lower = match["lower"]
        if version != final(version) and final(version) == padded(lower) and not patch:
            lower = version
        elif VERSION.fullmatch(lower) and lower != final(lower):
            lower = f"{major}.{minor}" if final(lower) == final(version) else final(lower)
        return f"{project}>={lower},<{upper}"

    return re.sub(rf"{re.escape(project)}>=(?P<lower>[\w.]+),<[\w.]+", wider, text)


def padded(version: str) -> str:
    """0.1.0 of 0.1, of 0.1.0 and of 0.1.0rc1."""
    numbers = re.findall(r"\d+", re.split(r"a|b|rc", version)[0])
    return ".".join([*numbers, "0", "0"][:3])


def ranges() -> list[Path]:
    """The files that say which versions of packages of this workspace others need."""
    found = [packages.ROOT / "tools" / "packages.py"]
    found += sorted(packages.ROOT.glob("packages/*/pyproject.toml"))
    return [path for path in found if path.exists()]


def bump(package: Package, part: str, day: datetime.date) -> str:
    """Edit the files of one package; returns its version afterwards."""
    log = package.folder / "CHANGELOG.md"
    version = package.version
    if part == "release":
        new = final(version)
        log.write_text(dated(log.read_text(), new, day))
    elif part == "rc":
        if f"## {final(version)} (unreleased)" not in log.read_text():
            raise ValueError(f"{version} is released: open the next version first")
        new = next_version(version, part)
    else:
        new = next_version(version, part)
        log.write_text(opened(log.read_text(), new))
    text = package.version_file.read_text()
    package.version_file.write_text(text.replace(f'"{version}"', f'"{new}"'))
    for path in ranges():
        path.write_text(stretched(path.read_text(), package.name, new))
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bump", description=__doc__)
    parser.add_argument("package")
    parser.add_argument("part", choices=("release", "rc", *PARTS))
    options = parser.parse_args(arguments)
    try:
        package = find(options.package)
        today = datetime.datetime.now(datetime.UTC).date()
        version = bump(package, options.part, today)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{package.name} is at {version}")
    if options.part in ("release", "rc"):
        print(f"next: commit, then tag {package.name}-v{version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
