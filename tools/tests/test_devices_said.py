"""Memory of a package's own says its device: without one it lies where the user's default is.

Under `torch.set_default_device("cuda")` what is meant for the host would lie on the GPU, and under
`torch.device("meta")` it would have no data.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

from tools.packages import PACKAGES

MAKERS = {func.__name__ for func in _device_constructors()} & {*dir(torch)}

# What is the user's, or does as torch's own does, lies where the default is.
FREE = {
    ("vescale_dtensor/_joint/optimizers.py", "tensor"),  # an optimizer's `step`, as torch's
    ("vescale_dtensor/_torch/scalars.py", "as_tensor"),  # an array that is given to a function
    ("vescale_parallel/_invariant/norm.py", "tensor"),  # the norm of nothing, as torch's
    ("vescale_parallel/integrations/transformers.py", "as_tensor"),  # may lie on a device
    ("vescale_parallel/train/model.py", "arange"),  # buffers of a model
}


def makers(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """(name, line, whether it says a device) of each call of `torch.empty` and its like."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if (
                name in MAKERS
            ):
                # `**kwargs` may say one.
                yield name, node.lineno, any(k.arg in ("device", None) for k in node.keywords)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.short)
def test_memory_says_its_device(package):
    source = Path(package.folder) / "src"
    assert source.is_dir()
    free = {(str(source / file), name) for file, name in FREE}
    silent = [
        f"{path}:{line}: torch.{name} says no device"
        for path in sorted(source.rglob("*.py"))
        for name, line, says in makers(ast.parse(path.read_text()))
        if not says and (str(path), name) not in free
    ]
    assert not silent, "\n".join(silent)


def test_what_is_free_exists():
    made = {
        (str(path.relative_to(source)), name)
        for package in PACKAGES
        for source in [Path(package.folder) / "src"]
        for path in source.rglob("*.py")
        for name, _, says in makers(ast.parse(path.read_text()))
        if not says
    }
    assert made == FREE


def test_they_are_found():
    text = "torch.empty(3)\ntorch.zeros(2, device='cpu')\ntorch.full(**given)\ntorch.cat([])\n"
    assert [*makers(ast.parse(text))] == [
        ("empty", 1, False),
        ("zeros", 2, True),
        ("full", 3, True),
    ]
