"""Basic indexing: dims that are taken whole may be split."""

from __future__ import annotations

from typing import Any

from vescale_dtensor._call import Call
from vescale_dtensor._plan import Rule
from vescale_dtensor._rules._names import functions
from vescale_dtensor._strategy import Signature, Strategy


def _getitem(call: Call) -> Strategy | None:
    if len(call.operands) != 1:
        return None  # indices that are tensors
    given = call.args[1]
    items = list(given) if isinstance(given, tuple) else [given]
    if any(not _basic(item) for item in items):
        return None
    shape = tuple(call.operands[0].shape)
    return _taken(shape, _spread(items, len(shape)))


def _basic(item: Any) -> bool:
    if isinstance(item, bool):
        return False
    return item is None or item is Ellipsis or isinstance(item, int | slice)


def _spread(items: list[Any], ndim: int) -> list[Any]:
    """The index with its ellipsis, or its missing end, written out."""
    used = sum(item is not None and item is not Ellipsis for item in items)
    whole = [slice(None)] * (ndim - used)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        return [*items[:at], *whole, *items[at + 1 :]]
    return [*items, *whole]


def _taken(shape: tuple[int, ...], items: list[Any]) -> Strategy:
    operand: list[int | None] = []
    result: list[int | None] = []
    for item in items:
        if item is None:
            result.append(None)
            continue
        dim = len(operand)
        letter = dim if item == slice(None) else None
        operand.append(letter)
        if not isinstance(item, int):
            result.append(letter)
    return Signature((tuple(operand),), (tuple(result),), carries=True).strategy()


def _one_dim(call: Call, keeps: bool) -> Strategy | None:
    dim, ndim = call.argument(1, "dim"), call.operands[0].ndim
    if not isinstance(dim, int) or len(call.operands) != 1:
        return None
    dims = tuple(None if d == dim % ndim else d for d in range(ndim))
    result = dims if keeps else tuple(d for i, d in enumerate(dims) if i != dim % ndim)
    return Signature((dims,), (result,), carries=True).strategy()


def _select(call: Call) -> Strategy | None:
    return _one_dim(call, keeps=False)


def _narrow(call: Call) -> Strategy | None:
    return _one_dim(call, keeps=True)


RULES = {
    **{f: Rule("index", _getitem, views=True) for f in functions("__getitem__")},
    **{f: Rule("select", _select, views=True) for f in functions("select")},
    **{f: Rule("narrow", _narrow, views=True) for f in functions("narrow")},
}
