"""Layouts as a plan writes them: `"tp:0"`, `"dp:0, tp:1"`, `"replicate"`, `"tp:full -> tp:1"`.

`"tp:0/3"` is dim 0 of three equal blocks, each of which is sharded: a merged q, k, v.

A side of an activation rule says one layout for all tensors there, or one for each that it names:
`"hidden_states = tp:full; 1 = tp:0 -> 0 = tp:1"`.

parse -> `RuleLayout` (immutable) -> dims per mesh axis. No mesh, model or torch is needed here.
"""

import functools
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
    r"(?P<axis>[^\W\d]\w*)\s*:\s*(?:(?P<where>-?\d+|full)|(?P<dim>-?\d+)\s*/\s*(?P<blocks>\d+))"
)
_CHOICE = re.compile(r"\d+|[^\W\d]\w*|\*")
_HINT = (
    "Write 'axis:dim' (as 'tp:0'), 'axis:full', several with commas, or 'replicate'; 'tp:0/3' for "
    "a dim of three equal blocks."
)


@dataclass(frozen=True)
class RuleLayout:
    """Which dim of a tensor each named axis shards.

    Attributes:
        text: the layout, spelt as messages and tables show it.
        dims: for each axis that the text names, the tensor dim sharded over it; None for `full`.
        everywhere: whether axes that the text does not name are replicated too (`"replicate"`).
        blocks: for axes that shard a dim of several equal blocks, how many there are.
    """

    text: str
    dims: tuple[tuple[str, int | None], ...]
    everywhere: bool = False
    blocks: tuple[tuple[str, int], ...] = ()

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

    def blocks_of(self, axis: str) -> int:
        """Return how many equal blocks the dim has that `axis` shards, each by itself."""
        return dict(self.blocks).get(axis, 1)

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


@functools.lru_cache(maxsize=4096)
def parse_layout(text: str) -> RuleLayout:
    """Read one layout.

    Raises:
        PlanError: the text is not a layout; the message quotes the part that is wrong.
    """
    if not isinstance(text, str):
        raise PlanError(f"a layout is a string, got {text!r} ({type(text).__name__}). {_HINT}")
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
    blocks = tuple((axis, count) for axis, _, count in entries if count > 1)
    merged = {dim for axis, dim in dims if axis in dict(blocks)}
    if len([dim for _, dim in dims if dim in merged]) > len(blocks) or len(merged) < len(blocks):
        raise PlanError(f"layout {text!r}: a dim of several blocks is sharded over one axis only.")
    return RuleLayout(", ".join(_entry_text(*entry) for entry in entries), dims, blocks=blocks)


def _parse_entry(text: str, part: str) -> tuple[str, int | None, int]:
    found = _ENTRY.fullmatch(part)
    if found is None:
        where = f"{part!r} in it cannot be read" if part else "a part of it is empty"
        raise PlanError(f"layout {text!r}: {where}. {_HINT}")
    if found["blocks"] is not None:
        if int(found["blocks"]) < 1:
            raise PlanError(f"layout {text!r}: {part!r} in it has no block. {_HINT}")
        return found["axis"], int(found["dim"]), int(found["blocks"])
    where = found["where"]
    return found["axis"], None if where == FULL else int(where), 1


def _entry_text(axis: str, dim: int | None, blocks: int) -> str:
    return f"{axis}:{FULL if dim is None else dim}" + (f"/{blocks}" if blocks > 1 else "")


@functools.lru_cache(maxsize=4096)
def parse_boundary(text: str) -> Boundary:
    """Read what an activation rule says: `"in -> out"`, where an empty side changes nothing.

    Raises:
        PlanError: a side cannot be read; the message quotes the part that is wrong.
    """
    # Two arrows make three sides: refused below, as no arrow and no text are.
    sides = text.split(ARROW) if isinstance(text, str) else []
    if len(sides) != 2:
        raise PlanError(
            f"activation layout {text!r}: write 'in -> out' with one '->'; leave a side empty to "
            "leave those tensors as they are, as in 'tp:full -> tp:1' or '-> tp:1'."
        )
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
            blocks = layout.blocks_of(axis)
            shape[dim] = blocks * -(-(shape[dim] // blocks) // size)
    return tuple(shape)


def some_rank_is_empty(
    layout: RuleLayout, global_shape: Sequence[int], mesh_sizes: Sequence[tuple[str, int]]
) -> bool:
    """Return whether shards of ceil(n / k) run out before the last rank of an axis."""
    shape = list(global_shape)
    for axis, size in mesh_sizes:
        dim = layout.dim_of(axis, len(shape))
        if dim is not None:
            blocks = layout.blocks_of(axis)
            extent = shape[dim] // blocks
            shard = -(-extent // size)
            if shard * (size - 1) >= extent:
                return True
            shape[dim] = blocks * shard
    return False
