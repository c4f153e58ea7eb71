"""The fixed core of a test suite: which cases run on every change, chosen by their names.

A case is in the core, or it is marked `slow`. Long tables of like cases name in a file how many of
them are in the core; which these are follows from their names alone, so that two runs of one commit
run the same cases, on any day and on any machine.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def choose_core(items: Iterable[Any], folder: Path) -> None:
    """Mark as `slow` what `folder/core.txt` leaves out of the core.

    Called with what pytest has collected, before `-m` is looked at:

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(items):
            choose_core(items, Path(__file__).parent)

    A line of the file is one of

        zero/test_training 10                  one case in 10 of each parametrized test of this file
        zero/test_training::test_clipping 2    the same of one test
        zero/test_failures::test_raised 0      a test that is not in the core at all
        zero/test_training::test_steps[dp2]    a case that is in it whatever its test's line says

    and comments begin with `#`. Of n cases, n / share rounded up are in the core: those whose names
    have the smallest CRC-32. So a test of the core always has at least one case in it.

    Args:
        items: the collected items of pytest; those outside of `folder` are left alone.
        folder: the folder of tests that holds `core.txt`.

    Raises:
        ValueError: a line has another form.
    """
    shares, kept = read_core(folder / "core.txt")
    tests: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if folder in item.path.parents:
            file = item.path.relative_to(folder).with_suffix("").as_posix()
            tests[f"{file}::{item.originalname}"].append(item)
    for test, cases in tests.items():
        file = test.split("::")[0]
        of_file = shares.get(file, 1) if hasattr(cases[0], "callspec") else 1
        share = shares.get(test, of_file)
        named = sorted(cases, key=lambda item: (zlib.crc32(item.name.encode()), item.name))
        for item in named[math.ceil(len(cases) / share) if share else 0 :]:
            if f"{file}::{item.name}" not in kept:
                item.add_marker("slow")


def read_core(table: Path) -> tuple[Mapping[str, int], frozenset[str]]:
    """Read a table: the shares by file or test, and the cases that are kept whatever these say.

    Raises:
        ValueError: a line has another form.
    """
    shares, kept = {}, set()
    for number, line in enumerate(table.read_text().splitlines(), 1):
        words = line.split(" #")[0].strip()
        if not words or words[0] == "#":
            continue
        if words.endswith("]"):
            kept.add(words)
            continue
        name, _, share = words.rpartition(" ")
        if not name.strip() or not share.isdecimal():
            raise ValueError(f"{table}:{number}: not `file share`, `file::test share` or a case")
        shares[name.strip()] = int(share)
    return shares, frozenset(kept)
