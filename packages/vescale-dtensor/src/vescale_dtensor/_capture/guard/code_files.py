"""Whose code and classes count as constant: those of torch, numpy, Python and these packages."""

from __future__ import annotations

import sys
import sysconfig
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from sys import stdlib_module_names
from types import CodeType

import torch

# With the slash: packages that are called torchvision or torch_geometric lie beside it.
_TORCH = f"{Path(str(torch.__file__)).parent.as_posix()}/"
_STDLIB = f"{Path(sysconfig.get_path('stdlib')).as_posix()}/"
_SITE = ("site-packages", "dist-packages")
_OURS = tuple(f"vescale_{name}" for name in ("rng", "comm", "dtensor", "parallel", "ckpt"))
# `__main__` is the script of the user.
_LIBRARIES = frozenset({"torch", "numpy", "typing_extensions", *stdlib_module_names}) - {"__main__"}


def is_users(code: CodeType) -> bool:
    """Whether code is the user's, which a package that is installed is, too."""
    return _is_users_file(code.co_filename)


def reads_modules(code: CodeType) -> bool:
    """Whether code of torch is that of modules, which reads what users set on these."""
    return code.co_filename.replace("\\", "/").startswith(f"{_TORCH}nn/")


@lru_cache(maxsize=4096)
def is_installed(file: str | None) -> bool:
    """Whether a file is of an installed package: what that defines for itself is not guarded."""
    return file is not None and any(f"/{part}/" in file.replace("\\", "/") for part in _SITE)


@lru_cache(maxsize=4096)
def _is_users_file(name: str) -> bool:
    name = name.replace("\\", "/")
    if name.startswith((_TORCH, "<frozen", *_folders())):
        return False
    # What is installed lies below the standard library, and is not of it.
    return not name.startswith(_STDLIB) or any(part in name for part in _SITE)


@lru_cache(maxsize=1)
def _folders() -> tuple[str, ...]:
    """Where numpy and these packages lie: users' folders may have their names."""
    # Those that are not imported are found, and no more.
    specs = [find_spec(name) for name in ("numpy", *_OURS)]
    found = [path for one in specs for path in (one and one.submodule_search_locations) or ()]
    return tuple(f"{Path(path).as_posix()}/" for path in found)


@lru_cache(maxsize=4096)
def is_library_module(name: str) -> bool:
    """Whether the contents of a Python module count as constant."""
    root = name.partition(".")[0]
    return root in _OURS or (root in _LIBRARIES and not _is_hidden(root))


def _is_hidden(root: str) -> bool:
    """Whether a module of the user's has the name of one of the standard library: `test`, say."""
    file = getattr(sys.modules.get(root), "__file__", None)
    return root in stdlib_module_names and file is not None and _is_users_file(file)


def is_library_class(cls: type) -> bool:
    """Whether the attributes of a class itself count as constant."""
    return is_library_module(str(cls.__module__))
