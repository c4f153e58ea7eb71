"""Build the last tagged release of each package into dist-released/.

Each is built from a git worktree of its tag, so this works before anything is published and
without a network. A package without a tag is named, with the reason, and left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools import tags, wheels
from tools.git import git
from tools.packages import PACKAGES, ROOT, Package

RELEASED = ROOT / "dist-released"


def artifacts(package: Package, tag: str) -> tuple[Path, Path]:
    """Where the wheel and the sdist of that release are built."""
    stem = f"{package.module}-{tags.parse(tag)[1]}"
    return RELEASED / f"{stem}-py3-none-any.whl", RELEASED / f"{stem}.tar.gz"


def build(package: Package, tag: str) -> None:
    """Build one release, unless it is there: a tag does not move."""
    if all(path.exists() for path in artifacts(package, tag)):
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        git("worktree", "add", "--detach", "--quiet", str(tree), tag)
        try:
            wheels.make(tree / package.folder.relative_to(ROOT), RELEASED)
        finally:
            git("worktree", "remove", "--force", str(tree))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.release_builds", description=__doc__)
    parser.parse_args(arguments)
    known = tags.before_head()
    for package in PACKAGES:
        tag = tags.last(package, known)
        if tag is None:
            print(f"{package.name}: no tag {package.name}-v* yet, so no release to build")
            continue
        build(package, tag)
        print(f"{package.name}: {tag} is in {RELEASED.name}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
