"""NumPy's numbers among the arguments of a call, as the Python numbers that torch takes them for.

A rule asks of an argument whether it is a number: a partial sum plus a number is no term of a sum.
`numpy.float32` is none to Python, and would pass for an option that changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch

_INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})


def with_python_numbers(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with numbers of NumPy replaced; an array that indexes becomes a tensor."""
    arrays = func in _INDEXING
    if not any(_has_numpy(value) for value in (*args, *kwargs.values())):
        return args, kwargs
    return (
        tuple(_python(value, arrays) for value in args),
        {name: _python(value, arrays) for name, value in kwargs.items()},
    )


def _has_numpy(value: Any) -> bool:
    if type(value) in (tuple, list):
        return any(map(_has_numpy, value))
    return type(value).__module__ == "numpy"  # by name: this package does not need NumPy


def _python(value: Any, arrays: bool) -> Any:
    if type(value) in (tuple, list):
        return type(value)([_python(item, arrays) for item in value])
    if type(value).__module__ != "numpy":
        return value
    if type(value).__name__ == "ndarray":
        return torch.as_tensor(value) if arrays else value
    return value.item()
