"""Documents, docstrings and names use the words of the field, not words of this workspace's own."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.packages import PACKAGES, ROOT

_WORDS = tomllib.loads((ROOT / "tools" / "private_words.toml").read_text())
_TEXT = [(re.compile(rf"\b{one}\b", re.I), plain) for one, plain in _WORDS["text"].items()]
_NAMES = _WORDS["names"]
# What users of a package type: these stay.
_PUBLIC = {"Compiled", "Measured", "Offloaded", "Recomputed", "gathered", "measured"}
# In rooms that are still to be renamed: the list may shrink.
_OPEN = {"_capture", "_plan"}
_OPEN_NAMES = {"Asked", "Behind", "Given", "Held", "Told", "behind"}
_PAGES = ("*.md", "docs/*.md")


def _documents() -> list[Path]:
    folders = [ROOT, *(one.folder for one in PACKAGES), ROOT / "tools" / "docs" / "pages"]
    return sorted({page for folder in folders for one in _PAGES for page in folder.glob(one)})


def _sources() -> list[Path]:
    tools = (one for one in (ROOT / "tools").rglob("*.py") if "tests" not in one.parts)
    sources = (file for one in PACKAGES for file in one.source.rglob("*.py"))
    return sorted(one for one in (*sources, *tools) if not _OPEN & {*one.parts})


def _in_text(text: str) -> Iterator[str]:
    """Private words in a text, each with what to write; not in code, which quotes programs."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.S | re.M)
    for pattern, plain in _TEXT:
        for found in pattern.finditer(prose):
            around = " ".join(prose[max(0, found.start() - 30) : found.end() + 30].split())
            yield f"'{found[0]}' in '... {around} ...'; write: {plain}"


def _in_source(file: str, source: str) -> Iterator[str]:
    """Private words in first lines of docstrings, and names that are nothing else."""
    module = Path(file).stem
    if module in _NAMES and module not in _OPEN_NAMES:
        yield f"module {module}; write: {_NAMES[module]}"
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            title = (ast.get_docstring(node) or "").partition("\n\n")[0]
            yield from _in_text(title)
    for node in tree.body:
        is_class = isinstance(node, ast.ClassDef)
        if is_class or (isinstance(node, ast.FunctionDef) and not node.name.startswith("_")):
            word = node.name.strip("_").lower()
            if word in _NAMES and node.name not in _PUBLIC | _OPEN_NAMES:
                yield f"{node.name}; write: {_NAMES[word]}"


def test_documents_use_the_words_of_the_field():
    documents = _documents()
    found = {str(one.relative_to(ROOT)): [*_in_text(one.read_text())] for one in documents}
    assert len(documents) > 30
    assert {name: words for name, words in found.items() if words} == {}


def test_names_and_docstrings_use_the_words_of_the_field():
    sources = _sources()
    found = {
        str(one.relative_to(ROOT)): [*_in_source(one.name, one.read_text())] for one in sources
    }
    assert len(sources) > 500
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Ranks that differ are told so.", "told"),
        ("Programs that have drifted\napart end.", "diverge"),
        ("Each microbatch is rehearsed.", "trial run"),
        ("Muon is refused with words.", "raises"),
    ],
)
def test_a_private_word_in_a_document_is_found(text, word):
    assert any(word in one for one in _in_text(text))
    assert not [*_in_text(f"```\n{text}\n```\n")]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("told.py", ""),
        ("ranks.py", "class _Held: ..."),
        ("ranks.py", "def walked(): ..."),
        ("ranks.py", '"""Stands in for a rank."""'),
    ],
)
def test_a_private_word_in_a_source_is_found(file, source):
    assert len([*_in_source(file, source)]) == 1
    assert not [*_in_source("ranks.py", "def walk_of(): ...")]
