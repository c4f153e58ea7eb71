"""What docstrings and comments of the sources name between backticks exists.

Looked at are names that can only be ours: dotted ones that begin with a module or class of this
package, names that begin with one underscore, and paths of files.
"""

import ast
import importlib
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest
import torch
import vescale_dtensor

ROOT = Path(vescale_dtensor.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MODULES = {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in FILES}
BY_STEM = {f.stem: f for f in FILES} | {f.parent.name: f for f in FILES if f.stem == "__init__"}


def trees():
    return {f: ast.parse(f.read_text()) for f in FILES}


def defined(tree):
    """Every name that a file defines or imports, anywhere, and attributes that it sets."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).rpartition(".")[2])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} if node.value.isidentifier() else set()
    return found


def words(path, tree):
    """Docstrings and comments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)  # what stands below a constant
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def named(text):
    """What is between single backticks, up to a call's parenthesis; and whether it says "see"."""
    for see, found in re.findall(r"(\b[Ss]ee )?(?<!`)`([^`\n]+)`(?!`)", text):
        yield re.split(r"[(\[ =]", found)[0], bool(see)


def exists(name, here, names):
    """Whether a name is known; None where it cannot be told to be ours."""
    if "/" in name:
        if not name.endswith(".py"):
            return True if any(str(f.parent).endswith(name.rstrip("/")) for f in FILES) else None
        return any(str(f).endswith(name) for f in FILES)
    parts = name.removeprefix("vescale_dtensor.").split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    if len(parts) == 1:
        if not re.fullmatch(r"_[a-z]\w*", name):
            return None
        return (
            name in names[here] or name in BY_STEM or any(name in each for each in names.values())
        )
    first, *rest = parts
    if name.startswith("vescale_dtensor.") and hasattr(vescale_dtensor, first):
        return _reaches(vescale_dtensor, parts)
    if first in sys.stdlib_module_names and _reaches(importlib.import_module(first), rest):
        return True  # Python's own `random.choice`, where we have a module `random` too
    if first in BY_STEM and not _reaches(torch, parts):
        modules = [names[BY_STEM[part]] for part in parts[:-1] if part in BY_STEM]
        return rest[-1] in BY_STEM or any(rest[-1] in each for each in modules)
    classes = [each for each in names.values() if first in each]
    if first[0].isupper() and classes:
        return any(rest[-1] in each for each in names.values())
    return None


def _anywhere(name, names):
    """Whether what a reader is sent to is defined here, or is torch's."""
    last = name.split(".")[-1]
    ours = last in BY_STEM or any(last in each for each in names.values())
    return ours or _reaches(torch, name.removeprefix("torch.").split("."))


def _reaches(thing, parts):
    for part in parts:
        if not hasattr(thing, part):
            return False
        thing = getattr(thing, part)
    return True


@pytest.fixture(scope="module")
def parsed():
    found = trees()
    return found, {path: defined(tree) for path, tree in found.items()}


def test_every_name_in_a_docstring_exists(parsed):
    found, names = parsed
    unknown, known = [], 0
    for path, tree in found.items():
        for text in words(path, tree):
            for name, see in named(text):
                answer = exists(name, path, names)
                if answer is None and see:
                    answer = _anywhere(name, names)
                known += answer is True
                if answer is False:
                    unknown.append(f"{path.relative_to(ROOT)}: `{name}`")
    assert not unknown, "\n".join(sorted(set(unknown)))
    assert known > 150  # the test looks at something


@pytest.mark.parametrize(
    "name", ["_no_such_thing", "compile.no_such_function", "_ops/no_such_file.py", "Layout.cut_up"]
)
def test_names_that_do_not_exist_are_noticed(parsed, name):
    _, names = parsed
    assert exists(name, FILES[0], names) is False
