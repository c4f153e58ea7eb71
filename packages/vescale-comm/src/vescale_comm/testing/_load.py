"""Load test files by their paths, in a worker."""

import importlib.util
import os
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from vescale_comm.testing._messages import Case

_loaded: dict[str, tuple[int, ModuleType]] = {}


def function_of(case: Case) -> Any:
    """Return the function that a case names, from its file as it is now."""
    sys.path[:] = case.sys_path
    return reduce(getattr, case.qualname.split("."), _module(case.path, case.module))


def _module(path: str, name: str) -> Any:
    # A worker outlives edits of the file: a notebook's or an editor's next run wants the new code.
    changed = os.stat(path).st_mtime_ns
    known = _loaded.get(path)
    if known is not None and known[0] == changed:
        return known[1]
    # Under the name that it has in the test process, so that instances of its classes can travel.
    name = "__mp_main__" if name == "__main__" else name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Before it runs: a file may look itself up, as dataclasses and pickle do.
    sys.modules[name] = module
    if name == "__mp_main__":
        sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)
    _loaded[path] = changed, module
    return module
