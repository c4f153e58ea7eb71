"""Keys of compiled calls: by what arguments two calls are the same.

A key describes arguments as far as a plan depends on them: DTensors by spec, plain tensors by shape
and dtype, values by themselves and their types. An exact key holds the arguments of a call of one
DTensor as they are written, which is cheaper to build.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from marshal import dumps
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
) -> tuple[Any, ...] | None:
    """The exact key of a call of one DTensor and of values: each with its type, and its name.

    Args:
        func: the torch function.
        spec: of the DTensor.
        values: the positional arguments behind it.
        named: the named ones.

    Returns:
        The key; None if there is another DTensor among the values.
    """
    # 1 == 1.0 == True, and torch takes one of them: so types count, those in a tuple too. Up to
    # three values are written out, flat: there are mostly no more, and each tuple within a key has
    # to be made and hashed.
    if not named:
        if len(values) == 1:
            (one,) = values
            kind = type(one)
            if kind is not tuple:
                return (func, spec, kind, one)
        elif len(values) == 2:
            one, two = values
            kind, other = type(one), type(two)
            if kind is not tuple is not other and kind is not DTensor is not other:
                return (func, spec, kind, other, one, two)
        elif len(values) == 3:
            one, two, three = values
            kind, other, last = type(one), type(two), type(three)
            if (
                kind is not tuple is not other
                and last is not tuple
                and kind is not DTensor is not other
                and last is not DTensor
            ):
                return (func, spec, kind, other, last, one, two, three)
    if len(values) > 1:
        for value in values:
            if type(value) is DTensor:
                return None
    for value in named.values():
        if type(value) is DTensor:
            return None
    try:
        # These bytes tell types apart, at a third of what it costs to ask each value for its own.
        # The second version has no references, so equal values have equal bytes.
        return (func, spec, dumps((values, *named.values()), 2), *named)
    except ValueError:  # dtypes and the like
        held = tuple(named.values())
        return (func, spec, values, held, kinds_within(values), kinds_within(held), *named)


def kinds_within(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The types of the items of a tuple; of those that are tuples, the types of their items."""
    # A loop, and neither `map`, which calls `type` at five times the cost, nor a comprehension,
    # which is a call of its own until Python 3.12.
    kinds: list[Any] = []
    for value in values:
        kind = type(value)
        kinds.append(kind if kind is not tuple else kinds_within(value))
    return tuple(kinds)


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
        if (
            step is None
            and (type(start) is int or start is None)
            and (type(stop) is int or stop is None)
        ):
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


def are_values(arguments: Iterable[Any], numbers: bool) -> bool:
    """Whether arguments are values that an exact key may hold.

    A tensor in it would be kept alive by the table. A number that may vary from call to call (a
    learning rate) would add an entry each time.

    Args:
        arguments: what the key is made of.
        numbers: whether there may be numbers among them.
    """
    known = _ANY_VALUE if numbers else _VALUES
    return all(
        are_values(each, numbers)
        if isinstance(each, tuple | list)
        else are_values((each.start, each.stop, each.step), numbers)
        if type(each) is slice
        else type(each) in known
        for each in arguments
    )
