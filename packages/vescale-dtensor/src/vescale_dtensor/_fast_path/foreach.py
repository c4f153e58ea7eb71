"""The fast path of functions of lists: optimizers and clipping, hundreds of tensors at once.

A list of DTensors is keyed by the tuple of their specs, and one call on the lists of local tensors
serves it where nothing has to be redistributed. Only without grad mode, where optimizers run:
nothing is recorded there, so no use has to be typed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._fast_path.cache import list_cache
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._planning.plan import function_name
from vescale_dtensor._tensor.copied_views import any_copies, check_writable
from vescale_dtensor._tensor.dtensor import DTensor, wrap_each

_NUMBERS = frozenset({int, float})
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


class ListCall:
    """The arguments of a call on lists, taken apart.

    Attributes:
        key: of the compiled call; None where a kind of argument is not known here. Numbers
            are in it by value where `exact`.
        args, kwargs: with local tensors in place of DTensors.
    """

    __slots__ = ("args", "key", "kwargs")

    def __init__(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], exact: bool = False
    ) -> None:
        key: list[Any] = [func, *kwargs]
        self.key: tuple[Any, ...] | None = None
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
    kind = type(value)
    if kind is list or kind is tuple:
        return _local_list(value, key)
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


def _local_list(value: Any, key: list[Any]) -> Any:
    if not value:
        key.append(0)
        return value
    if type(value[0]) is DTensor:
        try:
            key.append(tuple([item._spec for item in value]))
            return [item._local_tensor for item in value]
        except AttributeError:
            raise _UnknownArgumentError from None
    kinds = set(map(type, value))
    if not (kinds <= _NUMBERS or kinds <= _PLAIN):
        raise _UnknownArgumentError
    key.append((len(value), *kinds))
    return value


def run_cached(func: Callable[..., Any], args: Any, lists: ListCall) -> tuple[bool, Any]:
    """Run a call that is known: whether it was, and what it gives."""
    if lists.key is None or lists.key not in list_cache:
        return False, None
    specs = list_cache[lists.key]
    if specs is None:
        check_all_writable(args[0], func)
        found = func(*lists.args, **lists.kwargs)
        _after_mutations(args[0])
        return True, None if found is None else args[0]
    found = func(*lists.args, **lists.kwargs)
    return True, wrap_each(found, specs)


def store_specs(lists: ListCall, specs: tuple[Spec, ...] | None) -> None:
    """Remember what a call gives that moved nothing."""
    if lists.key is not None:
        list_cache.store(lists.key, specs)


def check_all_writable(targets: Sequence[Tensor], func: Callable[..., Any]) -> None:
    """`check_writable` of each."""
    if any_copies():
        for target in targets:
            check_writable(target, function_name(func))


def _after_mutations(targets: Sequence[DTensor]) -> None:
    """`written` of each, without grad mode."""
    for target in targets:
        if not target._may_have_hidden_node and not target._local_tensor.requires_grad:
            target._may_have_hidden_node = True
