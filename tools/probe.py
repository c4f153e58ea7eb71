"""Proves in an environment with some of the wheels that they stand by themselves.

Run as `python -I probe.py MODULE...` from outside the checkout, with the import names of all
packages of the workspace that should be there. Standard library only, and it imports nothing of
the workspace: what it sees is what a user sees.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

FAMILY = "vescale-"


def public_modules(name: str) -> Iterator[str]:
    """The module and every public module below it."""
    yield name
    spec = importlib.util.find_spec(name)
    for found in pkgutil.iter_modules(spec.submodule_search_locations if spec else None):
        if not found.name.startswith("_"):
            below = f"{name}.{found.name}"
            yield from public_modules(below) if found.ispkg else [below]


def import_quietly(name: str) -> None:
    """Import one module; a warning or a line of output is an error."""
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("error")
        module = importlib.import_module(name)
    if printed.getvalue():
        raise SystemExit(f"importing {name} printed: {printed.getvalue()!r}")
    origin = Path(module.__file__ or "")
    if not origin.is_relative_to(sys.prefix):
        raise SystemExit(f"{name} came from {origin}, not from this environment")


def check_presence(expected: set[str]) -> None:
    """Compare what is installed, by metadata and by import, with what should be."""
    names = (dist.metadata["Name"] for dist in importlib.metadata.distributions())
    installed = {name.replace("-", "_") for name in names if name.startswith(FAMILY)}
    if installed != expected:
        raise SystemExit(f"installed: {sorted(installed)}, expected: {sorted(expected)}")


def check_side_effects(before: set[str]) -> None:
    """Importing must not have joined a process group, loaded Triton or started CUDA."""
    import torch
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        raise SystemExit("importing initialised a process group")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise SystemExit("importing initialised CUDA")
    if "triton" in set(sys.modules) - before:
        raise SystemExit("importing loaded triton")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="+", help="import names that should be installed")
    parser.add_argument("--absent", nargs="*", default=[], help="import names that should not")
    options = parser.parse_args(arguments)
    check_presence(set(options.modules))
    for name in options.absent:
        if importlib.util.find_spec(name) is not None:
            raise SystemExit(f"{name} can be imported, but nothing here declares it")
    import torch  # noqa: F401 -- what it warns of and loads is not ours to judge

    before = set(sys.modules)
    modules = [one for name in options.modules for one in public_modules(name)]
    for name in modules:
        import_quietly(name)
    check_side_effects(before)
    print(f"imported {len(modules)} public modules: {', '.join(modules)}")


if __name__ == "__main__":
    main()
