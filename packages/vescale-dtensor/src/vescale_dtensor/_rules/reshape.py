"""`view`, `reshape`, `flatten`, `unflatten`: a cut passes from dim to dim where it falls on edges.

Both shapes are cut into groups of dims with equal products. Within a group only the outermost dim
can be split, and its cut becomes one of the outermost dim on the other side if every boundary falls
between two of that dim's slices. Where that does not hold, the axis is gathered first.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._call import Call, Reads
from vescale_dtensor._execute import Run
from vescale_dtensor._layout import Layout, Shape, strides_of
from vescale_dtensor._placements import (
    Placement,
    Replicate,
    Shard,
    Sharded,
    is_interval,
    moved,
    split_of,
)
from vescale_dtensor._plan import Rule
from vescale_dtensor._rules._names import functions
from vescale_dtensor._rules.view import sizes_argument
from vescale_dtensor._strategy import Row, Strategy
from vescale_dtensor._tensor import DTensor

Link = tuple[int, int, int, int]
"""Outer dim on either side, and the number of elements in one slice of each."""


def links(source: Shape, target: Shape) -> list[Link]:
    """The outermost dims of groups with equal products, extents of one left out."""
    found: list[Link] = []
    i, j = 0, 0
    while i < len(source) and j < len(target):
        if source[i] == 1:
            i += 1
            continue
        if target[j] == 1:
            j += 1
            continue
        first, second = i, j
        left, right = source[i], target[j]
        while left != right:
            if left < right:
                i += 1
                left *= source[i]
            else:
                j += 1
                right *= target[j]
        found.append((first, second, left // source[first], right // target[second]))
        i, j = i + 1, j + 1
    return found


def carried(layout: Layout, source: Shape, found: list[Link]) -> tuple[Placement, ...]:
    """For each axis, the placement behind these links; `Replicate` where the cut cannot pass."""
    table = {first: (second, a, b) for first, second, a, b in found}
    extents = {d: {n} for d, n in enumerate(source)}
    result: list[Placement] = []
    stopped: set[int] = set()
    for placement, count in zip(layout.placements, layout.sizes, strict=True):
        if not isinstance(placement, Sharded):
            result.append(placement)
            continue
        dim, *others = placement.cut_dims()
        cut = None
        if dim in table and dim not in stopped and not others:
            cut = _passed(placement, count, extents[dim], *table[dim])
        if cut is None:
            # An inner cut of a dim that is gathered would not be the same cut.
            stopped.update((dim, *others))
            result.append(Replicate())
        else:
            result.append(cut)
            extents[dim] = {s for n in extents[dim] for s in placement.sizes(n, count)}
    return tuple(result)


def _passed(
    placement: Sharded, count: int, extents: set[int], dim: int, a: int, b: int
) -> Placement | None:
    """The cut on the other side, if it is the same cut for every extent that outer axes leave."""
    if a == b:
        return moved(placement, dim)
    if not is_interval(placement):
        return None
    cuts = set()
    for extent in extents:
        sizes = [size * a for size in placement.sizes(extent, count)]
        if any(size % b for size in sizes):
            return None
        cuts.add(split_of(dim, [size // b for size in sizes]) if sum(sizes) else None)
    real = cuts - {None}
    if len(real) > 1:
        return None
    return real.pop() if real else Shard(dim)


def _strategy(call: Call, target: Shape) -> Strategy | None:
    operand = call.operands[0]
    source = tuple(operand.shape)
    if prod(source) != prod(target):
        raise RuntimeError(
            f"shape {list(target)} is invalid for input of size {prod(source)} "
            f"(a DTensor of global shape {list(source)})"
        )
    if not isinstance(operand, DTensor):
        return None
    layout = operand._spec.layout
    after = carried(layout, source, links(source, target) if prod(source) else [])
    view = _is_view(call, layout, source, target)
    return Strategy(
        (Row((Replicate(),) * len(call.operands), (Replicate(),)),),
        axis_rows=exact_rows(layout, after, len(call.operands)),
        shapes=(target,),
        local=_reshape if view else _copied,
        bind=_bound if view else None,
    )


def _is_view(call: Call, layout: Layout, source: Shape, target: Shape) -> bool:
    """Whether one device would give a view of the operand's memory.

    Raises:
        RuntimeError: torch's own, where a view was asked for and there is none.
    """
    if layout.order is None:
        return True
    whole = torch.empty_strided(source, strides_of(source, layout.order), device="meta")
    if call.func not in _MAY_COPY:
        whole.view(target)
        return True
    return bool(whole.reshape(target)._is_view())


def exact_rows(
    layout: Layout, after: tuple[Placement, ...], operands: int
) -> tuple[tuple[Row, ...], ...]:
    """For each axis the row that lets operand 0's placement pass, if it does."""
    others = (Replicate(),) * (operands - 1)
    return tuple(
        () if isinstance(behind, Replicate) else (Row((before, *others), (behind,), exact=True),)
        for before, behind in zip(layout.placements, after, strict=True)
    )


