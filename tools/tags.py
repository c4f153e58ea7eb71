"""What a release tag names: `vescale-rng-v0.1.0` is version 0.1.0 of vescale-rng."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence

from tools.packages import ROOT, Package, find

TAG = re.compile(r"(?P<name>vescale-[a-z]+)-v(?P<version>\d+\.\d+\.\d+)")


def parse(tag: str) -> tuple[Package, str]:
    """The package and the version that a tag names; ValueError for any other text."""
    match = TAG.fullmatch(tag)
    if match is None:
        raise ValueError(f"{tag!r} is no release tag: it must read like vescale-rng-v0.1.0")
    return find(match["name"]), match["version"]


def last(package: Package, tags: Sequence[str]) -> str | None:
    """The tag of the highest version of the package among `tags`; None without any."""
    own = [tag for tag in tags if TAG.fullmatch(tag) and parse(tag)[0] is package]
    return max(own, key=lambda tag: [int(part) for part in parse(tag)[1].split(".")], default=None)


def in_repository() -> list[str]:
    """All tags of this repository."""
    listed = subprocess.run(["git", "tag"], cwd=ROOT, check=True, capture_output=True, text=True)
    return listed.stdout.split()


def changes(package: Package, version: str) -> str:
    """The section of its changelog about that version; ValueError when it has no date yet."""
    text = (package.folder / "CHANGELOG.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    for section in sections:
        heading, _, body = section.partition("\n")
        if re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading.strip()):
            return body.strip()
    raise ValueError(f"{package.name}: CHANGELOG.md has no heading `## {version} (YYYY-MM-DD)`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.tags", description=__doc__)
    parser.add_argument("tag", help="it must equal the version in the checkout")
    parser.add_argument("--notes", action="store_true", help="print the changes, not the name")
    options = parser.parse_args(arguments)
    try:
        package, version = parse(options.tag)
        notes = changes(package, version)
        if version != package.version:
            raise ValueError(f"{options.tag}: the checkout holds {package.name} {package.version}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(notes if options.notes else package.short)
    return 0


if __name__ == "__main__":
    sys.exit(main())
