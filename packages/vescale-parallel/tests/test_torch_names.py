"""Where we ask torch for a private name and go on without it, the installed torch has that name.

Such a fallback is for a torch that moved it; that it was moved must not go unnoticed.
"""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("vescale_rng", "vescale_comm", "vescale_dtensor", "vescale_parallel")
ASKED = ("getattr", "hasattr")


def imported(tree: ast.AST) -> dict[str, tuple[str, str | None]]:
    """What names of a file stand for: a module of torch, or a name in one."""
    found: dict[str, tuple[str, str | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {one.asname or one.name: (node.module, one.name) for one in node.names}
        elif isinstance(node, ast.Import):
            for one in node.names:
                if one.name.startswith("torch"):
                    found[one.asname or "torch"] = (one.name if one.asname else "torch", None)
    return found


def value(expression: ast.expr, names: dict[str, tuple[str, str | None]]) -> Any:
    """What an expression such as `torch.nn.init` is; KeyError for one that is not of torch."""
    if isinstance(expression, ast.Attribute):
        return getattr(value(expression.value, names), expression.attr)
    module, name = names[expression.id if isinstance(expression, ast.Name) else ""]
    found = importlib.import_module(module)
    if name is None:
        return found
    return getattr(found, name) if hasattr(found, name) else importlib.import_module(
        f"{module}.{name}"
    )  # fmt: skip


def private_names(text: str) -> Iterator[tuple[int, str, bool]]:
    """Line, name, and whether torch has it, of each private name that the text asks torch for."""
    tree = ast.parse(text)
    names = imported(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id not in ASKED or not isinstance(node.args[1], ast.Constant):
            continue
        name = str(node.args[1].value)
        if name.startswith("_") and not name.endswith("__"):
            try:
                owner = value(node.args[0], names)
            except KeyError:
                continue
            yield node.lineno, name, hasattr(owner, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_installed_torch_has_what_it_is_asked_for(package):
    folder = Path(str(importlib.import_module(package).__file__)).parent
    found = {
        f"{path.relative_to(folder)}:{line} {name}": there
        for path in sorted(folder.rglob("*.py"))
        for line, name, there in private_names(path.read_text())
    }
    assert found
    assert not [asked for asked, there in found.items() if not there]


def test_a_name_that_was_moved_is_found():
    text = "import torch\nfrom torch.nn import init\nx = getattr(torch._C, '_gone', None)\n"
    text += "y = hasattr(init, '_no_grad_trunc_normal_')\nz = getattr(x, '_other', 0)\n"
    assert list(private_names(text)) == [(3, "_gone", False), (4, "_no_grad_trunc_normal_", True)]
