"""Views that move, add or drop dims: `transpose`, `permute`, `squeeze`, `expand`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from vescale_dtensor._layout.layout import Order
from vescale_dtensor._ops.common.functions import entries, getter
from vescale_dtensor._ops.common.letters import letters, no_letters
from vescale_dtensor._ops.common.memory_formats import order_of_operand
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._planning.op_call import expanded_dims, wrap_dim


def _permuted(call: OpCall, source: Sequence[int]) -> Strategy:
    """The result's dim i is the operand's dim `source[i]`."""
    ndim = len(source)
    where = {dim: i for i, dim in enumerate(source)}
    before = order_of_operand(call) or tuple(range(ndim))
    # A view: the dims keep their places in memory, under new numbers.
    expanded = expanded_dims(call.operands[0])
    held = iter([where[dim] for dim in before if dim not in expanded])
    # But for expanded ones, which have none: as in `order_of`, they are where they stand.
    kept = {where[dim] for dim in expanded}
    order: Order | None = tuple(dim if dim in kept else next(held) for dim in range(ndim))
    if order == tuple(range(ndim)):
        order = None
    base = Signature((letters(ndim),), (tuple(source),), preserves_partial=True).strategy()
    return Strategy(base.candidates, extents=base.extents, output_orders=(order,))


def _swapped(call: OpCall, first: int, second: int, least_ndim: int) -> Strategy:
    source = list(range(call.operands[0].ndim))
    if len(source) >= least_ndim:
        source[first], source[second] = source[second], source[first]
    return _permuted(call, source)


def _transpose(call: OpCall) -> Strategy:
    first = call.argument(1, "dim0", call.kwargs.get("axis0"))
    return _swapped(call, first, call.argument(2, "dim1", call.kwargs.get("axis1")), 1)


def _matrix_transpose(call: OpCall) -> Strategy:
    return _swapped(call, -1, -2, 2)


def _reversed(call: OpCall) -> Strategy:
    return _permuted(call, list(reversed(range(call.operands[0].ndim))))


def _permute(call: OpCall) -> Strategy | None:
    ndim = call.operands[0].ndim
    dims = [d + ndim if d < 0 else d for d in sizes_argument(call, "dims")]
    # What is no permutation goes to the fallback, where torch refuses it in its words.
    return _permuted(call, dims) if sorted(dims) == list(range(ndim)) else None


def _movedim(call: OpCall) -> Strategy | None:
    ndim = call.operands[0].ndim
    given = [call.argument(1, "source"), call.argument(2, "destination")]
    asked = [[v] if isinstance(v, int) else list(v) for v in given]
    source, destination = ([d for d in dims if wrap_dim(d, ndim) is not None] for dims in asked)
    source, destination = ([d % ndim for d in dims] for dims in (source, destination))
    # What torch refuses goes to the fallback, and a scalar, of which there is nothing to move.
    for dims in (asked[0], asked[1], destination, {*source}, {*destination}):
        if len(dims) != len(source):
            return None
    rest = [d for d in range(ndim) if d not in source]
    placed = dict(zip(destination, source, strict=True))
    return _permuted(call, [placed[i] if i in placed else rest.pop(0) for i in range(ndim)])


def sizes_argument(call: OpCall, name: str) -> tuple[int, ...]:
    """A `*sizes` argument: given one by one, or as one sequence, or by name."""
    given = call.args[1:] or (call.kwargs[name],)
    if len(given) == 1 and not isinstance(given[0], int):
        return tuple(given[0])
    return tuple(given)


def _unsqueeze(call: OpCall) -> Strategy | None:
    ndim = call.operands[0].ndim
    at = call.argument(1, "dim") % (ndim + 1)
    dims = letters(ndim)
    return Signature((dims,), ((*dims[:at], None, *dims[at:]),), preserves_partial=True).strategy()


def _squeeze(call: OpCall) -> Strategy:
    """Drop dims of global extent one; a dim that has one index on this rank only stays."""
    shape = call.operands[0].shape
    dim = call.argument(1, "dim")
    squeezed = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    # By the global extent: a shard may have one index on some ranks and more on others.
    dropped = tuple(d % len(shape) for d in squeezed if len(shape) and shape[d] == 1)
    dims = letters(len(shape), dropped)

    def local(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
        return args[0].squeeze(dropped) if dropped else args[0].view_as(args[0])  # type: ignore[no-any-return]

    result = tuple(d for d in dims if d is not None)
    return Signature((dims,), (result,), preserves_partial=True, local=local).strategy()


def _expand(call: OpCall) -> Strategy | None:
    """`expand`, `expand_as`, `broadcast_to`: dims that are not expanded may be sharded."""
    shape = tuple(call.operands[0].shape)
    if len(call.operands) > 1:  # expand_as, view_as-like
        target = tuple(call.operands[1].shape)
    else:
        target = sizes_argument(call, "size" if "size" in call.kwargs else "sizes")
    if any(type(n) is not int for n in target):
        return None  # torch refuses 2.0, which is equal to 2 below
    offset = len(target) - len(shape)
    # A dim that is expanded has extent one: it cannot be sharded further, and has no letter.
    kept: list[int | None] = [
        d if target[offset + d] in (-1, shape[d]) else None for d in range(len(shape))
    ]
    result: Dims = (*((None,) * offset), *kept)
    others = tuple(no_letters(operand) for operand in call.operands[1:])
    # Sizes for local tensors: -1 keeps the local extent, which differs by rank.
    sizes = tuple(
        -1 if letter is not None else (target[i] if target[i] != -1 else shape[i - offset])
        for i, letter in enumerate(result)
    )

    def local(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
        return args[0].expand(sizes)  # type: ignore[no-any-return]

    # An operand that only lends its shape must not be reduced, nor become partial, for it.
    carries = not others
    return Signature(
        (tuple(kept), *others), (result,), preserves_partial=carries, local=local
    ).strategy()


def _family(
    strategy: Callable[[OpCall], Strategy | None], names: str, reads: int
) -> dict[Any, Rule]:
    return entries(names, Rule("view", strategy, reads, views=True))


EXPAND = Rule("view", _expand, Reads.NUMBERS | Reads.SHAPES, views=True)
RULES = {
    **_family(_transpose, "transpose swapaxes swapdims", Reads.NUMBERS),
    **_family(_matrix_transpose, "t adjoint", Reads.NUMBERS),
    **_family(_permute, "permute", Reads.NUMBERS),
    **_family(_movedim, "movedim moveaxis", Reads.NUMBERS),
    **_family(_unsqueeze, "unsqueeze", Reads.NUMBERS),
    **_family(_squeeze, "squeeze", Reads.NUMBERS | Reads.SHAPES),
    **entries("expand broadcast_to", EXPAND),
    getter("mT"): Rule("view", _matrix_transpose, views=True),
    getter("mH"): Rule("view", _matrix_transpose, views=True),
    getter("H"): Rule("view", _reversed, views=True),
    getter("T"): Rule("view", _reversed, views=True),
}
