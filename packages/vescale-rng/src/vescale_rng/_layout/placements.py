"""Layouts from placements on a mesh, without processes: plain arithmetic on index ranges."""

from collections.abc import Sequence
from itertools import accumulate, product
from typing import Any

from vescale_rng._errors import LayoutError
from vescale_rng._layout.layout import Box, Ints, ShardLayout, check_order, dense_strides, integers

# The indices of one dim that a rank holds: (start, length) of each stretch, in local order.
Stretches = list[tuple[int, int]]


def layout_of(
    global_shape: Sequence[int],
    placements: Sequence[Any],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    *,
    memory_order: Sequence[int] | None = None,
    local_strides: Sequence[int] | None = None,
) -> ShardLayout:
    """Return the layout of the rank at `coordinate` of a mesh: no process group is needed.

    Args:
        global_shape: global shape.
        placements: one per mesh axis. Recognised by what they have, so torch's own objects and
            anybody's work:

            - an integer `dim` shards that dim by the rule of `torch.chunk`: ceil(n / k)
              elements each, the last one fewer, later ones none. Axes that shard the same dim
              nest: an earlier axis splits outside of a later one.
            - an integer `split_factor` (torch's `_StridedShard`) or `blocks` besides `dim`
              first splits the dim into that many blocks and gives every rank its share of each.
            - no `dim` (`Replicate`, `Partial`): every rank of the axis holds the same elements.
              Ranks along a `Partial` (an object with `reduce_op`) hold addends and not copies,
              so it does not count in `replica`.
        mesh_shape: ranks along each mesh axis.
        coordinate: this rank's index along each mesh axis.
        memory_order: dims of the global tensor from slowest to fastest in its memory, and of the
            local tensor too; None is row-major.
        local_strides: strides of the local tensor, where it has gaps or another order than the
            global one; None is a tensor without gaps in memory order.

    Raises:
        LayoutError: the arguments do not fit one another.
    """
    shape = integers("global_shape", global_shape)
    mesh_shape, coordinate = integers("mesh_shape", mesh_shape), integers("coordinate", coordinate)
    _check_placements(placements)
    order = None if memory_order is None else integers("memory_order", memory_order)
    check_order(shape, order)
    _check(shape, placements, mesh_shape, coordinate)
    # An empty dim has no stretch, so that no box comes of it.
    held: list[Stretches] = [[(0, n)] if n else [] for n in shape]
    replica, replicas = 0, 1
    for placement, ranks, index in zip(placements, mesh_shape, coordinate, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            # A later axis shards what an earlier one has left: nesting is the order of this loop.
            dim = dim % len(shape)
            held[dim] = _shard(held[dim], ranks, index, _blocks(placement))
        elif not hasattr(placement, "reduce_op"):
            # Copies are numbered like ranks: the last mesh axis runs fastest.
            replica, replicas = replica * ranks + index, replicas * ranks
    local_shape = tuple(sum(n for _, n in stretches) for stretches in held)
    # Unless it is said otherwise, the local tensor is ordered like the global one, without gaps.
    strides = _strides(local_shape, order, local_strides)
    boxes = _boxes(held, strides)
    return ShardLayout(shape, boxes, (replica, replicas), order, local_shape)


def layout_of_slices(
    global_shape: Sequence[int],
    slices: slice | Sequence[slice],
    *,
    memory_order: Sequence[int] | None = None,
    local_strides: Sequence[int] | None = None,
) -> ShardLayout:
    """Return the layout of who holds `tensor[slices]`: no mesh is needed.

    Args:
        global_shape: global shape.
        slices: one for each dim, or for the first ones; what numpy's `np.s_[100:200, :]` gives, and
            what `jax.make_array_from_callback` passes on. Without steps.
        memory_order: as in `layout_of`.
        local_strides: as in `layout_of`.

    Raises:
        LayoutError: the arguments do not fit one another.

    Examples:
        >>> layout_of_slices((1000, 64), slice(100, 200)).local_shape
        (100, 64)
    """
    shape = integers("global_shape", global_shape)
    order = None if memory_order is None else integers("memory_order", memory_order)
    check_order(shape, order)
    given = _slices_of(slices)
    if len(given) > len(shape) or not all(isinstance(one, slice) for one in given):
        raise LayoutError(
            f"`slices`: at most one slice for each dim of {shape}, such as slice(0, 2): got "
            f"{slices!r:.80}"
        )
    held: list[Stretches] = []
    for dim, extent in enumerate(shape):
        start, stop, step = (given[dim] if dim < len(given) else slice(None)).indices(extent)
        if step != 1:
            raise LayoutError(f"`slices`: that of dim {dim} has a step of {step}")
        held.append([(start, stop - start)] if start < stop else [])
    local_shape = tuple(sum(n for _, n in stretches) for stretches in held)
    strides = _strides(local_shape, order, local_strides)
    return ShardLayout(shape, _boxes(held, strides), memory_order=order, local_shape=local_shape)


def _slices_of(slices: slice | Sequence[slice]) -> tuple[slice, ...]:
    if isinstance(slices, slice):
        return (slices,)
    if not isinstance(slices, Sequence):
        raise LayoutError(f"`slices`: a slice, or a sequence of them: got {slices!r:.80}")
    return tuple(slices)


def _strides(shape: Ints, order: Ints | None, given: Sequence[int] | None) -> Ints:
    return dense_strides(shape, order) if given is None else integers("local_strides", given)


def _shard(held: Stretches, ranks: int, index: int, blocks: int) -> Stretches:
    """Return what is left of `held` for one of `ranks` when each of `blocks` blocks is chunked."""
    total = sum(n for _, n in held)
    mine: Stretches = []
    for block in range(blocks):
        # The plain `Shard` is the case of one block, which is all of what is held.
        begin, end = _chunk(total, blocks, block)
        low, high = _chunk(end - begin, ranks, index)
        mine += _take(held, begin + low, begin + high)
    return mine


def _chunk(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return begin and end of the `index`-th chunk by the rule of `torch.chunk`, empty or not."""
    size = -(-total // parts)
    return min(index * size, total), min((index + 1) * size, total)


def _take(held: Stretches, begin: int, end: int) -> Stretches:
    """Return the elements `begin` to `end` of the stretches one after another."""
    taken: Stretches = []
    at = 0
    for start, length in held:
        low, high = max(begin - at, 0), min(end - at, length)
        if low < high:
            taken.append((start + low, high - low))
        at += length
    return taken


def _boxes(held: Sequence[Stretches], strides: Ints) -> tuple[Box, ...]:
    """Return one box for every choice of one stretch along each dim."""
    offsets = [[0, *accumulate(n for _, n in stretches)] for stretches in held]
    boxes = []
    for choice in product(*(range(len(stretches)) for stretches in held)):
        chosen = [stretches[i] for stretches, i in zip(held, choice, strict=True)]
        # Stretches of a dim are contiguous locally, whatever their distance globally.
        begins = [offset[i] for offset, i in zip(offsets, choice, strict=True)]
        boxes.append(
            Box(
                global_offset=tuple(start for start, _ in chosen),
                shape=tuple(length for _, length in chosen),
                local_offset=sum(b * stride for b, stride in zip(begins, strides, strict=True)),
                local_strides=strides,
            )
        )
    return tuple(boxes)


def _check_placements(placements: Sequence[Any]) -> None:
    """Refuse what is no list of placements.

    Raises:
        LayoutError: it is one placement, or one of them is a number, a string, a tuple, a class:
            as they have no `dim`, they would count as replicated.
    """
    if hasattr(placements, "dim") or not isinstance(placements, Sequence):
        raise LayoutError(
            f"`placements`: one for each mesh axis, in a list: got {placements!r:.80}, which is no "
            "list"
        )
    for axis, placement in enumerate(placements):
        if type(placement).__module__ == "builtins":
            raise LayoutError(
                f"`placements`: that of mesh axis {axis} is {placement!r:.80}: give an object, one "
                "with an integer `dim` where it shards (Shard(0)), or Replicate()"
            )


def _blocks(placement: Any) -> int:
    return int(getattr(placement, "split_factor", getattr(placement, "blocks", 1)))


def _check(
    shape: Ints, placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> None:
    if not len(placements) == len(mesh_shape) == len(coordinate):
        raise LayoutError(
            "`placements`, `mesh_shape`, `coordinate`: one placement and one coordinate for each "
            f"mesh axis: got placements {placements}, mesh shape {tuple(mesh_shape)}, "
            f"coordinate {tuple(coordinate)}"
        )
    if not all(0 <= i < n for i, n in zip(coordinate, mesh_shape, strict=True)):
        raise LayoutError(
            f"coordinate {tuple(coordinate)} is not on a mesh of shape {tuple(mesh_shape)}"
        )
    for placement in placements:
        dim = getattr(placement, "dim", None)
        if dim is not None and not -len(shape) <= dim < len(shape):
            raise LayoutError(f"{placement} shards dim {dim} of a tensor of shape {shape}")
        if _blocks(placement) < 1:
            raise LayoutError(f"{placement} cuts a dim into {_blocks(placement)} blocks")
