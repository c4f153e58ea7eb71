"""`view`, `reshape`, `flatten`, `unflatten`: a shard stays where the new dims can express it.

`reshape_propagation` gives its placement in the new shape. A shard that cannot stay is resharded to
a dim that is not sharded, where one can stay, or gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._layout.layout import Layout, Order, Shape
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import Replicate, Shard, is_flat
from vescale_dtensor._layout.shard_geometry import dim_groups
from vescale_dtensor._layout.spec import order_of
from vescale_dtensor._ops.common.functions import entries, functions
from vescale_dtensor._ops.common.letters import no_letters
from vescale_dtensor._ops.view.reshape_propagation import (
    ReshapeGroup,
    repeat_placements,
    reshape_groups,
    reshape_placements,
)
from vescale_dtensor._ops.view.transpose import sizes_argument
from vescale_dtensor._planning import (
    AxisStrategy,
    Dims,
    LocalContext,
    OpCall,
    Reads,
    Rule,
    Signature,
    Strategy,
)
from vescale_dtensor._planning.memory_order import exact_stand_in, without_modes
from vescale_dtensor._planning.op_call import wrap_dim
from vescale_dtensor._redistribute.states import replace_placements
from vescale_dtensor._tensor.copied_views import same_memory
from vescale_dtensor._tensor.dtensor import DTensor


def _strategy(call: OpCall, target: Shape) -> Strategy | None:
    operand = call.operands[0]
    source = tuple(operand.shape)
    if prod(source) != prod(target):
        # Raised here: on local tensors the numbers of elements may agree by chance.
        raise RuntimeError(
            f"shape {list(target)} is invalid for input of size {prod(source)} "
            f"(a DTensor of global shape {list(source)})"
        )
    if not isinstance(operand, DTensor):
        return None
    layout = operand._spec.layout
    view, order = _on_one_device(call, target)
    # The same on every rank: which local tensors can be viewed differs from rank to rank.
    apart = view and operand._spec.has_gaps and _joins_inside(layout, source, target)
    # Not letters: which shards stay depends on extents, mesh axis by mesh axis.
    return Strategy(
        (AxisStrategy((Replicate(),) * len(call.operands), (Replicate(),)),),
        axis_candidates=_candidates(layout, source, target, len(call.operands)),
        shapes=(target,),
        local=_reshape if view and not apart else _copied,
        specialize=_specialized if view and not apart else _specialized_copy,
        copy_on_one_device=not view,
        copy_on_shards=apart,
        output_orders=(order,),
    )


def _candidates(
    layout: Layout, source: Shape, target: Shape, operands: int
) -> tuple[tuple[AxisStrategy, ...], ...]:
    """For each axis the candidate whose shard survives the reshape: the present one, or another."""
    if prod(source) == 0:
        # Without elements, groups of dims with equal products do not exist.
        return tuple(() for _ in layout.placements)
    after = reshape_placements(layout, source, target)
    rows = list(fixed_candidates(layout, after, operands))
    # Axes whose shard would be gathered: an all-to-all to another dim may save the gather.
    stopped = [
        axis
        for axis, placement in enumerate(layout.placements)
        if isinstance(placement, Sharded) and isinstance(after[axis], Replicate)
    ]
    # The layout after the gathers: dims that stopped shards leave free may be sharded again.
    at = layout.with_placements(
        replace_placements(layout.placements, dict.fromkeys(stopped, Replicate()))
    )
    for axis in stopped:
        found = _resharded_dim(axis, at, source, target)
        if found is not None:
            dim, passing = found
            inputs = (dim, *((Replicate(),) * (operands - 1)))
            rows[axis] = (AxisStrategy(inputs, (passing,), fixed_placement=True, proactive=True),)
            at = at.with_placements(replace_placements(at.placements, {axis: dim}))
    return tuple(rows)


def _resharded_dim(
    axis: int, at: Layout, source: Shape, target: Shape
) -> tuple[Shard, Placement] | None:
    """An unsharded dim whose shard would survive the reshape, and what it becomes.

    Resharding to it is an all-to-all, which sends less than a gather. Large dims are tried first.
    """
    # The present placements first, to compare with: resharding one axis must not cost another.
    after = reshape_placements(at, source, target)
    for dim in sorted(range(len(source)), key=lambda d: -source[d]):
        # One shard per dim: an inner shard of it would depend on what the outer one leaves.
        if any(isinstance(p, Sharded) and dim in p.cut_dims() for p in at.placements):
            continue
        there = at.with_placements(replace_placements(at.placements, {axis: Shard(dim)}))
        passed = reshape_placements(there, source, target)
        passing = passed[axis]
        if not isinstance(passing, Sharded) or is_flat(passing):
            continue
        # The shards of other axes must not be worse off for it.
        if replace_placements(passed, {axis: Replicate()}) == after:
            return Shard(dim), passing
    return None


def _on_one_device(call: OpCall, target: Shape) -> tuple[bool, Order | None]:
    """Whether one device would give a view of the operand's memory, and the result's memory order.

    Asked of torch, of a tensor without data that has the global strides: gaps between elements may
    leave no view of this shape.

    Raises:
        RuntimeError: torch's own, where a view was asked for and there is none.
    """
    operand: Any = call.operands[0]
    spec = operand._spec
    if spec.layout.order is None and not spec.has_gaps:
        return True, None  # row-major tensors are viewed in any shape
    with without_modes(), torch.no_grad():
        base = exact_stand_in(operand)
        if call.func not in _MAY_COPY:
            result = base.view(target)
        elif call.func in _RAVEL:
            # Not `reshape`, which gives a view of elements that have equal gaps between them.
            result = base.contiguous().view(target)
        else:
            result = base.reshape(target)
        # Here, too: a recording must not meet these tensors.
        return same_memory(result, base), order_of(target, result.stride())


def _joins_inside(layout: Layout, source: Shape, target: Shape) -> bool:
    """Whether a sharded dim is joined with one outside of it.

    There may be gaps before each row of a shard although one device has none: of every second
    column of four, two lie next to the following row's; of the three that a rank has, they do not.
    """
    inside = {dim for group in reshape_groups(source, target) for dim in group.source[1:]}
    return any(
        isinstance(p, Sharded) and not inside.isdisjoint(p.cut_dims()) for p in layout.placements
    )


def fixed_candidates(
    layout: Layout, after: tuple[Placement, ...], operands: int
) -> tuple[tuple[AxisStrategy, ...], ...]:
    """For each axis the candidate that keeps operand 0's placement, where it survives."""
    others = (Replicate(),) * (operands - 1)
    return tuple(
        ()
        if isinstance(passing, Replicate)
        else (AxisStrategy((before, *others), (passing,), fixed_placement=True),)
        for before, passing in zip(layout.placements, after, strict=True)
    )


