"""Steps of a redistribution: immutable values that say what one rank does.

`lower` and `lower_packed` make them and `execute` runs them. What a step needs at every call beyond
its arguments (split sizes, packing) is computed once, when the step is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import prod

from vescale_comm import SplitSizes

from vescale_dtensor._layout.layout import Shape
from vescale_dtensor._layout.placements import ReduceOp
from vescale_dtensor._redistribute.exchange import (
    Exchange,
    LocalBox,
    Packing,
    exchange_of,
    packing_of,
)
from vescale_dtensor._redistribute.regions import Regions, count, is_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Base class of all steps.

    Attributes:
        shape: local shape after the step.
        axes: mesh axes over whose flattened group the step communicates; empty for a local step.
        wire_bytes: bytes that this rank sends, counted as `vescale_comm.trace` counts them.
    """

    shape: Shape
    axes: tuple[int, ...] = ()
    wire_bytes: int = 0

    @property
    def title(self) -> str:
        """Short description for the table of a plan."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(Step):
    """Keep the box of `shape` that begins at `start`."""

    start: Shape

    @property
    def title(self) -> str:
        """`slice at [...]`."""
        return f"slice at {list(self.start)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(Step):
    """Reduce over the group; every member gets the result."""

    op: ReduceOp

    @property
    def title(self) -> str:
        """`all_reduce OP`."""
        return f"all_reduce {self.op}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceScatter(Step):
    """Reduce over the group; member i gets extent `sizes[i]` of `dim` (None: equal extents)."""

    op: ReduceOp
    dim: int
    sizes: tuple[int, ...] | None

    @property
    def title(self) -> str:
        """`reduce_scatter OP dim D`."""
        return f"reduce_scatter {self.op} dim {self.dim}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather(Step):
    """Concatenate the members' tensors along `dim`, of extents `sizes` (None: all equal)."""

    dim: int
    sizes: tuple[int, ...] | None

    @property
    def title(self) -> str:
        """`all_gather dim D`."""
        return f"all_gather dim {self.dim}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPieces(Step):
    """Gather the members' tensors where they shard several dims: member i's goes to `pieces[i]`."""

    pieces: tuple[LocalBox, ...]
    # Derived from `pieces` and `shape`, so no part of the step's equality: elements of each member
    # (None: equal), and how the gathered buffer is unpacked.
    sizes: tuple[int, ...] | None = field(init=False, repr=False, compare=False)
    packing: Packing = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the derived fields once; `object.__setattr__` since the class is frozen."""
        sizes = tuple(prod(piece.shape) for piece in self.pieces)
        object.__setattr__(self, "sizes", None if len(set(sizes)) == 1 else sizes)
        object.__setattr__(self, "packing", packing_of(self.pieces, self.shape))

    @property
    def title(self) -> str:
        """`gather_pieces`."""
        return "gather_pieces"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAll(Step):
    """Send the box `send[i]` to member i; the box that member i sends goes to `receive[i]`.

    `before` is the local shape before the step.
    """

    before: Shape
    send: tuple[LocalBox, ...]
    receive: tuple[LocalBox, ...]
    exchange: Exchange = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the packings once; `object.__setattr__` since the class is frozen."""
        object.__setattr__(
            self, "exchange", exchange_of(self.send, self.before, self.receive, self.shape)
        )

    @property
    def title(self) -> str:
        """`all_to_all`."""
        return "all_to_all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pad(Step):
    """Place the tensor at `start`, surrounded by the identity element of a reduction."""

    start: Shape
    identity_of: ReduceOp = "sum"

    @property
    def title(self) -> str:
        """`pad at [...]`."""
        return f"pad at {list(self.start)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Step):
    """Multiply by `factor`: converts between the partial values of a sum and of an average."""

    factor: Fraction

    @property
    def title(self) -> str:
        """`scale by F`."""
        return f"scale by {self.factor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask(Step):
    """Replace every value by `fill`; None keeps them (on the coordinate that contributes)."""

    fill: int | None

    @property
    def title(self) -> str:
        """`keep`, or `fill with V`."""
        return "keep" if self.fill is None else f"fill with {self.fill}"


# --- for shards that are not boxes: elements are sent packed into one dim -----------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rearrange(Step):
    """Copy the elements at `source` to `target`, both in local memory.

    Attributes:
        identity_of: the reduction whose identity element fills the rest of the result, as in `Pad`;
            None where the targets cover all of it.
    """

    source: Regions
    target: Regions
    identity_of: ReduceOp | None = None

    @property
    def relabels(self) -> bool:
        """Whether the elements keep their order and fill the result, so that it is a view."""
        whole = count(self.target) == prod(self.shape)
        return whole and is_run(self.source) and is_run(self.target)

    @property
    def title(self) -> str:
        """`rearrange`, or `pad`."""
        return "pad" if self.identity_of is not None else "rearrange"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedReduceScatter(Step):
    """Reduce over the group the elements at `source`, packed by member.

    Member i receives `sizes[i]` of them, in packed order; this rank's go to `target`.
    """

    op: ReduceOp
    source: Regions
    sizes: tuple[int, ...]
    target: Regions

    @property
    def title(self) -> str:
        """`reduce_scatter OP runs`."""
        # Named apart from `ReduceScatter`: the table of a plan shows that elements had to be
        # packed.
        return f"reduce_scatter {self.op} runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedAllGather(Step):
    """Gather the elements at `source` of all members, `sizes[i]` from member i, into `target`."""

    source: Regions
    sizes: tuple[int, ...]
    target: Regions

    @property
    def title(self) -> str:
        """`all_gather runs`."""
        return "all_gather runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedAllToAll(Step):
    """Send the elements at `send[i]` to member i; those that member i sends go to `receive[i]`."""

    send: tuple[Regions, ...]
    receive: tuple[Regions, ...]
    sizes: SplitSizes = field(init=False, repr=False, compare=False)
    # The regions that are not empty: of thousands of members a rank often exchanges with a few, and
    # a call should only look at those.
    filled: tuple[tuple[Regions, ...], tuple[Regions, ...]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Compute the derived fields once; `object.__setattr__` since the class is frozen."""
        sides = self.send, self.receive
        # The sizes name every member, also those that send nothing: all ranks join in the
        # call.
        object.__setattr__(self, "sizes", SplitSizes(*(list(map(count, side)) for side in sides)))
        filled = tuple(tuple(regions for regions in side if regions) for side in sides)
        object.__setattr__(self, "filled", filled)

    @property
    def title(self) -> str:
        """`all_to_all runs`."""
        return "all_to_all runs"
