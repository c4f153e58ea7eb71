"""Which code a recording watches: the user's, and what of torch keeps Python state for the user.

The code of torch, of these packages, of numpy and of the standard library counts as constant: it
does the same at every replay, given the same arguments. What it reads of the user's objects does
not, so the parts that read attributes of objects (modules, optimizers, scalers, most of the
standard library) are watched for the names they use.
"""

from __future__ import annotations

import abc
import sys
import sysconfig
import types
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from sys import stdlib_module_names
from types import CodeType

import torch

# With the slash: packages that are called torchvision or torch_geometric lie beside it.
TORCH = f"{Path(str(torch.__file__)).parent.as_posix()}/"
_STDLIB = f"{Path(sysconfig.get_path('stdlib')).as_posix()}/"
_SITE = ("site-packages", "dist-packages")
_OURS = tuple(f"vescale_{name}" for name in ("rng", "comm", "dtensor", "parallel", "ckpt"))
_STATEFUL_TORCH = ("nn/modules/", "nn/utils/", "optim/", "amp/", "distributions/")
_OF_TORCH = ("nn", "optim", "amp", "backends", "cuda.amp", "distributions", "utils.data")
_STATEFUL_MODULES = tuple(f"torch.{n}" for n in _OF_TORCH)
# What of torch runs ops, finds devices and ranks: instances of its classes count as constant.
_PARTS_OF_TORCH = (
    *("_", "autograd", "backends", "classes", "compiler", "cuda", "distributed", "export", "func"),
    *("functional", "fx", "jit", "library", "mps", "multiprocessing", "ops", "overrides", "random"),
    *("return_types", "serialization", "types", "utils._", "utils.hooks", "version", "xpu"),
)
_CONSTANT_TORCH = ("torch.", *(f"torch.{part}" for part in _PARTS_OF_TORCH))[1:]
_UNWATCHED = ("typing.", "ast.", "traceback.", "inspect.", "warnings.")
# Parts of the standard library that look at code and at the process, not at the user's objects.
# And `fractions`: planning a redistribution uses it, and its abstract classes count as changed when
# a library (sympy, by torch's compiler) registers its own numbers with them.
_SILENT = frozenset(
    {"logging", "warnings", "importlib", "inspect", "linecache", "traceback", "re", "tokenize"}
    | {"typing", "abc", "dis", "ast", "pdb", "site", "runpy", "fractions", "numbers"}
)
# `__main__` is the script of the user.
_LIBRARIES = frozenset({"torch", "numpy", "typing_extensions", *stdlib_module_names}) - {"__main__"}
# The root of every class that an extension makes with pybind11: it has no attributes of its own.
_BASES_OF_EXTENSIONS = frozenset({"pybind11_builtins"})
# Called for every module, and guarded by `ModuleGuard`: not worth the names.
_PLUMBING = frozenset({"_wrapped_call_impl", "_call_impl", "inner", "__getattr__", "__setattr__"})

# Modules of Python whose code makes classes for users.
_MAKERS = {"types": types, "abc": abc}
_ON_THE_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: classes that Python code has made, and some of C

USER, STATEFUL, LIBRARY = "user", "stateful", "library"


def kind_of_code(code: CodeType) -> str:
    """USER for code whose globals and attributes are noted, STATEFUL for attributes only."""
    found = _kind_of_file(code.co_filename)
    # By name and file: users' methods of these names are watched.
    plumbing = found == STATEFUL and code.co_name in _PLUMBING and _is_of_modules(code)
    return LIBRARY if plumbing else found


def compares_ranks(code: CodeType) -> bool:
    """Whether code is of what watches over ranks, and no part of what a function does."""
    return code.co_filename.replace("\\", "/").startswith(_watching())


@lru_cache(maxsize=1)
def _watching() -> tuple[str, ...]:
    """Where vescale_comm compares what ranks do."""
    found = find_spec("vescale_comm")
    places = (found and found.submodule_search_locations) or ()
    return tuple(f"{Path(path).as_posix()}/_watchdog/" for path in places)


def is_of_python(code: CodeType) -> bool:
    """Whether code is of the standard library."""
    name = code.co_filename
    return name.startswith(("<frozen os", "<frozen posixpath")) or (
        name.startswith(_STDLIB) and not any(part in name for part in _SITE)
    )


def _is_of_modules(code: CodeType) -> bool:
    """Whether code is in the file of `nn.Module`."""
    return code.co_filename.endswith("module.py")


@lru_cache(maxsize=4096)
def _kind_of_file(name: str) -> str:
    """What a file's code counts as, by where it lies."""
    name = name.replace("\\", "/")
    if name.startswith(TORCH):
        return STATEFUL if name[len(TORCH) :].startswith(_STATEFUL_TORCH) else LIBRARY
    if name.startswith(_counted_folders()) or _is_part_of_python(name):
        return LIBRARY
    # What is installed lies below the standard library, and is not of it.
    if name.startswith(_STDLIB) and not any(part in name for part in _SITE):
        root = name[len(_STDLIB) :].partition("/")[0].removesuffix(".py")
        return LIBRARY if root in _SILENT else STATEFUL
    return USER


@lru_cache(maxsize=1)
def _counted_folders() -> tuple[str, ...]:
    """Where numpy and these packages lie: users' folders may have their names."""
    # Those that are not imported are found, and no more.
    specs = [find_spec(name) for name in ("numpy", *_OURS)]
    found = [path for one in specs for path in (one and one.submodule_search_locations) or ()]
    return tuple(f"{Path(path).as_posix()}/" for path in found)


def _is_part_of_python(name: str) -> bool:
    """Whether a file counts as one of Python's own: with what replaces `typing`'s."""
    return name.startswith("<frozen") or name.endswith("/typing_extensions.py")


@lru_cache(maxsize=4096)
def is_library_module(name: str) -> bool:
    """Whether the contents of a Python module count as constant."""
    root = name.partition(".")[0]
    return root in _OURS or (root in _LIBRARIES and not _is_hidden(root))


def _is_hidden(root: str) -> bool:
    """Whether a module of the user's has the name of one of the standard library: `test`, say."""
    module = sys.modules.get(root)
    if root not in stdlib_module_names or module is None:
        return False
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if file is None:  # built in
        return False
    name = Path(file).as_posix()
    return not name.startswith(_STDLIB) or any(part in name for part in _SITE)


def is_library_class(cls: type) -> bool:
    """Whether the attributes of a class itself count as constant."""
    name = str(cls.__module__)
    # What `dataclasses.make_dataclass`, `types.new_class` and `ABCMeta(...)` make for the user says
    # that it is of these modules.
    if name in _MAKERS and vars(_MAKERS[name]).get(cls.__name__) is not cls:
        return not cls.__flags__ & _ON_THE_HEAP
    return name in _BASES_OF_EXTENSIONS or is_library_module(name)


def keeps_state_for_users(cls: type) -> bool:
    """Whether instances of a class have attributes that are the user's to change."""
    name = str(cls.__module__)
    if not is_library_module(name):
        return True
    # A class of the user's among its bases has attributes of the user's.
    if any(not is_library_class(base) for base in cls.__mro__):
        return True
    root = name.partition(".")[0]
    if root in stdlib_module_names:
        return root not in _SILENT
    return name.startswith(_STATEFUL_MODULES)


def keeps_state_unseen(cls: type) -> bool:
    """Whether instances have attributes that library code reads, which nobody watches."""
    name = f"{cls.__module__}."
    known = name.startswith("torch.") and not name.startswith(_CONSTANT_TORCH)
    return known or name.startswith(_UNWATCHED)
