"""Keys of compiled calls: by what arguments two calls are the same.

A key describes arguments as far as a plan depends on them: DTensors by spec, plain tensors by shape
and dtype, values by themselves and their types. An exact key holds the arguments of a call of one
DTensor as they are written, which is cheaper to build.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._tensor.dtensor import DTensor

NUMBERS = frozenset({int, float})
_VALUES = frozenset(
    {bool, str, type(None), type(...), torch.dtype, torch.memory_format, torch.device}
)
_ANY_VALUE = _VALUES | NUMBERS
_SEQUENCES = frozenset({tuple, list, torch.Size})
_ONLY_DTENSORS = {DTensor}
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
TENSORS = frozenset({DTensor, *_PLAIN})
# Separates positional arguments from named ones in a key: a string before it is a value, and one
# behind it a name.
NAMED = object()
GETITEM = torch.Tensor.__getitem__


def exact_key(
    func: Callable[..., Any], spec: Spec, values: Any, named: dict[str, Any]
) -> tuple[Any, ...]:
    """The exact key of a call of one DTensor and of values: these values and their types.

    `values` are the positional ones; how many there are follows from the names of the others.
    """
    # 1 == 1.0 == True, and torch takes one of them: so types count, those in a tuple too. Up to
    # three values are written out, flat: there are mostly no more, and each tuple within a key has
    # to be made and hashed. Such a key has a type where another form has the values, or no type.
    kinds: Any
    if not named and len(values) == 1:
        (one,) = values
        kinds = type(one)
        return (func, spec, kinds if kinds is not tuple else kinds_within(values), one)
    if not named and len(values) == 2:
        one, two = values
        kind, other = type(one), type(two)
        if kind is not tuple and other is not tuple:
            return (func, spec, kind, other, one, two)
    elif not named and len(values) == 3:
        one, two, three = values
        kind, other, last = type(one), type(two), type(three)
        if kind is not tuple and other is not tuple and last is not tuple:
            return (func, spec, kind, other, last, one, two, three)
    if named:
        values = (*values, *named.values())
    return (func, spec, values, kinds_within(values), *named)


def kinds_within(values: Any) -> tuple[Any, ...]:
    """The types of values, and behind them those of the items of tuples among them.

    Which tuple an item is of follows from the values, which are in a key beside their types.
    """
    kinds = tuple(map(type, values))
    count = kinds.count(tuple)
    if count == 1:  # a shape among options, as of `layer_norm`
        return kinds + kinds_within(values[kinds.index(tuple)])
    if count:
        # A loop, and no comprehension: until 3.12 that is a call of its own.
        for value in values:
            if type(value) is tuple:
                kinds += kinds_within(value)
    return kinds


def index_key(spec: Spec, index: Any) -> tuple[Any, ...]:
    """The exact key of indexing by values. Slices are split: before 3.12 they do not hash.

    Args:
        spec: of the tensor that is indexed.
        index: an index, or a tuple of them.
    """
    kind = type(index)
    if kind is slice:
        start, stop, step = index.start, index.stop, index.step
        # Bounds that are an int or None tell themselves apart.
        plain = (type(start) is int or start is None) and (type(stop) is int or stop is None)
        if plain and step is None:
            return (GETITEM, spec, slice, start, stop)
        return (GETITEM, spec, slice, start, stop, step, type(start), type(stop), type(step))
    if kind is tuple:
        parts = tuple([(i.start, i.stop, i.step) if type(i) is slice else i for i in index])
        # With the types of slices' bounds, and of items in a tuple: [0, 1] is no mask.
        kinds = tuple([kinds_within(i) if type(i) is tuple else type(i) for i in parts])
        return (GETITEM, spec, parts, kinds, *map(type, index))
    return (GETITEM, spec, kind, index)


def extend_key(values: Iterable[Any], key: list[Any], operands: list[DTensor], exact: bool) -> bool:
    """Append arguments to a key, and the DTensors among them to `operands`.

    Args:
        values: the arguments.
        key: gets specs of DTensors, shape and dtype of plain tensors, and values.
        operands: gets the DTensors, in order.
        exact: whether numbers count by value; else by type.

    Returns:
        False if an argument is of a kind that no key describes: the slow path answers.
    """
    for value in values:
        kind = type(value)
        if kind is DTensor:
            key.append(value._spec)
            operands.append(value)
        elif kind in _VALUES:
            key.append(value)
        elif kind in NUMBERS:
            key.append(kind)
            if exact:
                key.append(value)
        elif kind in _SEQUENCES:
            key.append((kind, len(value)))
            # Written out for long lists: clipping stacks hundreds of norms.
            if set(map(type, value)) == _ONLY_DTENSORS:
                key += [item._spec for item in value]
                operands += value
            # Numbers in a sequence are sizes or dims, which count by value.
            elif not extend_key(value, key, operands, True):
                return False
        elif kind in _PLAIN:
            strided = value.layout is torch.strided
            if value.requires_grad or not (strided and value.is_contiguous()):
                return False  # it has a gradient to type, or a memory order
            key.append((value.shape, value.dtype))
        elif kind is slice:
            key.append(slice)
            if not extend_key((value.start, value.stop, value.step), key, operands, True):
                return False
        else:
            return False
    return True


def is_value_key(key: Any, numbers: bool) -> bool:
    """Whether a key holds values alone.

    A tensor in it would be kept alive by the table. A number that may vary from call to call (a
    learning rate) would add an entry each time.
    """
    known = _ANY_VALUE if numbers else _VALUES
    return all(
        is_value_key(part, numbers) if isinstance(part, tuple) else type(part) in known
        for part in key
        if part is not NAMED and not isinstance(part, type)
    )
