"""Find benchmarks, run them, print their ratios, and write each run as JSON."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.bench import Ratio
from tools.git import git
from tools.packages import PACKAGES, ROOT

RUNS = ROOT / "runs" / "bench"


def discover() -> dict[str, Path]:
    """Every benchmark by name; ValueError when two share one."""
    folders = [ROOT / "tools" / "bench", *(package.folder / "benchmarks" for package in PACKAGES)]
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("[!_]*.py")):
            if "def measure(" not in path.read_text():
                continue  # a script that writes something else than ratios
            if path.stem in found:
                raise ValueError(f"two benchmarks are called {path.stem}: {found[path.stem]}")
            found[path.stem] = path
    return found


def load(path: Path) -> ModuleType:
    """The module in that file, importable by the processes that it may start."""
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _processor() -> str:
    """The processor's name, as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "gpus": gpus,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def _git(*arguments: str) -> str:
    try:
        return git(*arguments)
    except SystemExit:
        return ""  # an archive can be measured, too; what it finds is not kept


def envelope(name: str, title: str, rows: Sequence[Ratio]) -> dict[str, Any]:
    """The JSON document of one run."""
    return {
        "benchmark": name,
        "title": title,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "changed_files": len(_git("status", "--porcelain").splitlines()),
        "machine": machine(),
        "results": [{**asdict(row), "ratio": row.ratio} for row in rows],
    }


def table(document: dict[str, Any]) -> str:
    """The document as lines of text, for people."""
    lines = [f"{document['title']}", ""]
    for row in document["results"]:
        lines.append(
            f"  {row['name']:32s} {row['ours']:12.4g} {row['reference']:12.4g} {row['unit']:6s}"
            f" {row['ratio']:8.3f} x {row['against']}{_goal(row)}"
        )
    return "\n".join(lines)


def _goal(row: dict[str, Any]) -> str:
    """The goal, where there is one, and a mark where it is missed."""
    goal = row.get("goal")
    if goal is None:
        return ""
    more = row.get("more_is_better", False)
    reached = row["ratio"] >= goal if more else row["ratio"] <= goal
    return f" (goal {'at least ' * more}{goal:g}{'' if reached else ', missed'})"


def options_of(module: ModuleType, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The keywords of `measure` that the command line asks for."""
    if hasattr(module, "parser"):
        found: dict[str, Any] = vars(module.parser().parse_args(arguments))
        return found
    parser = argparse.ArgumentParser(prog=f"nox -s bench -- {name}", description=module.__doc__)
    return vars(parser.parse_args(arguments))


def run(name: str, path: Path, arguments: Sequence[str] = ()) -> Path:
    """Measure one benchmark; returns the file that holds its document.

    `arguments` are for the benchmark's own parser; SystemExit where it has none and some are given.
    """
    module = load(path)
    title = (module.__doc__ or name).strip().splitlines()[0]
    options = options_of(module, name, arguments)
    document = envelope(name, title, list(module.measure(**options)))
    print(table(document))
    if hasattr(module, "details"):
        text, document["details"] = module.details()
        print(f"\n{text}")
    RUNS.mkdir(parents=True, exist_ok=True)
    stamp = document["date"].translate(str.maketrans("", "", "-:"))[:15]
    target = RUNS / f"{name}-{stamp}.json"
    target.write_text(json.dumps(document, indent=2) + "\n")
    print(f"\nwritten to {target.relative_to(ROOT)}")
    return target
