"""The key of a call: one tuple, compared with `==`, that says which program may stand for it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.uses import UseAliases
from vescale_dtensor._capture.guard.code_files import is_library_class
from vescale_dtensor._capture.guard.equality import exactly, same
from vescale_dtensor._capture.guard.global_state import global_state
from vescale_dtensor._capture.guard.kinds import kind_of_class
from vescale_dtensor._capture.guard.places import OF_TENSORS
from vescale_dtensor._capture.guard.records import Form as Tree
from vescale_dtensor._capture.guard.records import attributes_of, flatten, is_record
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.state import result_outdated
from vescale_dtensor._torch.compat import storage_identities, storage_identity

LEAVES = frozenset(
    {DTensor, Tensor, torch.nn.Parameter, bool, int, float, complex, str, type(None), torch.dtype}
)
"""Types of which an argument is nothing that leads to more."""
Form = tuple[int, tuple[str, ...]] | Tree
"""How flat arguments are put together: how many by position and names, or a tree."""


class KeyedCall:
    """One call.

    Attributes:
        args, kwargs: as given.
        flat: its arguments, flat.
        form: how they are put together.
        key: what a program for it is filed under: form, arguments, aliases, and `global_state`.
    """

    __slots__ = ("_kind", "args", "flat", "form", "key", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the arguments apart, and make the key."""
        self.args, self.kwargs = args, kwargs
        flat = [*args, *kwargs.values()] if kwargs else list(args)
        form: Form = (len(args), tuple(kwargs))
        if not LEAVES.issuperset(map(type, flat)):
            flat, form = flatten((args, kwargs))
        keys = [_key(value) for value in flat]
        self.flat, self.form = flat, form
        self.key = form, keys, _aliases(_locals_of(flat)), global_state()
        self._kind: Hashable = None

    def kind(self) -> Hashable:
        """See `kind_of`."""
        if self._kind is None:
            self._kind = kind_of(self.key)
        return self._kind

    def has_new_attributes(self) -> bool:
        """Whether the function set attributes on tensors that it was given."""
        pairs = zip(self.flat, self.key[1], strict=True)
        return any(_attributes(v) != key[-1] for v, key in pairs if isinstance(v, Tensor))

    def is_as_it_was(self) -> bool:
        """Whether the function changed none of the lists, dicts and objects it was given."""
        # Leaves alone, of which only tensors can be changed, and writes to those are recorded.
        if isinstance(self.form, tuple):
            return True
        # Identity of leaves, so that a tensor put in place of another is seen.
        flat, form = flatten((self.args, self.kwargs))
        return form == self.form and all(map(same, flat, self.flat))


def kind_of(key: tuple[Any, ...]) -> Hashable:
    """The layouts, shapes and types of a key: equal for calls of equal keys."""
    # Of a DTensor the spec, of a tensor the shape; of other values the type alone.
    parts = [part[issubclass(part[0], Tensor)] if isinstance(part[0], type) else part[0]
             for part in key[1]]  # fmt: skip
    return len(parts), *parts


