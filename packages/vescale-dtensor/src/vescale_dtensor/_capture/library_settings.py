"""What modules of libraries keep for users to set: asked again by the guard.

Their code counts as constant, and what they keep for themselves (caches) is not compared.
"""

from __future__ import annotations

import copyreg
import csv
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

_OF_DIALECTS = (
    *("delimiter", "doublequote", "escapechar", "lineterminator", "quotechar", "quoting"),
    *("skipinitialspace", "strict"),
)


def csv_state() -> Any:
    """The longest field of CSV files, and the registered dialects."""
    dialects = [(name, csv.get_dialect(name)) for name in csv.list_dialects()]
    rows = [(name, *[getattr(one, key) for key in _OF_DIALECTS]) for name, one in dialects]
    return csv.field_size_limit(), *rows


def copying_state() -> Any:
    """How objects of registered classes are copied and pickled."""
    return tuple(copyreg.dispatch_table.items())


def _calendar_state() -> Any:
    return sys.modules["calendar"].firstweekday()


def _mime_state() -> Any:
    module: Any = sys.modules["mimetypes"]
    tables = module.types_map, module.common_types, module.suffix_map, module.encodings_map
    return tuple([tuple(table.items()) for table in tables])


def _start_state() -> Any:
    return sys.modules["multiprocessing"].get_start_method(allow_none=True)


def _xml_state() -> Any:
    # register_namespace has no counterpart that tells.
    return tuple(getattr(sys.modules["xml.etree.ElementTree"], "_namespace_map", {}).items())


def _loop_policy() -> Any:
    # Asking by `get_event_loop_policy` would make one, and warns from Python 3.14 on.
    return getattr(sys.modules["asyncio.events"], "_event_loop_policy", None)


def _native_kernels() -> Any:
    """Which kernels that are written in Python torch uses for its operators."""
    module = sys.modules["torch.backends.python_native"]
    names = module.all_dsls  # as `python_native.triton.enabled` does, for each
    return tuple([(n, module.is_dsl_disabled(n)) for n in names]), _switched_off(module)


def _switched_off(module: Any) -> Any:
    operations = {one for n in module.all_dsls for one in module.get_dsl_operations(n)}
    return tuple(sorted(one for one in operations if module.is_operation_disabled(one)))


_BY_FILE: dict[str, Callable[[], Any]] = {
    "/calendar.py": _calendar_state,
    "/mimetypes.py": _mime_state,
    "/multiprocessing/context.py": _start_state,
    "/xml/etree/ElementTree.py": _xml_state,
    "/copy.py": copying_state,
    "/copyreg.py": copying_state,
    "/asyncio/events.py": _loop_policy,
    "/torch/backends/python_native/__init__.py": _native_kernels,
}


def settings_read_by(code: CodeType) -> Callable[[], Any] | None:
    """What gives the settings that a file of a library reads; None if it has none."""
    name = code.co_filename
    return next((look for end, look in _BY_FILE.items() if name.endswith(end)), None)
