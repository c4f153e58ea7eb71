"""Prove that the packages lean on each other only as declared.

Three witnesses must tell the same story: the table in tools/packages.py, the metadata of the
built wheels, and the imports in the code. On top, import-linter checks contracts that are
generated from the table, which also sees indirect imports: what a package may lean on, and the
order of the layers inside it. Imports inside functions and those for types only count as well.
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
    for extra, requirements in package.offered.items():
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
    declared |= {project_of(one) for extra in package.offered.values() for one in extra}
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
                # Tests may use any test tool: only the sources must be declared one by one. A
                # project has dashes where its module has underscores.
                known = top in declared or top.replace("_", "-") in declared
                if top not in MODULES and folder == package.source and not known:
                    yield f"{where}, which it does not declare"


def unused(package: Package) -> Iterator[str]:
    """Siblings that it declares as needed and never imports."""
    found = {name.split(".", 1)[0] for path in package.source.rglob("*.py")
             for _, name in imports(path)}  # fmt: skip
    for name in package.siblings:
        if find(name).module not in found:
            yield f"requires {name}, but nothing in src/ imports it"


def upward_faults(package: Package) -> Iterator[str]:
    """Imports of a package from inside it, where it has layers: its `__init__` stands on top.

    A contract of layers compares what lies inside a package, and does not see the package itself.
    """
    if not package.layers:
        return
    known = {module_of(path, package): path for path in package.source.rglob("*.py")}
    for module, path in sorted(known.items()):
        parts = module.split(".")
        above = {".".join(parts[:depth]) for depth in range(1, len(parts))}
        for line, name in imports(path):
            # `from a.b import c` is of the module a.b.c where there is one, and else of a.b.
            imported = name if name in known or name in above else name.rpartition(".")[0]
            if imported in above:
                where = f"{path.relative_to(package.folder)}:{line}"
                yield f"{where} imports from {imported}, the package that it lies in"


def module_of(path: Path, package: Package) -> str:
    """The dotted name of a source file; that of a package for its `__init__.py`."""
    parts = path.relative_to(package.source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def linter_config(packages: Sequence[Package] = PACKAGES) -> str:
    """The import-linter contracts that the table implies."""
    lines = ["[importlinter]", "root_packages =", *(f"    {one.module}" for one in packages)]
    for package in packages:
        lines += [*_forbidden(package, packages), *_layers(package)]
    return "\n".join(lines) + "\n"


def _forbidden(package: Package, packages: Sequence[Package]) -> Iterator[str]:
    allowed = {package.name, *package.siblings, *package.optional_siblings}
    forbidden = [other.module for other in packages if other.name not in allowed]
    if forbidden:
        yield from ("", f"[importlinter:contract:{package.short}]", "type = forbidden")
        yield f"name = {package.name} imports only what it declares"
        yield from ("source_modules =", f"    {package.module}")
        yield from ("forbidden_modules =", *(f"    {module}" for module in forbidden))


def _layers(package: Package) -> Iterator[str]:
    if not package.layers:
        return
    yield from ("", f"[importlinter:contract:{package.short}-layers]", "type = layers")
    yield f"name = {package.name} imports downwards only"
    yield from ("containers =", f"    {package.module}")
    # A module that the table does not name is a fault: whoever adds one says where it stands.
    yield from ("exhaustive = true", "layers =", *(f"    {layer}" for layer in package.layers))
    # Inside a layer there is no order, and still no circle.
    yield from ("", f"[importlinter:contract:{package.short}-circles]", "type = acyclic_siblings")
    yield f"name = {package.name} has no circle of imports"
    yield from ("ancestors =", f"    {package.module}")


def run_linter(packages: Sequence[Package] = PACKAGES) -> int:
    """Run import-linter on the generated contracts; returns its exit status."""
    path = os.pathsep.join(str(package.source) for package in packages)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "importlinter.ini")
        config.write_text(linter_config(packages))
        # Its script need not be on the path of who runs this, and it has no `python -m`.
        start = "from importlinter.cli import lint_imports_command; lint_imports_command()"
        command = [sys.executable, "-c", start, "--no-logo", "--no-cache", "--config", str(config)]
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
        faults += upward_faults(package)
        print(f"{package.name}: {len(faults)} faults")
        print("".join(f"  {fault}\n" for fault in faults), end="")
        total += len(faults)
    return run_linter() or (1 if total else 0)


if __name__ == "__main__":
    sys.exit(main())