def _reshape(run: Run, args: Any, kwargs: Any) -> Tensor:
    local: Tensor = args[0]
    shape = run.local_output_shape()
    return local.reshape(shape) if run.call.func in _MAY_COPY else _viewed(local, shape)


def _bound(run: Run) -> Callable[..., Tensor]:
    """`_reshape` for these shapes: the local shape is found once."""
    shape = run.local_output_shape()
    if run.call.func in _MAY_COPY:
        return lambda local, *_, **__: local.reshape(shape)
    return lambda local, *_, **__: _viewed(local, shape)


def _copied(run: Run, args: Any, kwargs: Any) -> Tensor:
    """A copy where one device had one, though the local piece could be viewed."""
    result = _reshape(run, args, kwargs)
    return result.clone() if result._is_view() else result


def _viewed(local: Tensor, shape: Shape) -> Tensor:
    """A view where one device had one; the local piece may lie otherwise, then it is copied."""
    try:
        return local.view(shape)
    except RuntimeError:
        return local.reshape(shape)


def _inferable(shape: Shape) -> bool:
    """Whether there is at most one -1, and what it stands for is determined."""
    return -1 not in shape or (shape.count(-1) == 1 and 0 not in shape)


def inferred(shape: Shape, count: int) -> Shape:
    """The shape with its -1 filled in."""
    if -1 not in shape:
        return shape
    known = prod(n for n in shape if n != -1)
    return tuple((count // known if known else 0) if n == -1 else n for n in shape)


def _view(call: Call) -> Strategy | None:
    operand = call.operands[0]
    if len(call.operands) > 1:
        return _strategy(call, tuple(call.operands[1].shape))
    if any(isinstance(v, torch.dtype) for v in (*call.args, *call.kwargs.values())):
        return None
    sizes = sizes_argument(call, "shape" if "shape" in call.kwargs else "size")
    if any(not isinstance(n, int) for n in sizes) or not _inferable(sizes):
        return None
    return _strategy(call, inferred(sizes, operand.numel()))


def _flatten(call: Call) -> Strategy | None:
    shape = tuple(call.operands[0].shape)
    if not shape:
        return _strategy(call, (1,))
    first, last = call.argument(1, "start_dim", 0), call.argument(2, "end_dim", -1)
    if not all(isinstance(d, int) and -len(shape) <= d < len(shape) for d in (first, last)):
        return None
    start, end = first % len(shape), last % len(shape)
    if start > end:
        return None
    joined = prod(shape[start : end + 1])
    return _strategy(call, (*shape[:start], joined, *shape[end + 1 :]))


def _unflatten(call: Call) -> Strategy | None:
    shape = tuple(call.operands[0].shape)
    dim = call.argument(1, "dim")
    if not isinstance(dim, int):
        return None
    given = tuple(call.argument(2, "sizes"))
    if not -len(shape) <= dim < len(shape) or not _inferable(given):
        return None
    dim %= len(shape)
    sizes = inferred(given, shape[dim])
    return _strategy(call, (*shape[:dim], *sizes, *shape[dim + 1 :]))


def _repeat_interleave(call: Call) -> Strategy | None:
    """Every slice along a dim several times in a row: the cut passes, its pieces grow alike."""
    operand = call.operands[0]
    repeats, dim = call.argument(1, "repeats"), call.argument(2, "dim")
    if not isinstance(repeats, int) or not isinstance(dim, int) or not isinstance(operand, DTensor):
        return None
    shape = tuple(operand.shape)
    if not -len(shape) <= dim < len(shape) or repeats < 0:
        return None
    dim %= len(shape)
    layout = operand._spec.layout
    kept = [(d, d, repeats if d == dim else 1, 1) for d in range(len(shape))]
    if repeats == 0:
        kept.pop(dim)
    after = carried(layout, shape, kept)
    result = tuple(n * repeats if d == dim else n for d, n in enumerate(shape))
    whole = Row((Replicate(),), (Replicate(),))
    return Strategy((whole,), axis_rows=exact_rows(layout, after, 1), shapes=(result,))


_READS = Reads.NUMBERS | Reads.SHAPES
_MAY_COPY = frozenset(functions("reshape reshape_as flatten ravel"))
RULES = {
    **{f: Rule("view", _view, _READS, views=True) for f in functions("view view_as")},
    **{f: Rule("reshape", _view, _READS, views=True) for f in functions("reshape reshape_as")},
    **{f: Rule("flatten", _flatten, _READS, views=True) for f in functions("flatten ravel")},
    **{f: Rule("repeat", _repeat_interleave, _READS) for f in functions("repeat_interleave")},
    **{f: Rule("unflatten", _unflatten, _READS, views=True) for f in functions("unflatten")},
}
