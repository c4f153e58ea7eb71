"""Finds the function objects by which torch knows an operator: function, method, aliases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from vescale_dtensor._planning import Rule

Entry = TypeVar("Entry")
_PLACES: tuple[Any, ...] = (torch, torch.Tensor, F, torch.special, torch.linalg, torch.functional)

# Names that these modules share with torch's own functions, and mean the same by. What a later
# torch adds under a name that stands elsewhere for something else (`torch.polar` is elementwise,
# `torch.linalg.polar` a decomposition of matrices) has no rule by its name, and is replicated.
_APART = (torch.linalg, torch.special, torch.fft)
_NAMES_ALIKE = """
cholesky cond cross det diagonal eig lstsq lu lu_solve matmul matrix_exp matrix_power matrix_rank
norm qr slogdet solve svd vander
digamma erf erfc erfinv exp2 expm1 i0 log1p log_softmax logit logsumexp polygamma round sinc softmax
xlogy
"""
_ALIKE = frozenset(_NAMES_ALIKE.split())


def functions(
    names: str | Iterable[str], places: Iterable[Any] = _PLACES
) -> list[Callable[..., Any]]:
    """Every function object that torch offers under these names (a string: split at blanks)."""
    listed = names.split() if isinstance(names, str) else list(names)
    found: dict[Any, None] = {}
    for name in listed:
        for place in places:
            if name.startswith("__") and place is not torch.Tensor:
                continue  # every module has an `__eq__` of its own, which compares modules
            func = getattr(place, name, None)
            if callable(func) and not _means_another(place, name):
                found[func] = None
    return list(found)


def _means_another(place: Any, name: str) -> bool:
    """Whether a function may be another operator than torch's of that name."""
    if name in _ALIKE or not any(place is one for one in _APART):
        return False
    # Callable: `torch.fft` is a module.
    return any(callable(getattr(of_torch, name, None)) for of_torch in (torch, torch.Tensor))


def entries(
    names: str | Iterable[str], entry: Entry, places: Iterable[Any] = _PLACES
) -> dict[Callable[..., Any], Entry]:
    """Part of a family's table: one rule or handler under every function with these names."""
    return dict.fromkeys(functions(names, places), entry)


def by_name(names: Iterable[str], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, given the names of those that may come by position."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def both_forms(names: str, rule: Rule) -> dict[Callable[..., Any], Rule]:
    """The rule under these names, and as one that writes operand 0 under `name_`."""
    in_place = [f"{name}_" for name in names.split()]
    return entries(names, rule) | entries(in_place, rule.writing)


def getter(name: str) -> Any:
    """The getter of a tensor property, as `__torch_function__` sees it."""
    return getattr(torch.Tensor, name).__get__


def setter(name: str) -> Any:
    """The setter of a tensor property, as `__torch_function__` sees it."""
    return getattr(torch.Tensor, name).__set__
