"""The layout protocol: which boxes of a global tensor a local one has, and where.

The protocol is structural, so that packages can speak of layouts without importing each other: an
object that has the attributes of `LayoutLike` is a layout, and a tensor that has
`__vescale_layout__()` answers one. `ShardLayout` is the value class of the protocol.
"""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from vescale_rng._errors import LayoutError

Ints = tuple[int, ...]
T = TypeVar("T")

# What one layout remembers: a training step asks for a few shapes, dtypes and ops.
_REMEMBERED = 64


@runtime_checkable
class BoxLike(Protocol):
    """A rectangular part of the global tensor, and where its elements are in the local one."""

    @property
    def global_offset(self) -> Sequence[int]:
        """Index of the box's first element in the global tensor."""

    @property
    def shape(self) -> Sequence[int]:
        """Extent of the box along each global dim."""

    @property
    def local_offset(self) -> int:
        """Elements from the local tensor's first element to the box's first element."""

    @property
    def local_strides(self) -> Sequence[int]:
        """Elements from one index to the next along each dim, in the local tensor."""


@runtime_checkable
class LayoutLike(Protocol):
    """What `__vescale_layout__()` answers; `memory_order` may be absent."""

    @property
    def global_shape(self) -> Sequence[int]:
        """Global shape."""

    @property
    def boxes(self) -> Sequence[BoxLike]:
        """The parts that are local; none where the shard is empty."""


@dataclass(frozen=True)
class Box:
    """A rectangular part of the global tensor, and where its elements are in the local one.

    Attributes:
        global_offset: index of its first element in the global tensor.
        shape: its extent along each global dim.
        local_offset: elements from the local tensor's first element to its first element.
        local_strides: elements from one index to the next along each dim, in the local tensor.
    """

    global_offset: Ints
    shape: Ints
    local_offset: int
    local_strides: Ints

    def __post_init__(self) -> None:
        """Take lists for tuples, and refuse what is neither."""
        for name in ("global_offset", "shape", "local_strides"):
            if type(value := getattr(self, name)) is not tuple:
                object.__setattr__(self, name, integers(name, value))
        if type(self.local_offset) is not int:
            object.__setattr__(self, "local_offset", _offset(self.local_offset))


def _offset(value: Any) -> int:
    (found,) = integers("local_offset", (value,))
    return found


