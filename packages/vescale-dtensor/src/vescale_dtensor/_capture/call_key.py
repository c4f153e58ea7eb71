"""The key of a call: one tuple, compared with `==`, that says which program may stand for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vescale_dtensor._capture.global_state import global_state
from vescale_dtensor._capture.wrapper_snapshot import cached_uses
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import storage_identity

_SIMPLE = frozenset(
    {DTensor, Tensor, torch.nn.Parameter, bool, int, float, complex, str, type(None), torch.dtype}
)
_SNAPPED = frozenset({bool, int, float, complex, str, type(None), torch.dtype})
Form = tuple[int, tuple[str, ...]] | TreeSpec
"""How flat arguments are put together: how many by position and names, or a tree."""


class KeyedCall:
    """One call.

    Attributes:
        flat: its arguments, flat.
        form: how they are put together.
        key: what a program for it is filed under: form, arguments, aliases, and `global_state`.
    """

    __slots__ = ("flat", "form", "key")

    def __init__(self, flat: list[Any], form: Form, key: tuple[Any, ...]) -> None:
        self.flat = flat
        self.form = form
        self.key = key

    def arguments(self) -> tuple[Any, dict[str, Any]]:
        """Positional and named arguments again."""
        if isinstance(self.form, TreeSpec):
            args, kwargs = tree_unflatten(self.flat, self.form)
            return args, kwargs
        count, names = self.form
        return tuple(self.flat[:count]), dict(zip(names, self.flat[count:], strict=True))


def keyed_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> KeyedCall:
    """A call as its entry."""
    flat = [*args, *kwargs.values()] if kwargs else list(args)
    form: Form = (len(args), tuple(kwargs))
    if not _SIMPLE.issuperset(map(type, flat)):
        flat, form = tree_flatten((args, kwargs))
    locals_: list[Tensor] = []
    keys = [_key(value, locals_) for value in flat]
    return KeyedCall(flat, form, (form, keys, _aliases(locals_), global_state()))


def _key(value: Any, locals_: list[Tensor]) -> Any:
    kind = type(value)
    if kind is DTensor:
        local = value._local_tensor
        locals_.append(local)
        left = _cached_state(value)  # may change its spec
        return (
            value._spec,  # interned: mesh, placements, memory order, global shape, dtype
            local.stride(),
            local.device,
            local.requires_grad,
            local.is_leaf,
            value._view_copy_of is None,
            left,
        )
    if isinstance(value, Tensor):
        locals_.append(value)
        return (
            kind,
            value.shape,
            value.stride() if value.layout is torch.strided else value.layout,
            value.dtype,
            value.device,
            value.requires_grad,
            value.is_leaf,
        )
    if kind not in _SIMPLE:
        return kind, *_snapshot(value)
    # 0.0 == -0.0, and True == 1.
    return (kind, value) if kind is not float or value else (kind, str(value))


def _snapshot(value: Any) -> tuple[Any, ...]:
    """An object as it is now: it may be another when it comes again."""
    if isinstance(value, set):
        return (frozenset(value),)
    inside = getattr(value, "__dict__", None)
    if not isinstance(inside, dict):
        return (value,)
    return value, {name: (type(v), v) for name, v in inside.items() if type(v) in _SNAPPED}


def _cached_state(wrapper: DTensor) -> Any:
    """What earlier uses have left on a DTensor: which aliases, and what it was redistributed to."""
    if wrapper._use_aliases is None and wrapper._cached_redistribution is None:
        return None
    aliases, result = cached_uses(wrapper)
    masks = None if aliases is None else tuple(aliases.by_mask)
    return masks, None if result is None else (result._spec, _cached_state(result))


def _aliases(locals_: list[Tensor]) -> Any:
    """Which of the tensors are one, and which share memory; None if nothing does."""
    if len(locals_) < 2:
        return None
    memories = [_memory(t) for t in locals_]
    if len(set(memories)) == len(memories):
        return None
    first = [next(i for i, other in enumerate(locals_) if other is t) for t in locals_]
    return first, [memories.index(m) for m in memories]


def _memory(tensor: Tensor) -> int:
    return storage_identity(tensor) if tensor.layout is torch.strided else id(tensor)


def check_arguments(flat: list[Any]) -> None:
    """Refuse arguments that no guard can compare.

    Raises:
        CaptureError: a numpy array.
    """
    for value in flat:
        if hasattr(value, "__array_interface__") and not isinstance(value, Tensor):
            raise CaptureError(
                f"capture: an argument is a {type(value).__name__}, whose values a replay would "
                "not see. Pass torch.as_tensor(value)"
            )
