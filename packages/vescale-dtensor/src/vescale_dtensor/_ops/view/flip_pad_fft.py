"""Operations that need some dims unsharded: flips, rolls, sorting, padding, FFT, diagonals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch.dispatch import run_by_rule
from vescale_dtensor._dispatch.view_inverses import give_way_back
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._ops.common.functions import functions
from vescale_dtensor._ops.common.memory_formats import in_format_of_operand
from vescale_dtensor._ops.common.reshard_offer import offer_reshard
from vescale_dtensor._ops.common.sharded_dim import is_refused, pad_empty_dims
from vescale_dtensor._ops.common.unsharded_dims import unsharded_dims_strategy
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._planning.op_call import wrap_dim

Parse = Callable[[OpCall], Iterable[int] | int | None]
_PLACES = (torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.fft, torch.functional)


def dim_at(position: int, default: int | tuple[int, ...] | None, name: str = "dim") -> Parse:
    """The dim, or the dims, at a position or by name."""

    def parse(call: OpCall) -> Any:
        given = call.argument(position, name, default)
        return None if isinstance(given, bool | str | torch.Tensor) else given

    return parse


def _everything(call: OpCall) -> range:
    return range(call.operands[0].ndim)


def _all_if_none(position: int, name: str = "dim") -> Parse:
    """All dims, where none are named."""

    def parse(call: OpCall) -> Any:
        given = call.argument(position, name)
        return _everything(call) if given is None or given == () else given

    return parse


def _flipped(call: OpCall) -> Any:
    """`flip(x, 0, 1)` or `flip(x, (0, 1))`."""
    given = call.args[1:] or (call.kwargs.get("dims"),)
    return given if isinstance(given[0], int) else given[0]


def _padded(call: OpCall) -> list[int] | None:
    """The dims that `F.pad` pads, last ones first."""
    sides = call.argument(1, "pad")
    ndim = call.operands[0].ndim
    if not isinstance(sides, list | tuple) or len(sides) % 2 or len(sides) > 2 * ndim:
        return None
    if call.argument(2, "mode", "constant") != "constant" and call.func.__name__ == "pad":
        return list(range(-len(sides) // 2, 0))  # other modes tell batch and channels by the count
    # A dim with no padding on either side may stay sharded.
    pairs = zip(sides[::2], sides[1::2], strict=True)
    return [-1 - i for i, pair in enumerate(pairs) if tuple(pair) != (0, 0)]


def _all_dims_but(call: OpCall) -> Any:
    """`renorm`: all dims but one."""
    dim = call.dim(2)
    return None if dim is None else [d for d in _everything(call) if d != dim]


def _rolled(call: OpCall) -> Any:
    dims = call.argument(2, "dims")
    return _everything(call) if dims is None or dims == () else dims


def _sorted(call: OpCall) -> Any:
    """`sort(dim, descending)`, or `sort(*, stable, dim, descending)`."""
    dim = call.argument(1, "dim", -1)
    return None if isinstance(dim, bool) else dim


def _of_fourier(call: OpCall) -> Any:
    """`fftn(s, dim)`: the dims named, or as many of the last as there are sizes, or all."""
    sizes, dims = call.argument(1, "s"), call.argument(2, "dim")
    if dims is not None:
        return dims
    return _everything(call) if sizes is None else range(-len(tuple(sizes)), 0)


def _strategy(
    parse: Parse, outputs: tuple[str, ...], linear: bool = False
) -> Callable[[OpCall], Strategy | None]:
    def strategy(call: OpCall) -> Strategy | None:
        found = unsharded_dims_strategy(call, parse(call), outputs, linear)
        name = call.func.__name__
        if found is None:
            return None
        # How these kernels lay out results of operands that are not row-major: some can be asked on
        # meta tensors, others keep the named formats only.
        # Windows that do not overlap lie inside the dim of their numbers, beside what it held.
        if name in ("rot90", "unfold"):
            return replace(found, probe_order="meta")
        if name.endswith("fftshift"):
            return _pad_empty_operand(_in_format_of_rolled(call, found, parse(call)))
        if name.startswith("fft_"):
            return _pad_empty_operand(replace(found, probe_order="meta"))
        if name == "pad" and call.argument(2, "mode", "constant") in ("reflect", "replicate"):
            return _pad_empty_operand(in_format_of_operand(call, found))
        if name == "roll" and call.argument(2, "dims", ()) != ():
            return _in_format_of_rolled(call, found, parse(call), call.argument(1, "shifts"))
        return _pad_empty_operand(found) if name.startswith("pad") else found

    return strategy


def _in_format_of_rolled(
    call: OpCall, found: Strategy, dims: Any, shifts: Any = None
) -> Strategy | None:
    """With the memory order of a `roll`; one by a multiple of the extent copies row-major."""
    rolled = [dims] if isinstance(dims, int) else list(dims)
    by = [1] * len(rolled) if shifts is None else [shifts] if isinstance(shifts, int) else shifts
    shape = call.operands[0].shape
    if any(n % max(1, shape[d]) == 0 for d, n in zip(rolled, by, strict=False)):
        return (
            replace(found, output_orders=(None,))
            if call.operands[0].device.type == "cpu"
            else found
        )
    return in_format_of_operand(call, found)


def _dropping_dim(parse: Parse, position: int, count: int) -> Callable[[OpCall], Strategy | None]:
    """Reductions whose dim is dropped, or kept where `keepdim` says so."""

    def strategy(call: OpCall) -> Strategy | None:
        kept = bool(call.argument(position, "keepdim", False))
        return unsharded_dims_strategy(call, parse(call), ("same" if kept else "drop",) * count)

    return strategy


def _median(call: OpCall) -> Strategy | None:
    if call.argument(1, "dim") is None:
        return unsharded_dims_strategy(call, _everything(call), ("drop",))
    return _dropping_dim(dim_at(1, None), 2, 2)(call)


def _quantile(call: OpCall) -> Strategy | None:
    """`quantile(x, q, dim, keepdim)`: a vector `q` makes a first dim."""
    if len(call.operands) > 2:
        return None
    # A quantile is between two elements of the sorted dim: no reduction of shards gives it.
    ranks = [operand.ndim for operand in call.operands[1:]]
    front = " front" * sum(ranks)
    dim = call.argument(2, "dim")
    kept = bool(call.argument(3, "keepdim", False))
    dims = _everything(call) if dim is None else dim
    found = unsharded_dims_strategy(
        call,
        dims,
        (("same" if kept else "drop") + front,),
        others=lambda _: [(None,) * n for n in ranks],
    )
    # Torch computes several quantiles as a last dim and moves it to the front.
    return _pad_empty_operand(
        replace(found, probe_order="real") if found is not None and front else found
    )


def _pad_empty_operand(strategy: Strategy | None) -> Strategy | None:
    """For functions that refuse empty tensors: an empty shard gets one slice of zeros.

    The slice is removed from the result, whose dims tell of which dim of the operand they are.
    """
    if strategy is None:
        return None
    (sources,) = strategy.extents  # per dim of the result, the dim of operand 0 that it is

    def local(context: LocalContext, args: Any, kwargs: Any) -> Any:
        x: Tensor = args[0]
        # Depends on the rank: nothing from here on may communicate.
        if x.numel() or not context.call.operands[0].numel():
            return context.call.func(*args, **kwargs)
        padded = pad_empty_dims(x, [d for d in range(x.ndim) if not x.shape[d]], 0)
        result = context.call.func(padded, *args[1:], **kwargs)
        for dim, source in enumerate(sources):
            if source is not None and not x.shape[source[1]]:
                # Of the result, so that backward reaches the operand on this rank too; no view.
                result = result.narrow(dim, 0, 0).clone()
        return result

    def bind(context: LocalContext) -> Callable[..., Any] | None:
        # Decided once for these shapes: a rank whose shard is not empty pays nothing at each call.
        shape = tuple(context.call.operands[0].shape)
        return context.call.func if 0 not in local_shape(context.input_layout(0), shape) else None

    return replace(strategy, local=local, specialize=bind)


def _difference(call: OpCall) -> Strategy | None:
    """`diff(x, n, dim, prepend, append)`: `prepend` and `append` have the operand's letters."""
    dim = call.argument(2, "dim", -1)
    if not call.operands[0].numel():
        return None  # torch returns an empty operand itself, as the same object
    return unsharded_dims_strategy(
        call, dim, _SAME, others=lambda own: [own] * (len(call.operands) - 1)
    )


