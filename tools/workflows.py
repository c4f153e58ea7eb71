"""Run every command of the workflows here, with replacements of what only a hosted runner has.

Each step's script runs under bash, as its runner would run it, in a clone of this checkout in which
one package has just been tagged; those of the release workflow in one more for each way to a tag.
Commands of tools/ run for real. `python -m nox` is written down, and each session that it names
must exist; pip, gh and nvidia-smi do nothing. So a renamed session, an option that a tool does not
have, an unset variable or a slip of quoting is found before a push.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tools.packages import ROOT, find
from tools.tags import final

WORKFLOWS = ROOT / ".github" / "workflows"
PACKAGE = find("rng")
CHANGELOG = PACKAGE.folder.relative_to(ROOT) / "CHANGELOG.md"
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
# What expressions of these workflows stand for here; matrix.* comes from the matrix itself.
VALUES = {
    "github.event.pull_request.base.sha": "HEAD~1",
    "github.repository": "owner/repository",
    "github.token": "a-token",
    "needs.plan.result": "success",
    "needs.session.result": "success",
    "needs.build.outputs.package": PACKAGE.short,
    "steps.tag.outputs.package": PACKAGE.short,
}
# Bumps that lead to a tag; or the checkout as it stands, which may be before a release, at a
# candidate, or at the release itself, tagged or not.
AS_IT_STANDS: tuple[str, ...] = ()
WAYS = (
    ("rc",),
    ("rc", "rc", "release"),
    ("release", "minor", "rc"),
    ("release", "patch", "release"),
)
# `build` and `venv` leave files, which later commands of a script use.
STAND_IN = """#!/usr/bin/env bash
printf '%q ' "$(basename "$0")" "$@" >> "$DRY_RUN_LOG"; echo >> "$DRY_RUN_LOG"
case "$(basename "$0") $1 $2" in
  "python -m tools."*) exec {python} "$@" ;;
  "gh release view") exit 1 ;;
  "python -m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "python -m nox")
    case " $* " in
      *" build "*) mkdir -p dist; touch dist/{wheel} ;;
      *" matrix "*) echo '{{"include": []}}' ;;
    esac ;;
esac
"""


@dataclass(frozen=True)
class Script:
    """A step's commands, and what is set while they run."""

    where: str
    run: str
    env: Mapping[str, str]


def filled(text: object, values: Mapping[str, str]) -> str:
    """A text of a workflow, each `${{ expression }}` replaced by its value.

    Raises:
        KeyError: nobody said what the expression is here.
    """
    return EXPRESSION.sub(lambda match: values[match[1]], str(text))


def scripts(
    name: str,
    workflow: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    version: str = "0.1.0",
) -> list[Script]:
    """The scripts of a workflow, once for each row of the matrix where a job has one."""
    found, candidate = [], "" if version == final(version) else "yes"
    known = {**VALUES, "needs.build.outputs.kind == 'prerelease' && 'yes' || ''": candidate}
    for job, told in workflow["jobs"].items():
        for row in rows if "strategy" in told else [{}]:
            values = {**known, **{f"matrix.{key}": str(value) for key, value in row.items()}}
            for step in told.get("steps", []):
                if "run" not in step:
                    continue
                given = {**workflow.get("env", {}), **told.get("env", {}), **step.get("env", {})}
                where = " ".join([name, job, str(row.get("session", ""))]).strip()
                env = {key: filled(value, values) for key, value in given.items()}
                found.append(Script(where, step["run"], env))
    return found


