"""Print the latest benchmark runs as Markdown tables, keep them, and write documents from them.

With `--record` runs are kept in tools/bench/recorded, one a benchmark: the site shows all of them
as tables, beside the raw JSON. `--write` puts figures of what is kept into the documents
(`tools.quoted_figures`), and `--check`, which the session `docs` asks, fails where they say others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools import quoted_figures
from tools.packages import ROOT

RUNS = ROOT / "runs" / "bench"
RECORDED = ROOT / "tools" / "bench" / "recorded"


def latest(folder: Path, name: str) -> dict[str, Any] | None:
    """The newest run of that benchmark; None when it never ran."""
    runs = sorted(folder.glob(f"{name}-[0-9]*T*.json"))
    return json.loads(runs[-1].read_text()) if runs else None


def record(document: dict[str, Any], folder: Path = RECORDED) -> Path:
    """Keep that run as the one that documents show of its benchmark; returns its file.

    Raises:
        ValueError: files had been changed since the commit that the run names, so that nobody else
            could run the same.
    """
    if not document["commit"]:
        raise ValueError(f"{document['benchmark']} was run outside of a checkout: no commit has it")
    if document["changed_files"]:
        raise ValueError(
            f"{document['benchmark']} was run with {document['changed_files']} files changed after "
            f"commit {document['commit']}: commit them, and run it again"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{document['benchmark']}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def recorded_runs(folder: Path = RECORDED) -> dict[Path, dict[str, Any]]:
    """All runs that are kept, by file, in the order of their names."""
    return {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def _table(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each name and unit; several references of one figure have columns each."""
    by_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results:
        by_name.setdefault((row["name"], row["unit"]), []).append(row)
    references = max(map(len, by_name.values()), default=1)
    lines = [
        "| | ours |" + " reference | ratio |" * references,
        "|---|---|" + "---|" * 2 * references,
    ]
    for (name, unit), rows in by_name.items():
        cells = [name, f"{rows[0]['ours']:.4g} {unit}"]
        for row in rows:
            cells += [f"{row['against']}: {row['reference']:.4g} {unit}", _ratio(row["ratio"])]
        cells += [""] * (2 + 2 * references - len(cells))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _ratio(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio >= 0.001 else f"{ratio:.1e}"


def markdown(document: dict[str, Any]) -> str:
    """One run as a table, with a line below it about when and where."""
    lines = _table(document["results"])
    where = document["machine"]
    machine = f"{where['processor']}, {where['cores']} cores, torch {where['torch']}"
    origin = f"`nox -s bench -- {document['benchmark']}`"
    return "\n".join([*lines, "", f"{origin}, {document['date'][:10]}, {machine}."])


def by_name(folder: Path = RECORDED) -> dict[str, dict[str, Any]]:
    """The runs that are kept, by the name of their benchmark."""
    return {one["benchmark"]: one for one in recorded_runs(folder).values()}


def differences(*, write: bool) -> Iterator[str]:
    """What documents and runs disagree about, line by line; with `write` blocks are mended."""
    runs = by_name()
    for path in quoted_figures.documents():
        text, name = path.read_text(), path.relative_to(ROOT)
        made = quoted_figures.filled(text, runs, markdown)
        if made != text and write:
            path.write_text(made)
        elif made != text:
            yield f"{name}: figures differ from tools/bench/recorded"
        yield from (f"{name}: a figure that no script has written: {one}" for one in
                    quoted_figures.stray(text))  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.figures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks that have been run")
    parser.add_argument("--record", action="store_true", help="keep these runs for the documents")
    parser.add_argument("--write", action="store_true", help="write figures into the documents")
    parser.add_argument("--check", action="store_true", help="fail where documents have others")
    options = parser.parse_args(arguments)
    for name in options.names:
        document = latest(RUNS, name)
        if document is None:
            print(f"no run of {name} in runs/bench: nox -s bench -- {name}", file=sys.stderr)
            return 1
        print(markdown(document))
        if options.record:
            print(f"kept as {record(document).relative_to(ROOT)}")
    found = list(differences(write=options.write)) if options.write or options.check else []
    print("".join(f"{one}\n" for one in found), end="", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
