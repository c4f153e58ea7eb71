"""What tests need beside torch a session installs: without its mark no session would run them."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tools.packages import ROOT

NEEDS = {"transformers": "models"}
"""What is skipped for want of it, by the mark of the session that installs it."""


def files() -> Iterator[tuple[Path, ast.Module]]:
    for folder in (
        *ROOT.glob("packages/*/tests"),
        ROOT / "tests-integration",
    ):
        for path in sorted(folder.rglob("test_*.py")):
            yield path, ast.parse(path.read_text())


def marks_of(nodes: list[ast.expr]) -> str:
    return " ".join(map(ast.unparse, nodes))


def lacking(tree: ast.Module, library: str, mark: str) -> Iterator[str]:
    """Tests that skip without the library, and lack the mark."""
    words = (f"importorskip('{library}'", f"'{library} is not installed'", f"needs_{library}")
    of_file = [node for node in tree.body if isinstance(node, ast.Assign | ast.Expr)]
    marks = marks_of([n.value for n in of_file if "pytestmark" in ast.unparse(n)])
    skips = any(word in ast.unparse(node) for node in of_file for word in words)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            own = marks + marks_of(node.decorator_list)
            needs = skips or any(word in ast.unparse(node) for word in words)
            if needs and f"mark.{mark}" not in own:
                yield node.name


def test_each_test_has_a_session_with_what_it_needs():
    found = [
        f"{path.relative_to(ROOT)}::{name} needs {library}: mark it {mark}"
        for path, tree in files()
        for library, mark in NEEDS.items()
        for name in lacking(tree, library, mark)
    ]
    assert not found, "\n".join(found)


def test_a_test_without_its_mark_is_found():
    text = "def test_it():\n    pytest.importorskip('transformers', reason='not here')\n"
    assert list(lacking(ast.parse(text), "transformers", "models")) == ["test_it"]
    marked = f"@pytest.mark.models\n{text}"
    assert not list(lacking(ast.parse(marked), "transformers", "models"))