def prepare(folder: Path, parts: Sequence[str] = AS_IT_STANDS) -> Path:
    """Clone this checkout into the folder, and bump, commit and tag a package there, on main.

    Whoever runs this may sign what they commit, which nobody can here.
    """
    clone = folder / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    for path in (ROOT / "tools").glob("*.py"):  # as it stands here, committed or not
        (clone / "tools" / path.name).write_text(path.read_text())
    settings = {"user.name": "dry", "user.email": "run@example.org"}
    settings |= {"commit.gpgSign": "false", "tag.gpgSign": "false"}
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    git = ["git", "-C", str(clone), *options]
    is_open = "(unreleased)" in (clone / CHANGELOG).read_text()
    if parts:
        bumps = parts if is_open else ("minor", *parts)
    else:
        bumps = ("release",) if is_open else ("",)
    for part in bumps:
        if part:
            bump = [sys.executable, "-m", "tools.bump", PACKAGE.short, part]
            subprocess.run(bump, cwd=clone, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([*git, "commit", "-qam", "Release", "--allow-empty"], check=True)
        if part in ("rc", "release", ""):
            tagged = [*git, "tag", "--force", tag(version_in(clone))]
            subprocess.run(tagged, check=True, stdout=subprocess.DEVNULL)
    # As after a push: a release is of main.
    subprocess.run([*git, "update-ref", "refs/remotes/origin/main", "HEAD"], check=True)
    return clone


def version_in(clone: Path) -> str:
    """The version of the package in a clone."""
    text = (clone / PACKAGE.version_file.relative_to(ROOT)).read_text()
    version: str = re.findall(r'__version__ = "([^"]+)"', text)[0]
    return version


def tag(version: str) -> str:
    """The tag that the release workflow is run for."""
    return f"{PACKAGE.name}-v{version}"


def stand_ins(folder: Path) -> Path:
    """Write the commands that take the place of the runner's; returns their folder."""
    folder.mkdir()
    text = STAND_IN.format(python=shlex.quote(sys.executable), wheel=PACKAGE.wheel.name)
    for name in ("python", "gh", "nvidia-smi"):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run(script: Script, clone: Path, shims: Path, log: Path) -> str:
    """Run one script; returns what it said if it failed, else nothing."""
    env = {
        "PATH": f"{shims}{os.pathsep}{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", "/"),
        "DRY_RUN_LOG": str(log),
        "GITHUB_OUTPUT": os.devnull,
        "GITHUB_REF_NAME": tag(version_in(clone)),
        "GITHUB_REPOSITORY": VALUES["github.repository"],
        "GITHUB_SERVER_URL": "https://github.com",
        "RUNNER_TEMP": str(log.parent),
    }
    shell = ["bash", "--noprofile", "--norc", "-euo", "pipefail", "-c", script.run]
    done = subprocess.run(
        shell, cwd=clone, env={**env, **script.env}, capture_output=True, text=True, timeout=120
    )
    return "" if done.returncode == 0 else f"exit {done.returncode}: {done.stdout}{done.stderr}"


def sessions_of(line: str) -> list[str]:
    """The nox sessions that a logged command names."""
    words = shlex.split(line)
    if words[:3] != ["python", "-m", "nox"] or "-s" not in words:
        return []
    named = words[words.index("-s") + 1 :]
    return named[: named.index("--")] if "--" in named else named


@cache
def known_sessions() -> set[str]:
    """Every session of the noxfile."""
    command = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-l"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {match[1] for match in re.finditer(r"^[*-] (\S+)", listed, re.MULTILINE)}


@cache
def rows_of(*arguments: str) -> list[Mapping[str, Any]]:
    """The rows that the plan job would give to the others."""
    command = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-s", "matrix"]
    done = subprocess.run([*command, "--", *arguments], check=True, capture_output=True, text=True)
    rows: list[Mapping[str, Any]] = json.loads(done.stdout)["include"]
    return rows


def faults() -> Iterator[str]:
    """What does not work, in words."""
    paths = sorted(WORKFLOWS.glob("*.yml"))
    yield from faults_in(AS_IT_STANDS, paths)
    for parts in WAYS:
        yield from faults_in(parts, [path for path in paths if path.stem == "release"])


def faults_in(parts: Sequence[str], paths: Sequence[Path]) -> Iterator[str]:
    """What does not work in these workflows, where these bumps lead to the tag."""
    import yaml  # only the session that runs this installs it, and tests import what is above

    sessions = known_sessions()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clone, shims, log = prepare(folder, parts), stand_ins(folder / "bin"), folder / "log"
        version = version_in(clone)
        for path in paths:
            rows = rows_of(*(["--nightly"] if path.stem == "nightly" else []))
            before = ""
            for script in scripts(path.stem, yaml.safe_load(path.read_text()), rows, version):
                if script.where != before:  # a job has a checkout of its own
                    subprocess.run(["git", "-C", str(clone), "checkout", "-q", "."], check=True)
                    before = script.where
                log.write_text("")
                failed = run(script, clone, shims, log)
                lines = log.read_text().splitlines()
                where = f"{script.where} at {version}"
                print(f"{where}: {'; '.join(lines) or script.run.strip()}")
                if failed:
                    yield f"{where}: {failed}"
                named = {one for line in lines for one in sessions_of(line)}
                for gone in sorted(named - sessions):
                    yield f"{where}: there is no session {gone!r}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.workflows", description=__doc__)
    parser.parse_args(arguments)
    found = list(faults())
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
