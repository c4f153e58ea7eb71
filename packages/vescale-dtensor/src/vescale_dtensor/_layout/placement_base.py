"""Defines base classes of placements, and their equality with those that torch has."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import placement_types as torch_placements

from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.intervals import Intervals, consecutive
from vescale_dtensor._torch.bounded_cache import BoundedCache
from vescale_dtensor._torch.call_site import asked_by_torch_dtensor

# One object per value and process: constructing one goes through torch's C++, and `is` then settles
# most comparisons. Bounded, so values may still exist twice; nothing relies on identity.
_made: BoundedCache[tuple[type, tuple[object, ...]], Any] = BoundedCache(1024)
# Types of the argument that is a dim or a reduction.
_PLAIN = (int, str)


class TorchPlacementMeta(type(torch_placements.Placement)):  # type: ignore[misc]
    """Metaclass of the placements that torch has, too: interns them, and keeps `isinstance` fast.

    torch's own metaclass runs a Python function for every `isinstance`; this one restores type's.
    """

    __instancecheck__ = type.__instancecheck__

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the interned object of this value."""
        # Keyword arguments would need binding to make a key; such calls are rare, and equal anyway.
        if kwargs:
            return super().__call__(*args, **kwargs)
        found = _made.get((cls, args))
        # Only what is a plain value already: 1.0 and True equal 1, which may have been made before,
        # but the one is to be refused, and the other to be made a 1.
        if args and type(args[0]) not in _PLAIN:
            return super().__call__(*args)
        if found is None:
            found = super().__call__(*args)
            _made.store((cls, args), found)
        return found


def frozen_setattr(self: object, name: str, value: object) -> None:
    raise AttributeError(f"{self} is frozen: {name} cannot be set")


def placement_equal(self: Any, other: object) -> Any:
    """Whether both are of one kind and value."""
    if self is other:
        return True
    # Between our own: torch's `==` takes 70 us where the two differ. `__reduce__` has all fields.
    if isinstance(other, Placement):
        return type(self) is type(other) and self.__reduce__() == other.__reduce__()
    if not isinstance(other, torch_placements.Placement):
        return NotImplemented
    # With one of torch's: its own comparison, so that `==` agrees from either side.
    return super(type(self), self).__eq__(other)


class Placement:
    """Base class of all placements. Use one of its subclasses.

    Those that torch has as well also derive from torch's classes and equal torch's objects, so
    torch's functions take them like their own. The others are refused there (see
    `UnknownToTorch`).
    """

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is `Shard` (of `dim`, if given), whose offsets follow from ceil(n / k)."""
        return False

    def is_sharded(self, dim: int | None = None) -> bool:
        """Whether each coordinate owns a part of a dim (`dim`, if given), however it is divided."""
        return False

    def is_replicate(self) -> bool:
        """Whether every coordinate of the axis holds the same values."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether the values still have to be combined over the axis (by `reduce_op`, if given)."""
        return False


class Sharded(Placement):
    """Base class of shards: a coordinate owns a part of one dim, or of several dims as one.

    `pieces` says which part, counted within what earlier mesh axes leave of the dim.
    """

    __slots__ = ()

    def cut_dims(self) -> tuple[int, ...]:
        """Return the sharded dims; several are sharded as one, flattened row-major."""
        raise NotImplementedError

    def pieces(self, extent: int, count: int) -> tuple[Intervals, ...]:
        """Intervals of `extent` that each of `count` coordinates owns, in local order."""
        # Each of `pieces` and `sizes` is stated in terms of the other: a subclass overrides one.
        return consecutive(self.sizes(extent, count))

    def sizes(self, extent: int, count: int) -> tuple[int, ...]:
        """Return how much of `extent` each of `count` coordinates owns."""
        return tuple(
            sum(high - low for low, high in intervals) for intervals in self.pieces(extent, count)
        )

    def distinct_sizes(self, extent: int, count: int) -> set[int]:
        """Return the different numbers among `sizes`, few on any number of ranks."""
        return set(self.sizes(extent, count))

    def piece(self, extent: int, count: int, index: int) -> Intervals:
        """Return what coordinate `index` of `count` owns of `extent`: one of `pieces`.

        Subclasses find it without the other coordinates, since every rank asks for its own shard at
        many calls, and there may be thousands of ranks.
        """
        return self.pieces(extent, count)[index]

    def is_sharded(self, dim: int | None = None) -> bool:
        """Return True if `dim` is among the sharded dims, or no dim is asked for."""
        return dim is None or dim in self.cut_dims()


class UnknownToTorch(Sharded):
    """Base class of the placements that torch.distributed.tensor has no equal of.

    Much of it asks `isinstance(placement, Shard)` and silently treats a placement of none of its
    classes as replicated. `isinstance` also reads `__class__`, which is the one place where that
    can be refused.
    """

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Only modules of torch.distributed.tensor are refused; everybody else gets the type.
        if asked_by_torch_dtensor():
            raise UnsupportedError(
                f"torch.distributed.tensor was given {self!r}, a placement that it does not know "
                "and would take for Replicate(). Use the function of the same name in "
                "vescale_dtensor, or redistribute to Shard() or Replicate() first."
            )
        return type(self)
