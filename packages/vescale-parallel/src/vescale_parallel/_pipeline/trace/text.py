"""Encodes what stages exchange as JSON text, and reads it back: data, never code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Final

import torch
from torch import Tensor
from vescale_dtensor import Placement, placement_types

from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.trace.tensor_specs import NestedSpecs, TensorSpec

_RECORDS: Final[dict[str, Any]] = {one.__name__: one for one in (NestedSpecs, TensorSpec)}


def add_record(kind: type) -> type:
    """Let named tuples of a kind be written as text."""
    _RECORDS[kind.__name__] = kind
    return kind


def to_text(value: Any) -> str:
    """Write a nesting of plain values, dtypes, placements and the records of this room.

    Raises:
        PipelineError: there is something else in it.
    """
    return json.dumps(_written(value))


def from_text(text: str) -> Any:
    """Read what `to_text` writes.

    Raises:
        PipelineError: it is something else. Nothing is imported or called but records, placements
            and classes of outputs that this process has.
    """
    try:
        return _read(json.loads(text))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        line = " ".join(str(error).split())[:200]
        raise PipelineError(
            f"a stage was told what no stage says ({type(error).__name__}: {line}): "
            f"{text[:80]!r}. Run the same version on every rank."
        ) from error


def _written(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value)
    # Before tuples, which they are as well.
    if kind.__name__ in _RECORDS and isinstance(value, tuple):
        return {"record": kind.__name__, "of": [_written(one) for one in value]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Placement):
        # Dataclasses by their fields; others say what they are made of when they are pickled.
        given = (
            tuple(getattr(value, one.name) for one in fields(value) if one.init)
            if is_dataclass(value)
            else tuple(value.__reduce__()[1])
        )
        return {"placement": kind.__name__, "of": _written(given)}
    # Not a value of the model: in a `NestedSpecs` the number of a tensor stands as a tensor.
    if isinstance(value, Tensor) and value.ndim == 0:
        return {"number": int(value)}
    name = f"{kind.__module__}:{kind.__qualname__}"
    # A class that every rank has: where it is found by its name, it is a module's own.
    if (_is_output(kind) or _is_named_tuple(kind)) and _class_of(name) is kind:
        items = value.items() if _is_output(kind) else value._asdict().items()
        return {"output": name, "of": [[key, _written(one)] for key, one in items]}
    # No subclasses, which may hold more than their items.
    if kind in (list, tuple):
        return {kind.__name__: [_written(one) for one in value]}
    if kind is dict:
        # As pairs: JSON would make texts of keys that are numbers.
        return {"dict": [[_written(k), _written(v)] for k, v in value.items()]}
    hint = " Pass use_cache=False." if "Cache" in kind.__qualname__ else ""
    raise PipelineError(
        f"a block of a pipeline returns a {kind.__qualname__}: between stages there are tensors, "
        f"numbers and texts, and tuples, lists and dicts of them, and named tuples of classes that "
        f"lie in a module.{hint}"
    )


def _read(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "record" in value:
        return _RECORDS[value["record"]](*map(_read, value["of"]))
    if "dtype" in value:
        return _known(torch, value["dtype"], lambda one: isinstance(one, torch.dtype))
    if "placement" in value:
        made = _known(placement_types, value["placement"], _is_placement)
        return made(*_read(value["of"]))
    if "number" in value:
        return torch.tensor(value["number"], device="cpu")
    if "output" in value:
        made = _class_of(value["output"])
        if not (_is_output(made) or _is_named_tuple(made)):
            raise ValueError(f"{value['output']} is no output of a model")
        return made(**{key: _read(one) for key, one in value["of"]})
    if "dict" in value:
        return {_read(k): _read(v) for k, v in value["dict"]}
    ((kind, entries),) = value.items()
    return {"list": list, "tuple": tuple}[kind](map(_read, entries))


def _known(module: Any, name: str, fits: Callable[[Any], bool]) -> Any:
    """What a module has under a name, of the one kind that is meant."""
    found = vars(module).get(name)
    if not fits(found):
        raise ValueError(f"{name[:80]!r} is none that {module.__name__} has")
    return found


def _class_of(name: str) -> Any:
    """A class by its module and name, of a module that is there; None: there is none."""
    module, _, name = name.partition(":")
    # Nothing is imported, nor asked for by a module's own `__getattr__`, which may import.
    return vars(sys.modules[module]).get(name) if module in sys.modules else None


def _is_placement(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Placement)


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_output(kind: Any) -> bool:
    """Whether a class is that of outputs of Hugging Face models."""
    return isinstance(kind, type) and issubclass(kind, dict) and is_dataclass(kind)
