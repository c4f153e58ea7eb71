"""The steps of a redistribution: immutable values that say what one rank does."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import prod

from vescale_comm import SplitSizes

from vescale_dtensor._layout.layout import Shape
from vescale_dtensor._layout.placements import ReduceOp
from vescale_dtensor._redistribute.exchange import Exchange, Packing, Piece, exchange_of, packing_of
from vescale_dtensor._redistribute.regions import Regions, count, is_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Base of all steps.

    Attributes:
        shape: of this rank's tensor afterwards.
        axes: mesh axes whose flattened group communicates; empty for a local step.
        wire_bytes: what this rank sends, counted as `vescale_comm.trace` does.
    """

    shape: Shape
    axes: tuple[int, ...] = ()
    wire_bytes: int = 0

    @property
    def title(self) -> str:
        """What is done, in a few words."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(Step):
    """Keep the part that begins at `start`."""

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
    """Reduce over the group; member i gets `sizes[i]` along `dim`, or all as much (None)."""

    op: ReduceOp
    dim: int
    sizes: tuple[int, ...] | None

    @property
    def title(self) -> str:
        """`reduce_scatter OP dim D`."""
        return f"reduce_scatter {self.op} dim {self.dim}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather(Step):
    """Concatenate the members' tensors, of extent `sizes[i]` along `dim`, or all equal (None)."""

    dim: int
    sizes: tuple[int, ...] | None

    @property
    def title(self) -> str:
        """`all_gather dim D`."""
        return f"all_gather dim {self.dim}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPieces(Step):
    """Gather the members' tensors, which cut several dims: member i's lies at `pieces[i]`."""

    pieces: tuple[Piece, ...]
    # Elements of each member, None where all have as many; and where they go.
    sizes: tuple[int, ...] | None = field(init=False, repr=False, compare=False)
    packing: Packing = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Work out what the step needs at every call."""
        sizes = tuple(prod(piece.shape) for piece in self.pieces)
        object.__setattr__(self, "sizes", None if len(set(sizes)) == 1 else sizes)
        object.__setattr__(self, "packing", packing_of(self.pieces, self.shape))

    @property
    def title(self) -> str:
        """`gather_pieces`."""
        return "gather_pieces"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAll(Step):
    """Send `send[i]` of the tensor to member i; what it sends back lies at `receive[i]`.

    `before` is the shape of this rank's tensor until then.
    """

    before: Shape
    send: tuple[Piece, ...]
    receive: tuple[Piece, ...]
    exchange: Exchange = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Work out what the step needs at every call."""
        object.__setattr__(
            self, "exchange", exchange_of(self.send, self.before, self.receive, self.shape)
        )

    @property
    def title(self) -> str:
        """`all_to_all`."""
        return "all_to_all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pad(Step):
    """Put the tensor at `start`, among the identity element of the reduction `identity_of`."""

    start: Shape
    identity_of: ReduceOp = "sum"

    @property
    def title(self) -> str:
        """`pad at [...]`."""
        return f"pad at {list(self.start)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Step):
    """Multiply by `factor`, as terms of a sum become those of an average, or the other way."""

    factor: Fraction

    @property
    def title(self) -> str:
        """`scale by F`."""
        return f"scale by {self.factor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask(Step):
    """Replace every value by `fill`; None keeps them (the rank that contributes)."""

    fill: int | None

    @property
    def title(self) -> str:
        """`keep`, or `fill with V`."""
        return "keep" if self.fill is None else f"fill with {self.fill}"


# --- for what is no box: elements travel as flat runs ------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rearrange(Step):
    """Put the elements at `source` to `target`; see `Pad` for what is elsewhere, if anything."""

    source: Regions
    target: Regions
    identity_of: ReduceOp | None = None

    @property
    def relabels(self) -> bool:
        """Whether nothing moves, and the result is a view."""
        whole = count(self.target) == prod(self.shape)
        return whole and is_run(self.source) and is_run(self.target)

    @property
    def title(self) -> str:
        """`rearrange`, or `pad`."""
        return "pad" if self.identity_of is not None else "rearrange"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedReduceScatter(Step):
    """Pack `source` by member, and reduce: member i gets `sizes[i]` elements, at `target`."""

    op: ReduceOp
    source: Regions
    sizes: tuple[int, ...]
    target: Regions

    @property
    def title(self) -> str:
        """`reduce_scatter OP runs`."""
        return f"reduce_scatter {self.op} runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedAllGather(Step):
    """Gather `source` of all members, `sizes[i]` elements of member i; all lies at `target`."""

    source: Regions
    sizes: tuple[int, ...]
    target: Regions

    @property
    def title(self) -> str:
        """`all_gather runs`."""
        return "all_gather runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedAllToAll(Step):
    """Send the elements at `send[i]` to member i; what it sends back lies at `receive[i]`."""

    send: tuple[Regions, ...]
    receive: tuple[Regions, ...]
    sizes: SplitSizes = field(init=False, repr=False, compare=False)
    # Of all members, those with which this rank exchanges anything.
    filled: tuple[tuple[Regions, ...], tuple[Regions, ...]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Work out what the step needs at every call."""
        sides = self.send, self.receive
        object.__setattr__(self, "sizes", SplitSizes(*(list(map(count, side)) for side in sides)))
        filled = tuple(tuple(regions for regions in side if regions) for side in sides)
        object.__setattr__(self, "filled", filled)

    @property
    def title(self) -> str:
        """`all_to_all runs`."""
        return "all_to_all runs"
