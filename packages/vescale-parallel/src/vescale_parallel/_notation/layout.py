"""Layouts as a plan writes them: `"tp:0"`, `"dp:0, tp:1"`, `"replicate"`, `"tp:full -> tp:1"`.

`"tp:0/3"` is dim 0 of three equal blocks, each of which is sharded: a merged q, k, v. Where there
are four heads of queries to one of keys and one of values, the blocks are `"tp:0/4+1+1"`.

A side of an activation rule says one layout for all tensors there, or one for each that it names:
`"hidden_states = tp:full; 1 = tp:0 -> 0 = tp:1"`.

parse -> `RuleLayout` (immutable) -> dims per mesh axis. No mesh, model or torch is needed here.
"""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vescale_parallel._errors import PlanError

REPLICATE: Final = "replicate"
FULL: Final = "full"
ARROW: Final = "->"

# `full` is a word of its own, so that leaving an axis alone and replicating over it can differ.
_ENTRY = re.compile(
    r"(?P<axis>[^\W\d]\w*)\s*:\s*(?:(?P<where>-?\d{1,18}|full)|(?P<dim>-?\d{1,18})\s*/"
    r"\s*(?P<blocks>\d{1,18}(?:\s*\+\s*\d{1,18})*))"
)
# Beyond, it is a typing error, and would make as many numbers.
_MOST_BLOCKS: Final = 4096
_MOST_CHARACTERS: Final = 10_000
_CHOICE = re.compile(r"\d+|[^\W\d]\w*|\*")
_HINT = (
    "Write 'axis:dim' (as 'tp:0'), 'axis:full', several with commas, or 'replicate'; 'tp:0/3' for "
    "a dim of three equal blocks, 'tp:0/4+1+1' for blocks in these proportions."
)


@dataclass(frozen=True)
class RuleLayout:
    """Which dim of a tensor each named axis shards.

    Attributes:
        text: the layout, spelt as messages and tables show it.
        dims: for each axis that the text names, the tensor dim sharded over it; None for `full`.
        everywhere: whether axes that the text does not name are replicated too (`"replicate"`).
        blocks: for axes that shard a dim of several blocks, the proportions of these.
    """

    text: str
    dims: tuple[tuple[str, int | None], ...]
    everywhere: bool = False
    blocks: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the text names, as written."""
        return tuple(axis for axis, _ in self.dims)

    @property
    def least_ndim(self) -> int:
        """How many dims a tensor needs at least, for this layout to make sense."""
        # -1 needs one dim, as 0 does; -2 needs two.
        dims = [dim for _, dim in self.dims if dim is not None]
        return max((dim + 1 if dim >= 0 else -dim for dim in dims), default=0)

    def dim_of(self, axis: str, ndim: int) -> int | None:
        """Return the tensor dim sharded over `axis`, counted from 0; None where there is none."""
        dim = dict(self.dims).get(axis)
        return dim if dim is None or dim >= 0 else dim + ndim

    def blocks_of(self, axis: str) -> tuple[int, ...]:
        """Return the proportions of the blocks of the dim that `axis` shards, each by itself."""
        return dict(self.blocks).get(axis, (1,))

    def covers(self, axis: str) -> bool:
        """Return whether the layout says anything about `axis`."""
        return self.everywhere or axis in self.axes

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Chosen:
    """Layouts of some of the arguments, or of some of the results, of a module.

    Attributes:
        text: as messages show it.
        parts: position or name to layout, in the order written; `*` is all that is not named.
    """

    text: str
    parts: tuple[tuple[str, RuleLayout], ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that any part names."""
        return tuple(dict.fromkeys(axis for _, layout in self.parts for axis in layout.axes))

    def covers(self, axis: str) -> bool:
        """Return whether any part says anything about `axis`."""
        return any(layout.covers(axis) for _, layout in self.parts)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Boundary:
    """What happens to the tensors that enter and leave a module; None leaves them as they are."""

    text: str
    inputs: RuleLayout | Chosen | None
    outputs: RuleLayout | Chosen | None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that either side names."""
        sides = [side for side in (self.inputs, self.outputs) if side is not None]
        return tuple(dict.fromkeys(axis for side in sides for axis in side.axes))


def parse_layout(text: str) -> RuleLayout:
    """Read one layout.

    Raises:
        PlanError: the text is not a layout; the message quotes the part that is wrong.
    """
    if not isinstance(text, str):
        raise PlanError(f"a layout is a string, got {text!r} ({type(text).__name__}). {_HINT}")
    if len(text) > _MOST_CHARACTERS:
        raise PlanError(f"layout {text[:80]!r}...: it has {len(text)} characters. {_HINT}")
    return _parse_layout(text)


# Behind the question for its type: a list or a dict could not be looked for.
@functools.lru_cache(maxsize=4096)
def _parse_layout(text: str) -> RuleLayout:
    if text.strip() == REPLICATE:
        return RuleLayout(REPLICATE, (), everywhere=True)
    if ARROW in text:
        raise PlanError(f"layout {text!r}: '->' belongs to activations, not here. {_HINT}")
    # Order is kept for messages only: which axis is outer follows from the mesh.
    entries = [_parse_entry(text, part.strip()) for part in text.split(",")]
    dims = tuple((axis, dim) for axis, dim, _ in entries)
    # Twice the same axis would shard a tensor over it twice, which no mesh can do.
    axes = [axis for axis, _ in dims]
    for axis in axes:
        if axes.count(axis) > 1:
            raise PlanError(f"layout {text!r}: axis '{axis}' is named twice; name each axis once.")
    blocks = tuple((axis, sizes) for axis, _, sizes in entries if len(sizes) > 1)
    merged = {dim for axis, dim in dims if axis in dict(blocks)}
    if len([dim for _, dim in dims if dim in merged]) > len(blocks) or len(merged) < len(blocks):
        raise PlanError(f"layout {text!r}: a dim of several blocks is sharded over one axis only.")
    return RuleLayout(", ".join(_entry_text(*entry) for entry in entries), dims, blocks=blocks)


def _parse_entry(text: str, part: str) -> tuple[str, int | None, tuple[int, ...]]:
    found = _ENTRY.fullmatch(part)
    if found is None:
        where = f"{part!r} in it cannot be read" if part else "a part of it is empty"
        raise PlanError(f"layout {text!r}: {where}. {_HINT}")
    if found["blocks"] is not None:
        sizes = tuple(int(one) for one in found["blocks"].split("+"))
        if min(sizes) < 1:
            raise PlanError(f"layout {text!r}: {part!r} in it has no block. {_HINT}")
        if len(sizes) == 1 and sizes[0] > _MOST_BLOCKS:
            raise PlanError(f"layout {text!r}: {part!r} in it has too many blocks. {_HINT}")
        blocks = (1,) * sizes[0] if len(sizes) == 1 else in_lowest_terms(sizes)
        return found["axis"], int(found["dim"]), blocks
    where = found["where"]
    return found["axis"], None if where == FULL else int(where), (1,)


def in_lowest_terms(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the same proportions in the smallest numbers."""
    divisor = math.gcd(*sizes)
    return tuple(one // divisor for one in sizes)


def blocks_text(blocks: Sequence[int]) -> str:
    """Return what a layout says of blocks in these proportions, behind its dim."""
    if len(blocks) == 1:
        return ""
    return f"/{len(blocks)}" if set(blocks) == {1} else "/" + "+".join(map(str, blocks))


def _entry_text(axis: str, dim: int | None, blocks: Sequence[int]) -> str:
    return f"{axis}:{FULL if dim is None else dim}{blocks_text(blocks)}"


def parse_boundary(text: str) -> Boundary:
    """Read what an activation rule says: `"in -> out"`, where an empty side changes nothing.

    Raises:
        PlanError: a side cannot be read; the message quotes the part that is wrong.
    """
    if not isinstance(text, str) or text.count(ARROW) != 1:
        raise PlanError(
            f"activation layout {text!r}: write 'in -> out' with one '->'; leave a side empty to "
            "leave those tensors as they are, as in 'tp:full -> tp:1' or '-> tp:1'."
        )
    return _parse_boundary(text)


@functools.lru_cache(maxsize=4096)
def _parse_boundary(text: str) -> Boundary:
    sides = text.split(ARROW)
    inputs, outputs = (_parse_side(side) if side.strip() else None for side in sides)
    if inputs is None and outputs is None:
        raise PlanError(f"activation layout {text!r}: both sides are empty, so it says nothing.")
    shown = " ".join(part for part in (str(inputs or ""), ARROW, str(outputs or "")) if part)
    return Boundary(shown, inputs, outputs)


def _parse_side(side: str) -> RuleLayout | Chosen:
    if "=" not in side:
        return parse_layout(side)
    parts = tuple(_parse_choice(side, part) for part in side.split(";"))
    names = [name for name, _ in parts]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"activation layout {side.strip()!r}: {name!r} is named twice.")
    return Chosen("; ".join(f"{name} = {layout}" for name, layout in parts), parts)


