"""Write the sources of the site: what the generator reads, gathered from all over the checkout."""

from __future__ import annotations

import ast
import posixpath
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import figures
from tools.links import with_links
from tools.packages import PACKAGES, ROOT, Package

PAGES = Path(__file__).parent / "pages"
RAW = "raw"  # the folder of the site that holds recorded runs of benchmarks
# Sections of the README that are pages here.
SECTIONS = {"compatibility.md": "Which torch"}
GUIDES = {
    "Getting started": "start.md",
    "Concepts": "concepts.md",
    "Moving over": "moving.md",
    "Other people's trainers": "trainers.md",
    "Adding an operator": "guides/adding-an-operator.md",
    "Debugging": "debugging.md",
    "Tell us what your GPU says": "your-gpu.md",
}
ABOUT = {
    "Benchmarks": "benchmarks.md",
    "Measured": "measured.md",
    "Compatibility": "compatibility.md",
    "Releases and deprecations": "releases.md",
    "Contributing": "contributing.md",
    "Security": "security.md",
}


@dataclass(frozen=True)
class Page:
    """A page of the site, and the file of the checkout that it is made of, if of one."""

    target: str
    text: str
    source: Path | None = None


def section(text: str, heading: str) -> str:
    """The part of a Markdown text below `## heading`, with that as its title.

    Raises:
        ValueError: there is no such heading.
    """
    for part in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        if part.startswith(f"## {heading}\n"):
            return re.sub(r"^#(#+ )", r"\1", part, flags=re.MULTILINE)
    raise ValueError(f"README.md has no heading `## {heading}`")


def pages() -> Iterator[Page]:
    """Every page but those of the reference."""
    readme = ROOT / "README.md"
    yield Page("index.md", before(readme.read_text(), "## The main job"), readme)
    for path in sorted(PAGES.glob("*.md")):
        yield Page(path.name, path.read_text())
    for target, heading in SECTIONS.items():
        yield Page(target, section(readme.read_text(), heading), readme)
    yield Page("measured.md", benchmarks_page(figures.recorded_runs()))
    for name in ("CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT"):
        path = ROOT / ".github" / f"{name}.md"
        target = f"{name.lower().replace('_', '-')}.md"
        yield Page(target, path.read_text(), path)
    for package in PACKAGES:
        documents = sorted(package.folder.glob("*.md"))
        for path in documents:
            name = "" if path.stem == "README" else f"-{path.stem.lower().replace('_', '-')}"
            yield Page(f"packages/{package.short}{name}.md", path.read_text(), path)
        for path in sorted(package.folder.glob("docs/*.md")):
            yield Page(f"guides/{path.name}", path.read_text(), path)


def benchmarks_page(runs: Mapping[Path, dict[str, Any]]) -> str:
    """The page of recorded runs: a table for each, and a link to its raw data."""
    parts = [
        "# Measured\n\nThe runs that are quoted elsewhere, whole: one of each benchmark. A line is"
        " a ratio to what ran in turns with it; figures of two runs say nothing beside each other."
        " `python -m tools.figures --record NAME` puts the latest one here."
    ]
    for path, document in runs.items():
        raw = f"[raw data]({RAW}/{path.name}), commit `{document['commit']}`."
        title = document["title"].rstrip(".")
        parts.append(
            f"## {document['benchmark']}\n\n{title}.\n\n{figures.markdown(document)}\n{raw}"
        )
    return "\n\n".join(parts) + "\n"


def guides(package: Package) -> list[dict[str, str]]:
    """The pages of a package's docs/ for the menu, by title; without those that GUIDES has."""
    found = []
    for path in sorted(package.folder.glob("docs/*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        target = f"guides/{path.name}"
        if target not in GUIDES.values():
            found.append({title.replace("`", ""): target})
    return found


def before(text: str, heading: str) -> str:
    """The part of a text above a heading, which must be there."""
    head, mark, _ = text.partition(f"{heading}\n")
    if not mark:
        raise ValueError(f"README.md has no heading `{heading}`")
    return head


def places(found: Mapping[str, Page]) -> dict[Path, str]:
    """Which page shows which file; a folder of a package is its README's."""
    known = {page.source: page.target for page in found.values() if page.source is not None}
    known[ROOT / "README.md"] = "index.md"
    for package in PACKAGES:
        known[package.folder] = f"packages/{package.short}.md"
    return known


def linked(page: Page, known: Mapping[Path, str]) -> str:
    """The page's text, its links leading to pages; files that no page shows are named, unlinked."""
    if page.source is None:
        return page.text
    source = page.source

    def led(match: re.Match[str], path: str, section: str) -> str:
        there = known.get((source.parent / path).resolve())
        if there is None:
            return match["text"].strip("[]")
        way = posixpath.relpath(there, posixpath.dirname(page.target) or ".")
        return f"{match['text']}({way}{section})"

    return with_links(page.text, led)


@dataclass(frozen=True)
class PublicModule:
    """A module without an underscore, and what its `__all__` lists."""

    name: str
    names: tuple[str, ...]
    # Those that it has from another distribution, and from where.
    foreign: Mapping[str, str]


def public_modules(package: Package) -> list[PublicModule]:
    """The modules of a package that are for its users, the package itself first."""
    top = package.source / package.module
    modules = sorted(top.glob("[a-z]*.py"))
    subpackages = sorted(top.glob("[a-z]*/__init__.py"))
    found = []
    for path in [top / "__init__.py", *modules, *subpackages]:
        parts = path.relative_to(package.source).with_suffix("").parts
        tree = ast.parse(path.read_text())
        if names := declared(tree):
            name = ".".join(part for part in parts if part != "__init__")
            found.append(PublicModule(name, names, foreign(tree, package)))
    return found


def declared(tree: ast.Module) -> tuple[str, ...]:
    """What a module's `__all__` lists; nothing without one."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(one, ast.Name) and one.id == "__all__" for one in targets):
            assert isinstance(node, ast.Assign)
            listed = ast.literal_eval(node.value)
            return tuple(name for name in listed if not name.startswith("__"))
    return ()


def foreign(tree: ast.Module, package: Package) -> dict[str, str]:
    """The names that a module imports from outside of its package, with the module they are of."""
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module)
    return {
        alias.asname or alias.name: str(node.module)
        for node in imports
        if str(node.module).split(".")[0] != package.module
        for alias in node.names
    }


def reference(package: Package) -> Iterator[Page]:
    """The reference of one package: a page for each public module."""
    modules = public_modules(package)
    known = {module.name for module in modules}
    for module in modules:
        entries = []
        for name in module.names:
            if name in module.foreign:
                entries.append(f"## {name}\n\nThis is `{module.foreign[name]}.{name}`.\n")
            elif f"{module.name}.{name}" not in known:  # which has a page of its own
                entries.append(f"::: {module.name}.{name}\n")
        below = module.name.removeprefix(package.module).removeprefix(".") or "index"
        text = "\n".join([f"# {module.name}\n", *entries])
        yield Page(f"reference/{package.short}/{below}.md", text)


def write(folder: Path) -> dict[str, Page]:
    """Write all pages below the folder, which is emptied first; returns them by target."""
    found = {page.target: page for page in pages()}
    for package in PACKAGES:
        found.update({page.target: page for page in reference(package)})
    shutil.rmtree(folder, ignore_errors=True)
    known = places(found)
    for target, page in found.items():
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(linked(page, known))
    (folder / RAW).mkdir()
    for path in figures.recorded_runs():
        shutil.copy(path, folder / RAW / path.name)
    return found
