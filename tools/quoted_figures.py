"""Figures of documents, written from the recorded runs of benchmarks.

A document marks a block, `<!-- figures: NAME -->` to `<!-- end of figures -->`; what stands in it
is written from `tools/bench/quoted/NAME.md` by `python -m tools.figures --write`, and `--check`
says where it differs. In such a template these are replaced, parts being divided by semicolons:

- `{{BENCHMARK; ROW; UNIT; AGAINST; FIELD}}`: one number of a recorded run. FIELD is `ratio`, `ours`
  or `reference`, with a format behind a colon (`ratio:.1f`), or `range`: the least and the largest
  ratio of all rows that fit. ROW and AGAINST may have wildcards; without FIELD it is the ratio.
- `{{table; BENCHMARK}}`: all of its rows; `{{when; BENCHMARK}}`: the commit and machine.
- `{{said; FILE; PATTERN}}`: the group of a regular expression in what another script writes.

A benchmark that is not recorded gives a dash. Outside of such blocks documents of users hold no
timings and no ratios: `stray` finds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tools.packages import ROOT

TEMPLATES = ROOT / "tools" / "bench" / "quoted"
PATTERNS = ("README.md", "packages/*/README.md", "packages/*/docs/*.md", "tools/docs/pages/*.md")
NOT_RECORDED = "-"
Runs = Mapping[str, dict[str, Any]]
"""The recorded document of each benchmark, by its name."""

_BLOCK = re.compile(
    r"(<!-- figures: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end of figures -->)", re.DOTALL
)
_FIGURE = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_STRAY = re.compile(
    r"\d ?(?:us|\u00b5s|ms|GB/s|tok/s)\b"  # a time or a rate
    r"|\b\d+\.\d+ ?[x\u00d7](?! ?\d)(?:\b|(?=[ ,;.)|]|$))",  # a ratio, no extents
    re.MULTILINE,
)


def documents() -> list[Path]:
    """What users read, in the checkout; not changelogs, which tell of what was."""
    return sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))


def rows(document: Mapping[str, Any], name: str, unit: str, against: str) -> list[dict[str, Any]]:
    """The rows of a run that fit.

    Raises:
        ValueError: there is none.
    """
    found = [
        one
        for one in document["results"]
        if fnmatchcase(one["name"], name)
        and one["unit"] == unit
        and fnmatchcase(one["against"], against or "*")
    ]
    if not found:
        near = sorted({one["name"] for one in document["results"]})
        raise ValueError(
            f"{document['benchmark']} has no row {name!r} in {unit!r} against {against or '*'!r}; "
            f"it has {', '.join(near)}"
        )
    return found


def figure(words: str, runs: Runs, table: Callable[[dict[str, Any]], str]) -> str:
    """What one pair of braces stands for.

    Raises:
        ValueError: no row fits, or several do where one number is asked for.
    """
    parts = [one.strip() for one in words.split(";")]
    if parts[0] == "said":
        return _said(*parts[1:])
    if parts[0] in ("table", "when"):
        document = runs.get(parts[1])
        if document is None:
            return NOT_RECORDED
        return table(document) if parts[0] == "table" else _when(document)
    benchmark, name, unit, against, field = (*parts, "", "")[:5]
    document = runs.get(benchmark)
    if document is None:
        return NOT_RECORDED
    found = rows(document, name, unit, against)
    what, _, form = (field or "ratio").partition(":")
    if what == "range":
        ratios = [one["ratio"] for one in found]
        return f"{min(ratios):{form or '.2f'}} to {max(ratios):{form or '.2f'}}"
    if len(found) > 1:
        raise ValueError(f"{words.strip()!r} fits {len(found)} rows of {benchmark}")
    return f"{found[0][what]:{form or ('.2f' if what == 'ratio' else '.4g')}}"


def _said(name: str, pattern: str) -> str:
    found = re.search(pattern, (ROOT / name).read_text())
    if found is None:
        raise ValueError(f"{name} says nothing like {pattern!r}")
    return found[1]


def _when(document: Mapping[str, Any]) -> str:
    where = document["machine"]
    commit = document["commit"]
    return f"commit `{commit}`, {where['cores']} cores, torch {where['torch']}"


def filled(text: str, runs: Runs, table: Callable[[dict[str, Any]], str]) -> str:
    """A document with each of its blocks as its template and the runs say.

    Raises:
        ValueError: there is no such template, or as `figure` says.
    """

    def block(match: re.Match[str]) -> str:
        path = TEMPLATES / f"{match['name']}.md"
        if not path.exists():
            raise ValueError(f"there is no {path}")
        body = _FIGURE.sub(lambda one: figure(one[1], runs, table), path.read_text())
        return f"{match[1]}{body}{match[4]}"

    return _BLOCK.sub(block, text)


def stray(text: str) -> Iterator[str]:
    """Lines with a timing or a ratio that no block holds; program output is not looked at."""
    without = _FENCED.sub("", _BLOCK.sub("", text))
    for line in without.splitlines():
        if _STRAY.search(line):
            yield line.strip()