def _reshape(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    local: Tensor = args[0]
    # The local shape: what the user asked for are extents of the global tensor.
    shape = context.local_output_shape()
    return local.reshape(shape) if context.call.func in _MAY_COPY else _viewing(shape)(local)


def _specialized(context: LocalContext) -> Callable[..., Tensor]:
    """`_reshape` for these shapes: the local shape is found once."""
    shape = context.local_output_shape()
    if context.call.func in _MAY_COPY:
        return lambda local, *_, **__: local.reshape(shape)
    return _viewing(shape)


def _copied(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    """A copy where one device copies, also if the local tensor could be viewed."""
    return _copy_of(args[0], context.local_output_shape())


def _specialized_copy(context: LocalContext) -> Callable[..., Tensor]:
    """`_copied` for these shapes."""
    shape = context.local_output_shape()
    return lambda local, *_, **__: _copy_of(local, shape)


def _copy_of(local: Tensor, shape: Shape) -> Tensor:
    result = local.reshape(shape)
    # As `reshape` copies: row-major.
    contiguous = torch.contiguous_format
    return result.clone(memory_format=contiguous) if same_memory(result, local) else result


def _viewing(shape: Shape) -> Callable[..., Tensor]:
    """Views as on one device; copies if the local tensor has other strides, which allow none."""

    def viewed(local: Tensor, *_: Any, **__: Any) -> Tensor:
        try:
            return local.view(shape)
        except RuntimeError:
            return local.reshape(shape)

    return viewed


def _inferable(shape: Shape) -> bool:
    """Whether these are sizes, with at most one -1, and what it stands for is determined."""
    if any(type(n) is not int for n in shape):
        return False  # 2.0 == 2, but torch refuses it
    return -1 not in shape or (shape.count(-1) == 1 and 0 not in shape)


def inferred(shape: Shape, count: int) -> Shape:
    """The shape with its -1 filled in."""
    if -1 not in shape:
        return shape
    known = prod(n for n in shape if n != -1)
    return tuple((count // known if known else 0) if n == -1 else n for n in shape)


def _view(call: OpCall) -> Shape | None:
    """The shape that is asked for."""
    operand = call.operands[0]
    if len(call.operands) > 1:
        return tuple(call.operands[1].shape)
    # `view(dtype)` reinterprets memory: another op under the same name.
    if any(isinstance(v, torch.dtype) for v in (*call.args, *call.kwargs.values())):
        _refuse_other_strides(call)
        return None
    sizes = sizes_argument(call, "shape" if "shape" in call.kwargs else "size")
    if not _inferable(sizes):
        return None
    return inferred(sizes, operand.numel())


def _refuse_other_strides(call: OpCall) -> None:
    """Raise what torch does where global strides allow no view in another dtype."""
    operand = call.operands[0]
    if isinstance(operand, DTensor):
        with without_modes(), torch.no_grad():
            exact_stand_in(operand).view(*call.args[1:], **call.kwargs)


def _flatten(call: OpCall) -> Shape | None:
    shape = tuple(call.operands[0].shape)
    if not shape:
        return (1,)
    start = wrap_dim(call.argument(1, "start_dim", 0), len(shape))
    end = wrap_dim(call.argument(2, "end_dim", -1), len(shape))
    if start is None or end is None or start > end:
        return None
    joined = prod(shape[start : end + 1])
    return (*shape[:start], joined, *shape[end + 1 :])


def _unflatten(call: OpCall) -> Shape | None:
    shape = tuple(call.operands[0].shape)
    dim = call.dim(1)
    if dim is None:
        return None
    given = tuple(call.argument(2, "sizes"))
    if not _inferable(given):
        return None
    sizes = inferred(given, shape[dim])
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def _to(shape_of: Callable[[OpCall], Shape | None]) -> Callable[[OpCall], Strategy | None]:
    """The strategy of what only says a shape."""

    def strategy(call: OpCall) -> Strategy | None:
        target = shape_of(call)
        return None if target is None else _strategy(call, target)

    return strategy


def _shape_class(
    shape_of: Callable[[OpCall], Shape | None],
) -> Callable[[OpCall], tuple[Hashable, Shape] | None]:
    """A key shared by all reshapes that treat the same shards in the same way (see `Rule`).

    Extents matter only in groups of dims that are sharded; and there not if one dim becomes one
    dim, or if the only shard is an even one of the first of several dims that become one. So a new
    batch size needs no new plan.
    """

    def alike(call: OpCall) -> tuple[Hashable, Shape] | None:
        operand, target = call.operands[0], shape_of(call)
        if target is None or len(call.operands) > 1 or not isinstance(operand, DTensor):
            return None
        source, layout = tuple(operand.shape), operand._spec.layout
        # Left to the strategy, by their exact shapes: one has no groups, the other is an error.
        if prod(source) == 0 or prod(source) != prod(target):
            return None
        # Where other kinds of shard have their boundaries depends on extents, so on exact shapes.
        if not all(isinstance(p, Shard) or not isinstance(p, Sharded) for p in layout.placements):
            return None
        found = tuple(
            _token(group, layout, source, target) for group in reshape_groups(source, target)
        )
        lies = _on_one_device(call, target)
        return (layout, len(source), len(target), found, lies), target

    return alike


def _token(group: ReshapeGroup, layout: Layout, source: Shape, target: Shape) -> Hashable:
    pairs = zip(layout.placements, layout.sizes, strict=True)
    shards = [(p.dim, n) for p, n in pairs if isinstance(p, Shard) and p.dim in group.source]
    # One dim that becomes one dim keeps any shard, whatever its extent.
    if not shards or len(group.source) == len(group.target) == 1:
        return group
    (dim, count), first = shards[0], group.source[0]
    # Merged with dims inside it, an even shard of the outermost dim is even, whatever their size.
    if len(shards) == len(group.target) == 1 and dim == first and source[dim] % count == 0:
        return group, "even"
    return group, tuple(source[d] for d in group.source), tuple(target[d] for d in group.target)


def _repeated_each(call: OpCall) -> Strategy | None:
    """`repeat_interleave` with a tensor of counts: that dim is not sharded."""
    x, *repeats = call.operands
    if not repeats:  # `repeat_interleave(repeats)` lists the places
        return Signature((no_letters(x),), ((None,),), data_dependent_shape=True).strategy()
    if len(repeats) > 1 or repeats[0].ndim > 1:
        return None
    dim, flattens = call.dim(2), call.argument(2, "dim") is None
    if dim is None and not flattens:
        return None
    dims: Dims = tuple(None if flattens or d == dim else d for d in range(x.ndim))
    result: Dims = (None,) if flattens else dims
    inputs = (dims, no_letters(repeats[0]))
    return Signature(inputs, (result,), linear=((0,),), data_dependent_shape=True).strategy()


def _repeat_interleave(call: OpCall) -> Strategy | None:
    """`repeat_interleave`: a shard of the dim stays, its extents multiplied."""
    operand = call.operands[0]
    repeats, dim = call.argument(1, "repeats"), call.dim(2)
    if isinstance(call.operands[-1], Tensor) and not isinstance(repeats, int):
        return _repeated_each(call)
    if not isinstance(repeats, int) or not isinstance(operand, DTensor):
        return None
    # Flattened row-major: a shard of any dim but the first would be spread over the result.
    if call.argument(2, "dim") is None:
        return Signature((no_letters(operand),), ((None,),), linear=((0,),)).strategy()
    if dim is None or repeats < 0:
        return None
    shape = tuple(operand.shape)
    layout = operand._spec.layout
    after = repeat_placements(layout, shape, dim, repeats)
    result = tuple(n * repeats if d == dim else n for d, n in enumerate(shape))
    replicated = AxisStrategy((Replicate(),), (Replicate(),))
    candidates = fixed_candidates(layout, after, 1)

    def local(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
        # Dims that a flat shard shards together are one dim of the local tensor.
        groups = dim_groups(context.input_layout(0).placements, len(shape))
        place = next(i for i, group in enumerate(groups) if dim in group)
        return args[0].repeat_interleave(repeats, place)  # type: ignore[no-any-return]

    return Strategy((replicated,), axis_candidates=candidates, shapes=(result,), local=local)


_READS = Reads.NUMBERS | Reads.SHAPES
_MAY_COPY = frozenset(functions("reshape reshape_as flatten ravel"))
_RAVEL = frozenset(functions("ravel"))


def _rule(name: str, shape_of: Callable[[OpCall], Shape | None]) -> Rule:
    reads = _READS | Reads.STRIDES
    return Rule(name, _to(shape_of), reads, views=True, shape_class=_shape_class(shape_of))


VIEW, RESHAPE = _rule("view", _view), _rule("reshape", _view)
RULES = {
    **entries("view", VIEW),
    **entries("reshape", RESHAPE),
    **entries("flatten ravel", _rule("flatten", _flatten)),
    **entries("repeat_interleave", Rule("repeat", _repeat_interleave, _READS)),
    **entries("unflatten", _rule("unflatten", _unflatten)),
}
