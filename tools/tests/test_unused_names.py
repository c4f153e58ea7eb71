"""Every private name of a module is used: by its module, or by one that imports it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.packages import PACKAGES


def private_names(tree: ast.Module) -> Iterator[str]:
    """The private names that a module defines at its top, but those a decorator may register."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=targets):
                found = [n for target in targets for n in ast.walk(target)]
                yield from (n.id for n in found if isinstance(n, ast.Name) and _is_private(n.id))
            case ast.AnnAssign(target=ast.Name(id=name)) if _is_private(name):
                yield name
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ) if _is_private(name) and not any(map(_may_register, node.decorator_list)):
                yield name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _may_register(decorator: ast.expr) -> bool:
    # What these return is all that they do.
    pure = {"cache", "lru_cache", "dataclass", "contextmanager", "wraps", "total_ordering"}
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name not in pure


def used_names(tree: ast.AST) -> Iterator[str]:
    """The names that a module reads, also in annotations and casts that are written as strings."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load() | ast.Del()):
                yield name
            case ast.Attribute(attr=name):
                yield name
            case ast.Constant(value=str(text)) if "_" in text and "\n" not in text:
                try:
                    written = ast.parse(text, mode="eval")
                except SyntaxError:
                    continue
                yield from (n.id for n in ast.walk(written) if isinstance(n, ast.Name))


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of every `from module import name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def unused(trees: dict[str, ast.Module], readers: list[ast.Module]) -> list[str]:
    """The private names that nothing reads.

    Args:
        trees: the modules, by their dotted names.
        readers: all files that may import from them.
    """
    imports = {pair for tree in readers for pair in imported_names(tree)}
    # Attributes of modules (`module._name`) count wherever they are: which module is not asked.
    attributes = {
        node.attr for tree in readers for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }
    return [
        f"{module}.{name}"
        for module, tree in trees.items()
        for name in sorted({*private_names(tree)} - {*used_names(tree)} - attributes)
        if (module, name) not in imports
    ]


def _module(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _parsed(folder: Path) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.short)
def test_every_private_name_is_used(package):
    source = package.folder / "src"
    found = {_module(path, source): tree for path, tree in _parsed(source).items()}
    readers = [*found.values(), *_parsed(package.folder / "tests").values()]
    assert found
    assert not unused(found, readers)


def test_what_counts_as_used():
    text = """
_A = 1
_B: int = 2
_C, _D = 3, 4
_E = _F = 5
def _g(): return _A
@lru_cache(maxsize=None)
def _h(): ...
@registered
def _i(): ...
class _J: ...
def k(x: "_J"): return cast("list[_E]", x)
_L = 6
_m = lambda: _missing
"""
    other = "from pkg.a import _B\nfrom pkg.b import _C\nimport pkg.a\npkg.a._L"
    trees = {"pkg.a": ast.parse(text)}
    found = unused(trees, [*trees.values(), ast.parse(other)])
    assert found == [f"pkg.a.{name}" for name in ("_C", "_D", "_F", "_g", "_h", "_m")]
