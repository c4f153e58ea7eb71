"""Reads a release tag: `vescale-rng-v0.1.0` is version 0.1.0 of vescale-rng.

`vescale-rng-v0.2.0rc1` is a pre-release (a, b or rc, as Python's versions have them): pip takes it
only when asked to, and no release is compared with it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from tools.git import git
from tools.packages import ROOT, Package, find

VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:(a|b|rc)(\d+))?")
TAG = re.compile(rf"(?P<name>vescale-[a-z]+)-v(?P<version>{VERSION.pattern})")


def parse(tag: str) -> tuple[Package, str]:
    """The package and the version that a tag names; ValueError for any other text."""
    match = TAG.fullmatch(tag)
    if match is None:
        raise ValueError(f"{tag!r} is no release tag: it must read like vescale-rng-v0.1.0")
    return find(match["name"]), match["version"]


def final(version: str) -> str:
    """The release that a version leads to: 0.2.0 of 0.2.0rc1, and of 0.2.0."""
    match = VERSION.fullmatch(version)
    if match is None:
        raise ValueError(f"{version!r} is no version: it must read like 0.1.0 or 0.1.0rc1")
    return ".".join(match.group(1, 2, 3))


def last(package: Package, tags: Sequence[str]) -> str | None:
    """The tag of the package's highest final version among `tags`; None without any."""
    versions = {parse(tag)[1]: tag for tag in tags
                if TAG.fullmatch(tag) and parse(tag)[0] is package}  # fmt: skip
    finals = [version for version in versions if final(version) == version]
    highest = max(finals, key=lambda one: [int(part) for part in one.split(".")], default=None)
    return None if highest is None else versions[highest]


def before_head() -> list[str]:
    """The tags of this repository but for those of the commit that is checked out.

    A release is tried against the one before it: when it is tagged, its own tag is there already.
    """
    known, here = (git("tag", *more, folder=ROOT) for more in ((), ("--points-at", "HEAD")))
    return sorted({*known.split()} - {*here.split()})


def changes(package: Package, version: str) -> str:
    """The section of its changelog about that version.

    Raises:
        ValueError: there is none, or it has no date yet; only a pre-release needs no date.
    """
    wanted = final(version)
    text = (package.folder / "CHANGELOG.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    for section in sections:
        heading, _, body = section.partition("\n")
        day = r"\d{4}-\d\d-\d\d" if version == wanted else r"(\d{4}-\d\d-\d\d|unreleased)"
        if re.fullmatch(rf"{re.escape(wanted)} \({day}\)", heading.strip()):
            return body.strip()
    raise ValueError(f"{package.name}: CHANGELOG.md has no heading `## {wanted} (YYYY-MM-DD)`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.tags", description=__doc__)
    parser.add_argument("tag", help="it must equal the version in the checkout")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--notes", action="store_true", help="print the changes, not the name")
    shown.add_argument("--kind", action="store_true", help="print release or prerelease")
    options = parser.parse_args(arguments)
    try:
        package, version = parse(options.tag)
        notes = changes(package, version)
        if version != package.version:
            raise ValueError(f"{options.tag}: the checkout holds {package.name} {package.version}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    kind = "release" if version == final(version) else "prerelease"
    print(notes if options.notes else kind if options.kind else package.short)
    return 0


if __name__ == "__main__":
    sys.exit(main())
