"""Prove that the packages lean on each other only as declared.

Three witnesses must tell the same story: the table in tools/packages.py, the metadata of the
built wheels, and the imports in the code. On top, import-linter checks contracts that are
generated from the table, which also sees indirect imports.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.packages import PACKAGES, Package, find, project_of
from tools.wheels import conflicts, metadata

MODULES = {package.module: package for package in PACKAGES}


def declared_faults(package: Package) -> Iterator[str]:
    """Where the metadata of its wheel differs from the table."""
    from packaging.requirements import Requirement

    found = metadata(package.wheel)
    expected = {str(Requirement(one)) for one in package.requires}
    for extra, requirements in package.extras.items():
        expected |= {str(Requirement(f'{one} ; extra == "{extra}"')) for one in requirements}
    declared = {str(Requirement(one)) for one in found.get_all("Requires-Dist", [])}
    for one in sorted(expected ^ declared):
        where = "its wheel" if one in declared else "tools/packages.py"
        yield f"only {where} requires {one}"
    if (found["Name"], found["Version"]) != (package.name, package.version):
        yield f"its wheel calls itself {found['Name']} {found['Version']}"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Each (line, dotted name) that a file imports from elsewhere, lazily or not."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def is_private(name: str) -> bool:
    """Whether a dotted name goes through an underscore; dunders are public."""
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def import_faults(package: Package) -> Iterator[str]:
    """Imports that it does not declare, or that reach into a sibling's underscore modules."""
    declared = {*map(project_of, package.requires)}
    declared |= {project_of(one) for extra in package.extras.values() for one in extra}
    for folder in (package.source, package.tests):
        siblings = declared | ({*package.test_siblings} if folder == package.tests else set())
        for path in sorted(folder.rglob("*.py")):
            for line, name in imports(path):
                where = f"{path.relative_to(package.folder)}:{line} imports {name}"
                top = name.split(".", 1)[0]
                if top == package.module or top in sys.stdlib_module_names:
                    continue
                if top in MODULES and is_private(name):
                    yield f"{where}, which is private to {MODULES[top].name}"
                if top in MODULES and MODULES[top].name not in siblings:
                    yield f"{where}, which it does not declare"
                # Tests may use any test tool: only the sources must be declared one by one.
                if top not in MODULES and folder == package.source and top not in declared:
                    yield f"{where}, which it does not declare"


def unused(package: Package) -> Iterator[str]:
    """Siblings that it declares as needed and never imports."""
    found = {name.split(".", 1)[0] for path in package.source.rglob("*.py")
             for _, name in imports(path)}  # fmt: skip
    for name in package.siblings:
        if find(name).module not in found:
            yield f"requires {name}, but nothing in src/ imports it"


def linter_config() -> str:
    """The import-linter contracts that the table implies."""
    lines = ["[importlinter]", "root_packages ="]
    lines += [f"    {package.module}" for package in PACKAGES]
    for package in PACKAGES:
        allowed = {package.name, *package.siblings, *package.optional_siblings}
        forbidden = [other.module for other in PACKAGES if other.name not in allowed]
        if forbidden:
            lines += ["", f"[importlinter:contract:{package.short}]", "type = forbidden"]
            lines += [f"name = {package.name} imports only what it declares"]
            lines += ["source_modules =", f"    {package.module}"]
            lines += ["forbidden_modules =", *(f"    {module}" for module in forbidden)]
    return "\n".join(lines) + "\n"


def run_linter() -> int:
    """Run import-linter on the generated contracts; returns its exit status."""
    path = os.pathsep.join(str(package.source) for package in PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "importlinter.ini")
        config.write_text(linter_config())
        command = ["lint-imports", "--no-logo", "--no-cache", "--config", str(config)]
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.contracts", description=__doc__)
    parser.add_argument("--show", action="store_true", help="print the generated contracts only")
    if parser.parse_args(arguments).show:
        print(linter_config(), end="")
        return 0
    # The ranges must admit the very versions that this checkout tests together.
    clashes = conflicts([package.wheel for package in PACKAGES])
    print("".join(f"{clash}\n" for clash in clashes), end="")
    total = len(clashes)
    for package in PACKAGES:
        faults = [*declared_faults(package), *import_faults(package), *unused(package)]
        print(f"{package.name}: {len(faults)} faults")
        print("".join(f"  {fault}\n" for fault in faults), end="")
        total += len(faults)
    return run_linter() or (1 if total else 0)


if __name__ == "__main__":
    sys.exit(main())