def _trapezoid(call: OpCall) -> Strategy | None:
    """`trapezoid(y, x, dim)`: `x` has one place per index of the dim, or one per element."""
    ranks = [operand.ndim for operand in call.operands]
    if len(ranks) > 2:
        return None
    shapes = call.shapes()
    # Shapes are compared globally: an `x` that does not fit is torch's error on every rank.
    if len(ranks) == 2 and ranks[1] != 1 and not _goes_with(shapes[1], shapes[0]):
        return None
    dim = call.argument(2, "dim", -1)
    kind = "same" if call.func.__name__.startswith("cumulative") else "drop"

    def places(own: Dims) -> list[Dims]:
        if len(ranks) == 1 or ranks[0] != ranks[1]:
            # One place per index of the dim: every rank has the full dim, so it needs all places.
            return [(None,)] * (len(ranks) - 1)
        pairs = zip(own, *shapes, strict=True)
        return [tuple(letter if n == m else None for letter, n, m in pairs)]

    return unsharded_dims_strategy(call, dim, (kind,), others=places)


def _goes_with(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether an operand of this shape can be broadcast to the other, with as many dims."""
    same = len(shape) == len(other)
    return same and all(n in (1, m) for n, m in zip(shape, other, strict=True))


def _triangle(call: OpCall) -> Strategy | None:
    """`tril`, `triu`: the last two dims make the triangle."""
    return (
        unsharded_dims_strategy(call, (-2, -1), ("same",), linear=True)
        if call.operands[0].ndim > 1
        else None
    )


def _diagonal(call: OpCall) -> Strategy | None:
    """`diagonal(offset, dim1, dim2)`: the diagonal is a last dim."""
    far = call.func.__name__.startswith("linalg")  # whose defaults are the last two dims
    first = call.argument(2, "dim1", -2 if far else 0)
    second = call.argument(3, "dim2", -1 if far else 1)
    found = unsharded_dims_strategy(call, (first, second), ("drop back",), linear=True)
    # A diagonal of the first dims takes longer steps than what is beside it.
    return found and replace(found, probe_order="meta")


def _matrix_of(call: OpCall) -> Strategy | None:
    """`diag`: of a vector a matrix, of a matrix its diagonal."""
    if call.operands[0].ndim == 1:
        return unsharded_dims_strategy(call, 0, ("drop back back",), linear=True)
    return unsharded_dims_strategy(call, (0, 1), ("drop back",), linear=True)


def _embedded(call: OpCall) -> Strategy | None:
    """`diag_embed(offset, dim1, dim2)`: the last dim becomes the diagonal of two."""
    ndim = call.operands[0].ndim
    pair = call.argument(2, "dim1", -2), call.argument(3, "dim2", -1)
    # Counted in the result, which has one dim more.
    places = {wrap_dim(d, ndim + 1) for d in pair}
    if None in places:
        return None
    rest = iter(range(ndim - 1))
    result = tuple(None if d in places else next(rest) for d in range(ndim + 1))
    operand = (*range(ndim - 1), None)
    strategy = Signature((operand,), (result,), linear=((0,),)).strategy()
    return offer_reshard(call, strategy) if len(places) == 2 else None


def _matrix_norm(call: OpCall) -> Strategy | None:
    dims = call.argument(2, "dim", (-2, -1))
    kept = bool(call.argument(3, "keepdim", False))
    order = call.argument(1, "ord", "fro")
    if isinstance(order, torch.Tensor) or call.kwargs.get("dtype") is not None:
        return None
    return unsharded_dims_strategy(call, dims, ("same" if kept else "drop",))


def _repeated(call: OpCall) -> Strategy | None:
    """`repeat(*sizes)`: dims that are repeated once may be sharded; new ones come in front."""
    given = call.args[1:] or (call.kwargs.get("repeats", ()),)
    sizes = tuple(given[0]) if given and not isinstance(given[0], int) else tuple(given)
    ndim = call.operands[0].ndim
    more = len(sizes) - ndim
    if more < 0 or not ndim or any(not isinstance(n, int) for n in sizes):
        return None
    # A repeated shard would have its copies side by side, where the global tensor has them apart.
    often = [d for d in range(ndim) if sizes[more + d] != 1]
    return unsharded_dims_strategy(
        call, often, (" ".join(["same", *["front"] * more]),), linear=True
    )


def _mode(call: OpCall) -> Strategy | None:
    return None if is_refused(call) else _dropping_dim(_LAST, 2, 2)(call)


_SAME, _PAIR = ("same",), ("same", "same")
_LAST = dim_at(1, -1)
# Names -> their strategy: of most, which dims are not sharded, the dims of the results, and whether
# partials stay partial.
_TABLE: dict[str, Callable[[OpCall], Strategy | None]] = {
    "flip": _strategy(_flipped, _SAME, linear=True),
    "fliplr": _strategy(lambda _: 1, _SAME, linear=True),
    "flipud": _strategy(lambda _: 0, _SAME, linear=True),
    "roll": _strategy(_rolled, _SAME, linear=True),
    "rot90": _strategy(dim_at(2, (0, 1), "dims"), _SAME, linear=True),
    "msort": _strategy(lambda _: 0, _SAME),
    "sort": _strategy(_sorted, _PAIR),
    "argsort": _strategy(_sorted, _SAME),
    "renorm renorm_": _strategy(_all_dims_but, _SAME),
    # Not linear: partial sums would each be padded, and the padding value be added once per rank.
    "pad constant_pad_nd": _strategy(_padded, _SAME),
    "vander": _strategy(lambda _: -1, ("same back",)),
    "fft ifft rfft irfft hfft ihfft": _strategy(dim_at(2, -1), _SAME, linear=True),
    "fft2 ifft2 rfft2 irfft2 hfft2 ihfft2": _strategy(dim_at(2, (-2, -1)), _SAME, linear=True),
    "fftn ifftn rfftn irfftn hfftn ihfftn": _strategy(_of_fourier, _SAME, linear=True),
    "fftshift ifftshift": _strategy(_all_if_none(1), _SAME, linear=True),
    "diff": _difference,
    "trapezoid trapz cumulative_trapezoid": _trapezoid,
    "kthvalue": _dropping_dim(dim_at(2, -1), 3, 2),
    "mode": _mode,
    "median nanmedian": _median,
    "quantile nanquantile": _quantile,
    "tril triu tril_ triu_": _triangle,
    "diag": _matrix_of,
    "diag_embed": _embedded,
    "matrix_norm": _matrix_norm,
    "repeat": _repeated,
}
_READS = Reads.NUMBERS | Reads.SHAPES


def _written_diagonal(func: Callable[..., Any]) -> Callable[..., Any]:
    """The diagonal of a sharded matrix is a copy; what is written to it goes into the matrix."""

    def run(input: Any, *args: Any, **kwargs: Any) -> Any:
        found = run_by_rule(func, (input, *args), kwargs)
        give_way_back(
            found,
            input,
            lambda: lambda values: torch.diagonal_scatter(input, values, *args, **kwargs),
        )
        return found

    return run


HANDLERS: dict[Any, Callable[..., Any]] = {
    f: _written_diagonal(f) for f in (torch.diagonal, torch.Tensor.diagonal)
}
"""Functions this module answers for."""

_unfold = _strategy(dim_at(1, None, "dimension"), ("same back",), linear=True)
_VIEWS = {"diagonal": _diagonal, "unfold": _unfold}


def _writes(func: Any) -> int | None:
    return 0 if func.__name__.endswith("_") else None


RULES = {
    **{
        f: Rule(names.split()[0], strategy, _READS, writes=_writes(f))
        for names, strategy in _TABLE.items()
        for f in functions(names, _PLACES)
    },
    **{
        # `F.unfold` is another function: it has a rule among the image functions.
        f: Rule(name, strategy, _READS, views=True)
        for name, strategy in _VIEWS.items()
        for f in functions(name, (torch, torch.Tensor, torch.linalg))
    },
}