@dataclass(frozen=True)
class ShardLayout:
    """One rank's part of a tensor: the value class of the layout protocol.

    It is geometry: which elements of a tensor of one global shape a rank holds, and where. It knows
    no mesh, no placements and no dtype. What has those (a `Layout` of vescale-dtensor, say) answers
    `__vescale_layout__()` with such a value, or is converted by `as_layout`.

    Attributes:
        global_shape: shape of the global tensor.
        boxes: the parts that are local; none where the shard is empty.
        replica: (index, count) among identical copies.
        memory_order: dims of the global tensor from slowest to fastest in its memory on one
            device; None is row-major.
        local_shape: shape of the local tensor, where it is known: `rand` and its like need it.

    An object that is kept and passed again costs no second check: what follows from it is
    cached on it.
    """

    global_shape: Ints
    boxes: tuple[Box, ...]
    replica: tuple[int, int] = (0, 1)
    memory_order: Ints | None = None
    local_shape: Ints | None = None
    # Not part of the value: two equal layouts may have cached different things.
    _memo: dict[Hashable, Any] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    def __post_init__(self) -> None:
        """Take lists for tuples, and refuse what is neither."""
        for name in ("global_shape", "memory_order", "local_shape"):
            value = getattr(self, name)
            if type(value) is not tuple and (value is not None or name == "global_shape"):
                object.__setattr__(self, name, integers(name, value))
        replica = integers("replica", self.replica)
        if len(replica) != 2 or not 0 <= replica[0] < replica[1]:
            raise LayoutError(f"`replica`: (index, count) of the copies: got {self.replica!r:.80}")
        if type(self.boxes) is tuple and all(type(box) is Box for box in self.boxes):
            return
        try:
            if isinstance(self.boxes, Mapping | Set | str):
                raise TypeError(f"a {type(self.boxes).__name__}")
            boxes = tuple(box if isinstance(box, Box) else _box(box) for box in self.boxes)
        except (AttributeError, TypeError, ValueError) as error:
            raise LayoutError(
                f"`boxes`: a list of Box(global_offset, shape, local_offset, local_strides): got "
                f"{self.boxes!r:.120} ({error})"
            ) from None
        object.__setattr__(self, "boxes", boxes)

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make()` answered for `key` before, or answers now."""
        # Without a lock: all that is kept follows from the layout, so two threads that both make it
        # make the same.
        found: T | None = self._memo.get(key)
        if found is None:
            found = make()
            # Emptied, not evicted one by one: who asks for more than a few has no pattern.
            if len(self._memo) >= _REMEMBERED:
                self._memo.clear()
            self._memo[key] = found
        return found

    def known(self, key: Hashable) -> Any:
        """Return what is cached for `key`, or None."""
        return self._memo.get(key)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the cache."""
        fields = (self.global_shape, self.boxes, self.replica, self.memory_order, self.local_shape)
        return (ShardLayout, fields)


def integers(name: str, values: Any) -> Ints:
    """Return a sequence of integers as a tuple.

    Raises:
        LayoutError: it is none; the message names the argument.
    """
    # Nearly always, and at a tenth of the cost of asking abstract classes.
    if type(values) is tuple and all([type(value) is int for value in values]):
        return values
    try:
        # Numbers alone: a string of digits is a sequence that `int` takes, too.
        if isinstance(values, Mapping | Set):
            raise TypeError  # its keys have no order to rely on
        if any(isinstance(value, bool) for value in values):
            raise TypeError  # a truth value is no number here
        return tuple(operator.index(value) for value in values)
    except (TypeError, RuntimeError):
        raise LayoutError(
            f"`{name}`: a sequence of integers is needed, such as (6, 4): got {values!r:.80}"
        ) from None


def check_order(shape: Ints, memory_order: Ints | None) -> None:
    """Refuse a shape or a memory order that no tensor has.

    Raises:
        LayoutError: an extent is negative, or the order does not name every dim once.
    """
    if min(shape, default=0) < 0:
        raise LayoutError(f"global shape {shape} has a negative extent")
    if memory_order is not None and sorted(memory_order) != list(range(len(shape))):
        raise LayoutError(f"`memory_order`: {memory_order} does not name each dim of {shape} once")


def dense_strides(shape: Sequence[int], memory_order: Sequence[int] | None = None) -> Ints:
    """Return the strides of a tensor without gaps whose dims are in memory in that order.

    Args:
        shape: its extents; an empty dim counts as one element, as in torch.
        memory_order: dims from slowest to fastest; None is row-major.
    """
    # As torch does, an empty dim counts as one, so that strides stay positive.
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(range(len(shape)) if memory_order is None else memory_order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def whole(shape: Sequence[int], memory_order: Sequence[int] | None = None) -> ShardLayout:
    """Return the layout of a tensor that holds everything: one device, or a replica.

    Args:
        shape: shape of the tensor.
        memory_order: dims from slowest to fastest in memory; None is row-major.

    Raises:
        LayoutError: an extent is negative, or the order does not name every dim once.
    """
    shape = integers("shape", shape)
    order = None if memory_order is None else integers("memory_order", memory_order)
    check_order(shape, order)
    strides = dense_strides(shape, order)
    boxes = (Box((0,) * len(shape), shape, 0, strides),) if 0 not in shape else ()
    return ShardLayout(shape, boxes, memory_order=order, local_shape=shape)


def as_layout(layout: LayoutLike) -> ShardLayout:
    """Convert any object of the protocol to an immutable value.

    Raises:
        LayoutError: an attribute is missing or of the wrong kind.
    """
    if isinstance(layout, ShardLayout):
        return layout
    try:
        # What the protocol leaves optional may be absent altogether.
        order = getattr(layout, "memory_order", None)
        index, count = getattr(layout, "replica", (0, 1))
        return ShardLayout(
            global_shape=_ints(layout.global_shape),
            boxes=tuple(_box(box) for box in layout.boxes),
            replica=(int(index), int(count)),
            memory_order=None if order is None else _ints(order),
            local_shape=None if (s := getattr(layout, "local_shape", None)) is None else _ints(s),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise LayoutError(
            f"`layout`: {layout!r:.80} is not a layout ({error}): it needs global_shape and boxes, "
            "each box with global_offset, shape, local_offset, local_strides"
        ) from error


def _ints(values: Sequence[int]) -> Ints:
    return tuple(int(value) for value in values)


def _box(box: BoxLike) -> Box:
    return Box(
        _ints(box.global_offset), _ints(box.shape), int(box.local_offset), _ints(box.local_strides)
    )


def is_row_major(shape: Sequence[int], memory_order: Sequence[int] | None) -> bool:
    """Tell whether a dense tensor of that memory order is what torch calls contiguous."""
    if memory_order is None or 0 in shape:
        return True
    # A dim of one element may be anywhere.
    order = [dim for dim in memory_order if shape[dim] > 1]
    return order == sorted(order)
