"""Products beyond `matmul`: any letter may be sharded, also one that is summed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from vescale_comm.nested import tensors_within

from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._ops.common.functions import both_forms, entries
from vescale_dtensor._ops.common.letters import (
    added_letters,
    broadcast_letters,
    drop_letter,
    letters,
)
from vescale_dtensor._ops.common.sharded_dim import unless_refused
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._planning.op_call import substitute, wrap_dim
from vescale_dtensor._torch.compat import any_autocast
from vescale_dtensor._torch.opmath import result_dtype


def _signature(inputs: Sequence[str], output: str) -> Strategy:
    """The strategy of a product, which is linear in each operand."""
    summed = {letter for dims in inputs for letter in dims} - set(output)
    return Signature(
        tuple(map(tuple, inputs)),
        (tuple(output),),
        dict.fromkeys(summed, "sum"),
        linear=tuple((i,) for i in range(len(inputs))),
    ).strategy()


def _fixed(*inputs: str, output: str) -> Rule:
    """The rule of a product whose operands have these letters, given in order."""

    def strategy(call: OpCall) -> Strategy | None:
        ranks = [operand.ndim for operand in call.operands]
        return _signature(inputs, output) if ranks == list(map(len, inputs)) else None

    return Rule("product", unless_refused(strategy), Reads.BROADCAST_PATTERN)


def _with_bias(*inputs: str, output: str) -> Rule:
    """The rule of a product plus a first operand, which may be broadcast."""

    def strategy(call: OpCall) -> Strategy | None:
        shapes = call.shapes()
        ranks = [len(shape) for shape in shapes[1:]]
        if ranks != list(map(len, inputs)):
            return None
        extents = {
            letter: n
            for dims, shape in zip(inputs, shapes[1:], strict=True)
            for letter, n in zip(dims, shape, strict=True)
        }
        bias = added_letters(shapes[0], tuple(output), [extents[letter] for letter in output])
        if bias is None:
            return None
        # Sharded on one of these, the product is a partial sum: coordinate 0 alone adds the bias.
        summed = {letter for dims in inputs for letter in dims} - set(output)

        def local(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
            own = {
                letter: n
                for dims, factor in zip(inputs, args[1:], strict=False)
                for letter, n in zip(dims, factor.shape, strict=True)
            }
            # Where the product is empty on this rank, torch returns the bias unexpanded.
            wide = args[0].expand([own[letter] for letter in output])
            return context.call.func(wide, *args[1:], **kwargs)  # type: ignore[no-any-return]

        return Signature(
            (bias, *map(tuple, inputs)),
            (tuple(output),),
            dict.fromkeys(summed, "sum"),
            linear=tuple((i + 1,) for i in range(len(inputs))),
            bias_operands=(0,),
            local=local,
        ).strategy()

    return Rule("product", unless_refused(strategy), Reads.SHAPES)


def _einsum(call: OpCall) -> Strategy | None:
    """`einsum(equation, *operands)`: the letters are given."""
    equation = call.args[0] if call.args else None
    if not isinstance(equation, str):
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    shapes, terms = call.shapes(), left.split(",")
    if len(terms) != len(shapes) or "..." in right.replace("...", "", 1):
        return None
    named = [len(term.replace("...", "")) for term in terms]
    dots = [len(shape) - n for shape, n in zip(shapes, named, strict=True)]
    if any(n < 0 or (n and "..." not in term) for n, term in zip(dots, terms, strict=True)):
        return None
    # Dims behind an ellipsis are broadcast from the right; the longest one gives the result's.
    most = max((n for n, term in zip(dots, terms, strict=True) if "..." in term), default=0)
    inputs = [_spelled(term, n) for term, n in zip(terms, dots, strict=True)]
    # Without an arrow, the letters that occur once, in alphabetical order.
    if not arrow:
        flat = [letter for term in terms for letter in term if letter != "."]
        right = "".join(sorted({n for n in flat if flat.count(n) == 1}))
        right = "..." + right if most else right
    output = _spelled(right, most)
    stretched = _stretched(inputs, shapes)  # dims of extent one, which einsum broadcasts
    letters = tuple(
        tuple(None if n in stretched and shape[i] == 1 else n for i, n in enumerate(dims))
        for dims, shape in zip(inputs, shapes, strict=True)
    )
    # A letter that an operand has twice is a diagonal: a shard of one dim would not be one of it.
    twice = frozenset(n for dims in inputs for n in dims if dims.count(n) > 1)
    summed = {n for dims in inputs for n in dims} - set(output)
    return Signature(
        letters,
        (output,),
        dict.fromkeys(summed, "sum"),
        unshardable=twice,
        linear=tuple((i,) for i in range(len(inputs))),
        local=_local_einsum,
        specialize=_bound_einsum,
        probe_order="meta",
    ).strategy()


def _local_einsum(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    found: Tensor = _bound_einsum(context)(*args, **kwargs)
    return found


def _bound_einsum(context: LocalContext) -> Callable[..., Tensor]:
    """Torch's own, unless a dim has one index or none on this rank and more in the global tensor.

    Torch makes no matrix product of such a sum, and then autocast leaves its dtype alone: on some
    ranks and not on others. Cast to the dtype that the global shapes give.
    """
    einsum: Callable[..., Tensor] = context.call.func
    shapes = context.call.shapes()
    # Torch decides by extents of 0 and 1; all larger ones are alike.
    few = [tuple(min(n, 2) for n in shape) for shape in shapes]
    here = [
        tuple(min(n, 2) for n in local_shape(context.input_layout(i), shape))
        for i, shape in enumerate(shapes)
    ]
    if few == here:
        return einsum

    dtypes = [operand.dtype for operand in context.call.operands]

    def typed(*args: Any) -> Tensor:
        found = einsum(*args)
        if not any_autocast():
            return found
        zero = [torch.zeros((), dtype=dtype, device=found.device) for dtype in dtypes]
        # Of the global kind of shape, without memory: autocast then decides as on one device.
        feed = iter([x.expand(shape) for x, shape in zip(zero, few, strict=True)])
        return found.to(result_dtype(einsum, *substitute(list(args), feed)))

    return typed


def _spelled(term: str, count: int) -> tuple[str, ...]:
    """The letters of one operand; dims behind an ellipsis are numbers, counted from the right."""
    before, dots, after = term.partition("...")
    middle = [str(i) for i in range(count, 0, -1)] if dots else []
    return (*before, *middle, *after)


def _stretched(inputs: Sequence[Sequence[str]], shapes: Sequence[Sequence[int]]) -> set[str]:
    """The letters whose extents differ among operands: those of extent one are broadcast."""
    extents: dict[str, set[int]] = {}
    for dims, shape in zip(inputs, shapes, strict=True):
        for letter, n in zip(dims, shape, strict=True):
            extents.setdefault(letter, set()).add(n)
    return {letter for letter, found in extents.items() if len(found) > 1}


def _tensordot(call: OpCall) -> Strategy | None:
    """`tensordot(a, b, dims)`: a number, or two lists of dims."""
    dims = call.argument(2, "dims", 2)
    if len(call.operands) != 2:
        return None
    left, right = (operand.ndim for operand in call.operands)
    if isinstance(dims, int):
        pairs = [(left - dims + i, i) for i in range(dims)]
    elif isinstance(dims, list | tuple) and len(dims) == 2:
        own, other = ([d] if isinstance(d, int) else list(d) for d in dims)
        if len(own) != len(other):
            return None
        # A tensor without dims has none to wrap around: the check below refuses it.
        pairs = [(a % max(1, left), b % max(1, right)) for a, b in zip(own, other, strict=True)]
    else:
        return None
    first: list[str] = [f"a{i}" for i in range(left)]
    second: list[str] = [f"b{i}" for i in range(right)]
    if any(not (0 <= a < left and 0 <= b < right) for a, b in pairs):
        return None
    for a, b in pairs:
        second[b] = first[a]
    output = [n for n in first if n not in second] + [n for n in second if n not in first]
    summed = set(first) & set(second)
    shapes = call.shapes()
    # Of the global extents: a shard may have one index of a dim that is not broadcast.
    stretched = {first[a] for a, b in pairs if shapes[0][a] != shapes[1][b]}
    return Signature(
        # torch.tensordot broadcasts contracted dims of extent one.
        tuple(
            tuple(None if n in stretched and shape[d] == 1 else n for d, n in enumerate(dims))
            for dims, shape in zip((first, second), shapes, strict=True)
        ),
        (tuple(output),),
        dict.fromkeys(summed, "sum"),
        linear=((0,), (1,)),
    ).strategy()


def _inner(call: OpCall) -> Strategy | None:
    """`inner`: the last dims of both are contracted."""
    left, right = (operand.ndim for operand in call.operands)
    if not left or not right:  # a number times a tensor
        both = letters(left), letters(right)
        return Signature(both, (both[0] or both[1],), linear=((0,), (1,))).strategy()
    first, second = (
        tuple(f"a{i}" for i in range(left - 1)),
        tuple(f"b{i}" for i in range(right - 1)),
    )
    return Signature(
        ((*first, "k"), (*second, "k")), ((*first, *second),), {"k": "sum"}, linear=((0,), (1,))
    ).strategy()


def _vecdot(call: OpCall) -> Strategy | None:
    """`linalg.vecdot`: one dim of both is contracted, the others are broadcast."""
    shapes = call.shapes()
    if len(shapes) != 2 or not shapes[0] or not shapes[1]:
        return None
    (first, second), output = broadcast_letters(shapes)
    gone = wrap_dim(call.kwargs.get("dim", -1), len(output))
    if gone is None or gone not in first or gone not in second:
        return None
    rest = tuple(d for d in output if d != gone)
    return Signature((first, second), (rest,), {gone: "sum"}, linear=((0,), (1,))).strategy()


def _chain(call: OpCall) -> Strategy | None:
    """`linalg.multi_dot`: a chain of matrices, which may begin and end with a vector."""
    ranks = [operand.ndim for operand in call.operands]
    if len(ranks) < 2 or any(n != 2 for n in ranks[1:-1]) or {ranks[0], ranks[-1]} - {1, 2}:
        return None
    inputs: list[str] = [chr(97 + i) + chr(98 + i) for i in range(len(ranks))]
    inputs[0] = inputs[0][2 - ranks[0] :]
    inputs[-1] = inputs[-1][: ranks[-1]]
    ends = ("a" if ranks[0] == 2 else "") + (inputs[-1][1:] if ranks[-1] == 2 else "")
    # Torch chooses the order of the products by local extents: with other extents than one device
    # has it may round otherwise, which a sum over shards does in any case.
    return _signature(inputs, ends)


def _cross(call: OpCall) -> Strategy | None:
    """`linalg.cross(a, b, dim)`: the dim of three components is not sharded."""
    shapes = call.shapes()
    if len(shapes) != 2 or len(shapes[0]) != len(shapes[1]):
        return None
    given = call.argument(2, "dim")
    dim = given
    if dim is None and call.func.__name__.startswith("linalg"):
        dim = -1
    elif dim is None and shapes[0] == shapes[1]:  # the first that has three
        dim = next((d for d, n in enumerate(shapes[0]) if n == 3), None)
    gone = wrap_dim(dim, len(shapes[0]))
    if gone is None:
        return None
    (first, second), output = broadcast_letters(shapes)
    inputs = tuple(drop_letter(dims, gone) for dims in (first, second))
    result: Dims = drop_letter(output, gone)

    def local(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
        if given is not None:
            return call.func(*args, **kwargs)  # type: ignore[no-any-return]
        # Without a dim, torch takes the first of extent three: on a local tensor maybe another one.
        first, second = tensors_within((args, kwargs))
        found: Tensor = torch.linalg.cross(first, second, dim=gone)
        return found

    return Signature(inputs, (result,), linear=((0,), (1,)), local=local).strategy()


_VALUES = Reads.NUMBERS | Reads.SHAPES
RULES = {
    **entries("outer ger", _fixed("i", "j", output="ij")),
    **entries("vdot", _fixed("k", "k", output="")),
    **both_forms("addmv", _with_bias("mk", "k", output="m")),
    **both_forms("addr", _with_bias("m", "n", output="mn")),
    **both_forms("addbmm", _with_bias("bmk", "bkn", output="mn")),
    **entries("einsum", Rule("product", unless_refused(_einsum), _VALUES)),
    **entries("tensordot", Rule("product", unless_refused(_tensordot), _VALUES)),
    **entries("inner", Rule("product", unless_refused(_inner), Reads.BROADCAST_PATTERN)),
    **entries("vecdot", Rule("product", unless_refused(_vecdot), _VALUES)),
    **entries(
        "multi_dot chain_matmul", Rule("product", unless_refused(_chain), Reads.BROADCAST_PATTERN)
    ),
    **entries("cross", Rule("product", unless_refused(_cross), _VALUES)),
}