class _One:
    """An object that is compared by identity; constants among them by value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        # Not `==` of the values: the user's may run ops, and 1 == True.
        return isinstance(other, _One) and same(self.value, other.value)

    # Keys are compared in a list, never hashed: so they may hold lists and dicts.
    __hash__ = None  # type: ignore[assignment]


def _locals_of(flat: list[Any]) -> list[Tensor]:
    """The tensors that a program would use of these arguments."""
    tensors: list[Any] = [value for value in flat if isinstance(value, Tensor)]
    return [one._local_tensor if type(one) is DTensor else one for one in tensors]


def _key(value: Any) -> Any:
    """What a program fixes of one argument."""
    kind = type(value)
    if kind is DTensor:
        local, aliases = value._local_tensor, value._use_aliases
        left: Any = None
        if value._cached_redistribution is not None:
            left = _cached_state(value)  # may change its spec
        elif aliases is not None:
            # `_cached_state` written out: parameters that a layer above gathers have aliases.
            current = aliases.local is local and aliases.version == local._version
            known = aliases.known if aliases.apart else aliases.by_mask
            left = (tuple(known) if current else None), None
        return (
            value._spec,  # interned: mesh, placements, memory order, global shape, dtype
            local.stride(),
            local.device,
            local.requires_grad,
            local.is_leaf,
            value._view_copy_of is None,
            left,
            None if OF_TENSORS.issuperset(value.__dict__) else _attributes(value),
        )
    if isinstance(value, Tensor):
        return (
            kind,
            value.shape,
            # Sparse tensors have no strides, and raise when asked.
            value.stride() if value.layout is torch.strided else value.layout,
            value.dtype,
            value.device,
            value.requires_grad,
            value.is_leaf,
            None if not value.__dict__ else _attributes(value),
        )
    if kind not in LEAVES:
        return kind, _snapshot(value)
    # 0.0 == -0.0, nan != nan, and True == 1. Complex numbers have two signs of zero.
    if kind is complex or (kind is float and (not value or value != value)):
        return kind, str(value)
    return kind, value


def _attributes(tensor: Tensor) -> Any:
    """What users have set on a tensor; None if nothing."""
    space = tensor.__dict__
    if not space or OF_TENSORS.issuperset(space):
        return None
    return {name: _One(value) for name, value in space.items() if name not in OF_TENSORS}


def _snapshot(value: Any) -> Any:
    """An object as it is now: it may be another when it comes again."""
    if is_record(value):
        return None  # its attributes follow
    if isinstance(value, set | frozenset | bytearray):
        # A copy: the caller may change the set, or write into the buffer, before the next call.
        held = bytes(value) if isinstance(value, bytearray) else list(map(exactly, value))
        return held, {name: _One(item) for name, item in attributes_of(value).items()}
    return _One(value)


def _cached_state(wrapper: DTensor) -> Any:
    """What earlier uses have left on a DTensor: which aliases, and what it was redistributed to."""
    # What is cached decides whether a step communicates, so it decides about the program.
    if wrapper._use_aliases is None and wrapper._cached_redistribution is None:
        return None
    aliases, result = cached_uses(wrapper)
    masks = None if aliases is None else tuple(aliases.known)
    return masks, None if result is None else (result._spec, _cached_state(result))


def cached_uses(wrapper: DTensor) -> tuple[UseAliases | None, DTensor | None]:
    """The valid caches that earlier uses left on a wrapper: aliases, cached redistribution."""
    local = wrapper._local_tensor
    # Only what is valid now: the next use would not take the others either.
    aliases = wrapper._use_aliases
    if aliases is not None and not aliases.is_current(local):
        aliases = None
    known = wrapper._cached_redistribution
    if known is None:
        return aliases, None
    if not known.is_valid(local):
        result_outdated(wrapper)  # as its next use would
        return aliases, None
    return aliases, known.result


def _aliases(locals_: list[Tensor]) -> Any:
    """Which of the tensors are one, and which share memory; None if nothing does."""
    if len(locals_) < 2:
        return None
    # What tensors that share memory have in common.
    if all([t.layout is torch.strided for t in locals_]):
        memories = storage_identities(locals_)
    else:
        memories = [storage_identity(t) if t.layout is torch.strided else id(t) for t in locals_]
    if len(set(memories)) == len(memories):
        return None
    # By position, not by address: other tensors that share memory in the same way fit, too.
    return _first_places(list(map(id, locals_))), _first_places(memories)


def _first_places(numbers: list[int]) -> list[int]:
    """For each number the place of the first one that equals it."""
    # Backwards, so that the first of equal ones stays.
    places = dict(zip(reversed(numbers), range(len(numbers) - 1, -1, -1), strict=True))
    return list(map(places.__getitem__, numbers))


def check_arguments(flat: list[Any]) -> None:
    """Refuse arguments that no guard can compare.

    Raises:
        CaptureError: a numpy array, an iterator.
    """
    for value in flat:
        kind = kind_of_class(type(value))
        if kind == "array":
            raise CaptureError(
                f"capture: an argument is a {type(value).__name__}, whose values a replay would "
                "not see. Pass torch.as_tensor(value)"
            )
        if kind == "opaque":
            raise CaptureError(
                f"capture: an argument is a {type(value).__name__}, whose state a replay would not "
                "see. Pass what it gives: next(iterator), say"
            )


def met_in(flat: list[Any]) -> list[Any]:
    """What of the arguments leads to state that the key does not have: values, and classes."""
    tensors = [value for value in flat if isinstance(value, Tensor)]
    # Attributes set on tensors are in the key, compared by `same`; what they lead to is not.
    given = [one.value for tensor in tensors for one in (_attributes(tensor) or {}).values()]
    # Sets and buffers are in the key as a whole.
    others = [value for value in flat if not isinstance(value, Tensor | set | bytearray)]
    found = [*given, *(type(value) if is_record(value) else value for value in others)]
    # Of tensors their classes, which may be the user's.
    return [*found, *(one for one in set(map(type, tensors)) if not is_library_class(one))]


def difference(one: tuple[Any, ...], two: tuple[Any, ...]) -> str | None:
    """What differs between the keys of two calls, in words; None if they are equal."""
    if one == two:
        return None
    if one[0] != two[0]:
        return "the form of the arguments"
    for index, (mine, its) in enumerate(zip(one[1], two[1], strict=True)):
        if mine != its:
            plain = isinstance(mine[0], type) and not issubclass(mine[0], Tensor)
            return f"argument {index}" if plain else f"the shape or layout of argument {index}"
    return "the aliasing of the arguments" if one[2] != two[2] else "torch's modes and defaults"
