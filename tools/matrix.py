"""Turn the list of nox sessions (`nox -l --json -t ci`, on stdin) into a GitHub matrix.

Every session tagged `ci` runs on the oldest Python; those tagged `each-python` run on all. nox
also lists the sessions that these require, which CI need not run by themselves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tools.packages import PYTHONS


def matrix(sessions: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, str]]]:
    """The value of `strategy.matrix`: one row for each session and Python."""
    rows = []
    for session in sessions:
        if "ci" not in session["tags"]:
            continue
        pythons = PYTHONS if "each-python" in session["tags"] else PYTHONS[:1]
        rows += [{"session": session["session"], "python": python} for python in pythons]
    return {"include": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    argparse.ArgumentParser(prog="python -m tools.matrix", description=__doc__).parse_args(
        arguments
    )
    print(json.dumps(matrix(json.load(sys.stdin))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
