"""The fast path of functions of lists: optimizers and clipping, hundreds of tensors at once.

A list of DTensors is keyed by the tuple of their specs. Where nothing has to be redistributed, one
call on the lists of local tensors answers it. Only with grad mode off, as optimizers run: nothing
is recorded there, so no use has to be typed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.leaf_gradient import owner_of
from vescale_dtensor._fast_path.cache import REDUCES_GRADIENTS, ListResult, list_cache
from vescale_dtensor._planning.plan import function_name
from vescale_dtensor._tensor.copied_views import any_copies, check_writable
from vescale_dtensor._tensor.dtensor import DTensor, wrap_each
from vescale_dtensor._torch.compat import forward_grad_enabled

_NUMBERS = frozenset({int, float})
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_UNKNOWN = object()


class ListCall:
    """The arguments of a call on lists: its key, and the same with local tensors.

    Attributes:
        key: under which the result's specs are stored; None if some argument is of a kind that is
            not known here. Numbers are in it by value if `exact`, else by type.
        args, kwargs: with local tensors in place of DTensors.
    """

    __slots__ = ("args", "key", "kwargs")

    def __init__(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], exact: bool = False
    ) -> None:
        # Names first, then all values in order: the number of positional ones follows from both.
        key: list[Any] = [func, *kwargs]
        self.key: tuple[Any, ...] | None = None
        # Key and local tensors in one pass: with hundreds of tensors a second one would show.
        try:
            self.args = [_local_argument(value, key, exact) for value in args]
            self.kwargs = {
                name: _local_argument(value, key, exact) for name, value in kwargs.items()
            }
            self.key = tuple(key)
        except _UnknownArgumentError:
            return


class _UnknownArgumentError(Exception):
    """An argument that the fast path does not know."""


def _local_argument(value: Any, key: list[Any], exact: bool) -> Any:
    """An argument with local tensors in place of DTensors; appends its part of the key.

    Raises:
        _UnknownArgumentError: an argument of a kind that no key describes.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return _local_list(value, key, exact)
    if kind is DTensor:
        key.append(value._spec)
        return value._local_tensor
    if kind in _NUMBERS:
        key.append((kind, value) if exact else kind)
    elif kind is bool or value is None:
        key.append(value)
    elif kind in _PLAIN:
        key.append((value.shape, value.dtype))
    else:
        raise _UnknownArgumentError
    return value


def _local_list(value: Any, key: list[Any], exact: bool) -> Any:
    """The same for a list: of DTensors only, of plain tensors only, or of numbers only."""
    if not value:
        key.append(0)
        return value
    if type(value[0]) is DTensor:
        try:
            key.append(tuple([item._spec for item in value]))
            return [item._local_tensor for item in value]
        # A plain tensor among them lacks the attributes; checking each type first would cost more.
        except AttributeError:
            raise _UnknownArgumentError from None
    kinds = set(map(type, value))
    if kinds <= _NUMBERS:
        # [1, 2.0] and [2.0, 1] give results of other dtypes, so the order counts.
        key.append((len(value), *(kinds if len(kinds) == 1 else map(type, value))))
        if exact:
            key.append(tuple(value))
    elif kinds <= _PLAIN:
        key.append((len(value), *kinds))
    else:
        raise _UnknownArgumentError
    return value


def run_cached(
    func: Callable[..., Any], args: Any, kwargs: dict[str, Any], exact: bool
) -> tuple[ListCall, bool, Any]:
    """Run a call if it is known. Collective, if it needs totals of gradients.

    Args:
        func: the torch function.
        args: its arguments by position.
        kwargs: its arguments by name.
        exact: whether numbers count by value; else by type.

    Returns:
        The call, with gradients as they lie now, whether it was known, and its result.
    """
    lists = ListCall(func, args, kwargs, exact)
    specs = _known(lists)
    if specs is REDUCES_GRADIENTS:
        # In the order of the lists, as the slow path does, which another rank may take.
        reduce_gradients((*args, *kwargs.values()))
        lists = ListCall(func, args, kwargs, exact)
        specs = _known(lists)
    if specs is _UNKNOWN or specs is REDUCES_GRADIENTS:
        return lists, False, None
    # It writes to its first list, and returns that, or nothing, as torch does.
    if specs is None:
        check_all_writable(args[0], func)
        found = func(*lists.args, **lists.kwargs)
        after_mutations(args[0])
        return lists, True, None if found is None else args[0]
    found = func(*lists.args, **lists.kwargs)
    return lists, True, wrap_each(found, specs)


def _known(lists: ListCall) -> Any:
    return _UNKNOWN if lists.key is None else list_cache.get(lists.key, _UNKNOWN)


def store_specs(lists: ListCall, specs: ListResult) -> None:
    """Store the specs of the results of a call that redistributed nothing.

    Args:
        lists: the call.
        specs: one per result; None if it writes to its first list; or `REDUCES_GRADIENTS`.
    """
    if lists.key is not None:
        list_cache.store(lists.key, specs)


def reduce_gradients(arguments: Iterable[Any]) -> None:
    """Let the gradients of leaves in these lists hold their totals. Collective.

    Whether there is anything to do follows from layouts, so that all ranks do it or none.
    """
    for tensors in arguments:
        if not isinstance(tensors, list | tuple) or not _may_be_partial(tensors):
            continue
        for tensor in tensors:
            # Slots first: they are read at a quarter of the cost, and hundreds are asked.
            if (
                type(tensor) is DTensor
                and tensor._spec.layout.partial
                and tensor._grad_of is not None
                and not tensor._local_tensor.requires_grad
            ):
                leaf = owner_of(tensor)
                if leaf is not None:
                    leaf.reduce()


# For `map`, which calls no Python.
_spec_of = attrgetter("_spec")


def _may_be_partial(tensors: Sequence[Any]) -> bool:
    """Whether a partial DTensor is among them: of hundreds, by their few specs."""
    try:
        return any([spec.layout.partial for spec in set(map(_spec_of, tensors))])
    except AttributeError:  # others than DTensors among them: looked at one by one
        return True


def check_all_writable(targets: Sequence[Tensor], func: Callable[..., Any]) -> None:
    """`check_writable` of each target.

    Raises:
        UnsupportedError: one is a copied view, or has one.
    """
    if any_copies():
        for target in targets:
            check_writable(target, function_name(func))


def local_lists(value: Any) -> Any:
    """An argument with local tensors in place of DTensors, as they are."""
    if isinstance(value, list | tuple):
        return [local_lists(item) for item in value]
    return value._local_tensor if isinstance(value, DTensor) else value


def after_mutations(targets: Sequence[DTensor]) -> None:
    """`after_mutation` of each target, with grad mode off."""
    if forward_grad_enabled():
        return  # hundreds need no look outside the forward of a custom Function
    for target in targets:
        if not target._may_have_hidden_node and not target._local_tensor.requires_grad:
            target._may_have_hidden_node = True