def _parse_choice(side: str, part: str) -> tuple[str, RuleLayout]:
    name, _, layout = part.partition("=")
    if _CHOICE.fullmatch(name.strip()) is None:
        raise PlanError(
            f"activation layout {side.strip()!r}: {part.strip()!r} in it cannot be read. Write "
            "'which = layout', several with ';', where which is a position, a name, or * for the "
            "rest, as in 'hidden_states = tp:full; 1 = tp:0 ->'."
        )
    return name.strip(), parse_layout(layout)


def local_shape(
    layout: RuleLayout, global_shape: Sequence[int], mesh_sizes: Sequence[tuple[str, int]]
) -> tuple[int, ...]:
    """Return the shape of the largest shard: that of the ranks at coordinate 0.

    Extents follow `torch.chunk`: ceil(n / k) each, the last non-empty shard smaller, later ones
    empty. Axes that shard one dim nest in mesh order.
    """
    shape = list(global_shape)
    for axis, size in mesh_sizes:
        dim = layout.dim_of(axis, len(shape))
        if dim is not None:
            # Rounded up; the next axis on the same dim divides what this one has left.
            shape[dim] = sum(-(-one // size) for one in block_sizes(layout, axis, shape[dim]))
    return tuple(shape)


def block_sizes(layout: RuleLayout, axis: str, extent: int) -> list[int]:
    """Return the extents of the blocks of a dim, each of which `axis` shards by itself."""
    blocks = layout.blocks_of(axis)
    each = extent // sum(blocks)
    return [each * one for one in blocks]


def some_rank_is_empty(
    layout: RuleLayout, global_shape: Sequence[int], mesh_sizes: Sequence[tuple[str, int]]
) -> bool:
    """Return whether shards of ceil(n / k) run out before the last rank of an axis."""
    shape = list(global_shape)
    for axis, size in mesh_sizes:
        dim = layout.dim_of(axis, len(shape))
        if dim is not None:
            extents = block_sizes(layout, axis, shape[dim])
            shards = [-(-one // size) for one in extents]
            # A rank has something as soon as one block leaves it something.
            pairs = zip(shards, extents, strict=True)
            if all(shard * (size - 1) >= extent for shard, extent in pairs):
                return True
            # The next axis on this dim divides what a rank of this one has.
            shape[dim] = sum(shards)
    return False
