"""Finds names between backticks, in docstrings and comments of a package, that do not exist.

Looked at are names that can only be the package's: dotted ones that begin with a module or class of
it, names that begin with one underscore, and paths of files.
"""

import ast
import importlib
import importlib.util
import io
import re
import sys
import tokenize
from pathlib import Path

import torch

# What a dot precedes here is the ending of a file's name.
DATA = (".json", ".jsonl", ".bin", ".safetensors")


class Sources:
    """The sources of an imported package.

    Attributes:
        known: how many names were found to exist.
    """

    def __init__(self, package):
        self.package = package
        self.root = Path(package.__file__).parent
        self.files = sorted(self.root.rglob("*.py"))
        inits = {f.parent.name: f for f in self.files if f.stem == "__init__"}
        # Those of `integrations` are called as the libraries of others that they are for.
        ours = [f for f in self.files if f.parent.name != "integrations"]
        self.by_stem = {f.stem: f for f in ours} | inits
        self.trees = {f: ast.parse(f.read_text()) for f in self.files}
        self.names = {path: defined(tree) for path, tree in self.trees.items()}
        self.known = 0

    def unknown(self):
        """Every name that does not exist, with its file."""
        found = set()
        for path, tree in self.trees.items():
            for name, see in (each for text in words(path, tree) for each in named(text)):
                answer = self.exists(name, path)
                if answer is None and see:
                    answer = self._anywhere(name)
                self.known += answer is True
                if answer is False:
                    found.add(f"{path.relative_to(self.root)}: `{name}`")
        return sorted(found)

    def exists(self, name, here):
        """Whether a name in the file `here` is known; None where it cannot be told to be ours."""
        if "/" in name:
            if not name.endswith(".py"):
                folder = name.rstrip("/")
                return any(str(f.parent).endswith(folder) for f in self.files) or None
            return any(str(f).endswith(name) for f in self.files)
        top = f"{self.package.__name__}."
        parts = name.removeprefix(top).split(".")
        if not all(part.isidentifier() for part in parts) or name.endswith(DATA):
            return None
        if len(parts) == 1:
            if not re.fullmatch(r"_[a-z]\w*", name):
                return None
            return name in self.names[here] or name in self.by_stem or self._defines(name)
        return self._dotted(name, parts, qualified=name.startswith(top))

    def _dotted(self, name, parts, *, qualified):
        first, *rest = parts
        if qualified and hasattr(self.package, first):
            return _reaches(self.package, parts)
        if first in sys.stdlib_module_names and _reaches(importlib.import_module(first), rest):
            return True  # Python's own `random.choice`, where we have a module `random` too
        if first == "F":
            return _reaches(torch.nn.functional, rest)
        if first in self.by_stem and not _reaches(torch, parts):
            files = [self.by_stem[part] for part in parts[:-1] if part in self.by_stem]
            last = rest[-1]
            return last in self.by_stem or any(last in self.names[file] for file in files)
        if first[0].isupper() and self._defines(first):
            return self._defines(rest[-1])
        return None

    def _defines(self, name):
        return any(name in each for each in self.names.values())

    def _anywhere(self, name):
        """Whether what a reader is sent to is defined here, or is torch's, or another package's."""
        first, *rest = name.split(".")
        if first.startswith("vescale_") and importlib.util.find_spec(first):
            return _reaches(importlib.import_module(first), rest)
        last = name.split(".")[-1]
        ours = last in self.by_stem or self._defines(last)
        return ours or _reaches(torch, name.removeprefix("torch.").split("."))


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


def _reaches(thing, parts):
    for part in parts:
        if not hasattr(thing, part):
            return False
        thing = getattr(thing, part)
    return True
