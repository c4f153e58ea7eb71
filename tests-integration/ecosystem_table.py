"""Writes ECOSYSTEM.md of vescale-parallel: what of other people's libraries trains as one device.

python tests-integration/ecosystem_table.py [LIBRARY...]

`nox -s ecosystem` installs the libraries and runs it. A case that fails is named with its error; a
library that is not installed keeps the rows that it has. It fails also where the table that was
there says something else of a case: then that has to be committed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from ecosystem_runs import FOLDER, LAYOUTS, compare, load
from vescale_comm.testing import WorkerError, run

FILE = Path(__file__).parent.parent / "packages" / "vescale-parallel" / "ECOSYSTEM.md"
LIMIT = 1e-5
HEAD = """# Other people's libraries

What trains over four ranks as on one device. Written by `python -m nox -s ecosystem` with torch
{torch} on CPU; each row is a function of a file in `tests-integration/ecosystem/`, which trains a
small model with dropout for a few steps, once on one device and once on each mesh.

- **lines**: those of the case that a user writes for the mesh, the call of `parallelize` or of the
  integration, with its import. The rest is what runs on one device.
- **difference**: the largest of all losses, metrics, predictions and trained parameters, relative
  to the largest element of their tensor (of numbers: to 1 at least). A case passes below {limit};
  one that computes in bfloat16, or that rounding alone moves further, below the limit in brackets.

| library | what | lines | {layouts} |
|---|---|---|{dashes}|
{rows}

## What does not

{failures}
"""


def words(found: dict[str, float], limit: float) -> str:
    """The largest difference; which one it is, where it is too large."""
    worst = max(found, key=found.__getitem__)
    largest = found[worst]
    said = f"{largest:.0e}" if largest else "0"
    if not largest <= limit:
        return f"**{said}** ({worst})"
    return said if limit == LIMIT else f"{said} ({limit:.0e})"


def lines_of(module: Any) -> int:
    """How many lines of a library's file speak of the mesh: what a user adds."""
    code = inspect.getsource(module)
    marks = r"run\.parallelize|run\.mesh,|mesh=run\.mesh|vescale_parallel|of_whole_batches\("
    told = re.findall(rf"^.*(?:{marks}).*$", code, re.M)
    return max(1, len({line.strip() for line in told}))


def measured(library: str) -> tuple[list[str], list[str]]:
    """Rows of a library, and what failed."""
    module = load(library)
    version = importlib.metadata.version(module.PACKAGES[0])
    rows, failures = [], []
    refused: dict[tuple[str, str], str] = getattr(module, "REFUSED", {})
    for case in module.CASES:
        limit = getattr(module, "LIMITS", {}).get(case, LIMIT)
        layouts = [one for one in LAYOUTS if (case, one) not in refused]
        try:
            found = run(compare, 4, library, case, layouts, timeout=600)[0]
            cells = [words(found[one], limit) if one in found else "no" for one in LAYOUTS]
        except WorkerError as error:
            cells = ["-"] * len(LAYOUTS)
            failures.append(f"- {module.PACKAGES[0]}, {case}: {last_line(str(error))}")
        print(library, case, *cells, sep=" | ", flush=True)
        first = f"| {module.PACKAGES[0]} {version} | {case} | {lines_of(module)}"
        rows.append(f"{first} | {' | '.join(cells)} |")
    for (case, layout), reason in refused.items():
        failures.append(f"- {module.PACKAGES[0]}, {case}, on {layout}: {reason}.")
    failures += [f"- {module.PACKAGES[0]}, {note}." for note in getattr(module, "NOTES", ())]
    return rows, failures


def last_line(error: str) -> str:
    """What the first rank that raised said."""
    raised = re.findall(r"^(?:[\w.]+(?:Error|Exception|Warning|Refused)): .*$", error, re.M)
    return raised[0][:300] if raised else error.splitlines()[0]


def written(wanted: list[str]) -> bool:
    """Write the table, library by library; returns whether everything is as it should be."""
    every = sorted(path.stem for path in FOLDER.glob("*.py"))
    old = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
    known = {library: known_rows(old, load_name(library)) for library in every}
    good = True
    for library in wanted or every:
        if importlib.util.find_spec(library) is None:
            print(f"{library} is not installed: its rows stay as they are", flush=True)
            good &= bool(wanted)
            continue
        try:
            known[library] = measured(library)
        except Exception:
            traceback.print_exc()
            good = False
            continue
        # Now, so that an interrupted session keeps what it has found.
        FILE.write_text(table_of(list(known.values())), encoding="utf-8")
        good &= not any("**" in row or "| - |" in row for row in known[library][0])
    changed = verdicts(old) ^ verdicts(FILE.read_text(encoding="utf-8"))
    print("".join(f"not as the table said: {one}\n" for one in sorted(changed)), end="", flush=True)
    return good and not changed


def verdicts(table: str) -> set[str]:
    """What a table says of each case, whatever the versions and how large the differences."""
    rows = [line for line in table.splitlines() if re.match(r"\| \S+ \d", line)]
    return {re.sub(r"(?<=\| )\d\S*(?= [|(])|(?<=^\| )(\S+) \S+", r"\1", row) for row in rows}


def known_rows(table: str, name: str) -> tuple[list[str], list[str]]:
    """Rows and failures of a library in a table."""
    lines = table.splitlines()
    rows = [line for line in lines if line.startswith(f"| {name} ")]
    return rows, [line for line in lines if line.startswith(f"- {name}, ")]


def table_of(known: list[tuple[list[str], list[str]]]) -> str:
    """The file, of the rows and failures of each library."""
    rows = [row for found, _ in known for row in found]
    failures = [line for _, found in known for line in found]
    torch = importlib.metadata.version("torch").partition("+")[0]
    return HEAD.format(
        torch=torch,
        limit=f"{LIMIT:.0e}",
        layouts=" | ".join(LAYOUTS),
        dashes="---|" * (len(LAYOUTS) - 1) + "---",
        rows="\n".join(rows),
        failures="\n".join(failures) or "Nothing of the above.",
    )


def load_name(library: str) -> str:
    """The distribution that a file is about, without importing it."""
    text = (FOLDER / f"{library}.py").read_text(encoding="utf-8")
    found = re.search(r'^PACKAGES = \("([^"]+)"', text, re.M)
    assert found is not None, f"{library}.py: no PACKAGES"
    return found[1]


if __name__ == "__main__":
    sys.exit(not written(sys.argv[1:]))
