"""Joining and cutting: `cat`, `stack`, `split`, `chunk`, `unbind`. Other dims may be split."""

from __future__ import annotations

from dataclasses import replace

from vescale_dtensor._call import Call, Reads
from vescale_dtensor._plan import Rule
from vescale_dtensor._rules._names import functions
from vescale_dtensor._rules.pointwise import order_of_operand
from vescale_dtensor._strategy import Dims, Signature, Strategy


def _dim(call: Call, position: int) -> int | None:
    dim = call.argument(position, "dim", call.kwargs.get("axis", 0))
    return dim if isinstance(dim, int) else None


def _cat(call: Call) -> Strategy | None:
    dim, ndim = _dim(call, 1), call.operands[0].ndim
    if dim is None or any(operand.ndim != ndim for operand in call.operands):
        return None  # torch's legacy rule for empty 1-D tensors
    joined = dim % ndim
    dims: Dims = tuple(None if d == joined else d for d in range(ndim))
    return Signature((dims,) * len(call.operands), (dims,), carries=True).strategy()


def _stack(call: Call) -> Strategy | None:
    dim, ndim = _dim(call, 1), call.operands[0].ndim
    if dim is None:
        return None
    dims: Dims = tuple(range(ndim))
    at = dim % (ndim + 1)
    result: Dims = (*dims[:at], None, *dims[at:])
    return Signature((dims,) * len(call.operands), (result,), carries=True).strategy()


def _pieces(call: Call, position: int, keeps: bool) -> Strategy | None:
    dim, ndim = _dim(call, position), call.operands[0].ndim
    if dim is None or len(call.operands) != 1:
        return None
    cut = dim % ndim
    dims: Dims = tuple(None if d == cut else d for d in range(ndim))
    result = dims if keeps else tuple(d for i, d in enumerate(dims) if i != cut)
    order = order_of_operand(call)
    if order is not None and not keeps:
        order = tuple(d - (d > cut) for d in order if d != cut)
    strategy = Signature((dims,), (result,), carries=True).strategy()
    return replace(strategy, order=(order,))


def _split(call: Call) -> Strategy | None:
    return _pieces(call, 2, keeps=True)


def _unbind(call: Call) -> Strategy | None:
    return _pieces(call, 1, keeps=False)


_READS = Reads.NUMBERS | Reads.EXTENTS
RULES = {
    **{f: Rule("cat", _cat, _READS) for f in functions("cat concat concatenate")},
    **{f: Rule("stack", _stack, _READS) for f in functions("stack")},
    **{
        f: Rule("split", _split, views=True)
        for f in functions("split chunk split_with_sizes tensor_split unsafe_chunk unsafe_split")
    },
    **{f: Rule("unbind", _unbind, views=True) for f in functions("unbind")},
}
