"""Brings arguments that were given by name into one form for each call.

torch's C++ parser takes every argument by its name, in any order, and some by NumPy's name for it
too. It passes to `__torch_function__` what the caller wrote. Rules, handlers and keys know one form
only: torch's own names, tensors in the order of the signature, and by position as far as no default
is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from vescale_dtensor._torch.schemas import OverloadArguments, signatures

# `numpy_compatibility_arg_names` of torch/csrc/utils/python_arg_parser.cpp, the other way round.
NUMPY = {
    "axis": "dim",
    "keepdims": "keepdim",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
}


def named_as_torch_does(
    func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The same call in the form that rules know.

    Args:
        func: any torch function. Only C++ functions and registered ops accept several forms; for a
            Python function, Python has sorted out the names already.
        args: as the caller gave them.
        kwargs: as the caller gave them; not changed.

    Returns:
        Positional and named arguments; `args` and `kwargs` themselves if nothing is to change.
    """
    numpy = not NUMPY.keys().isdisjoint(kwargs)
    tensors = [name for name, value in kwargs.items() if _holds_tensors(value)]
    if not (numpy or tensors):
        return args, kwargs
    known = signatures(func)
    # A name of NumPy's may be the function's own: `linalg.vecdot(x=…)`, `segment_reduce(axis=…)`.
    own = frozenset().union(*(signature.names for signature in known))
    renamed = {name: name if name in own else NUMPY.get(name, name) for name in kwargs}
    named = {renamed[name]: value for name, value in kwargs.items()}
    signature = next((s for s in known if s.takes(len(args), named)), None)
    if signature is None:
        return args, kwargs
    return _in_order(signature, args, named, [renamed[name] for name in tensors])


def _in_order(
    signature: OverloadArguments, args: Any, named: dict[str, Any], tensors: list[str]
) -> tuple[Any, dict[str, Any]]:
    """By position up to the last tensor, where no default lies between; the rest in order."""
    order = {name: place for place, name in enumerate(signature.positional)}
    last = max((order.get(name, -1) for name in tensors), default=-1)
    values = list(args)
    for name in signature.positional[len(args) : last + 1]:
        if name not in named:
            break  # left out: its default is not known here, so what follows has to stay named
        values.append(named.pop(name))
    names = sorted(named, key=lambda name: order.get(name, len(order)))
    return tuple(values), {name: named[name] for name in names}


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor)
