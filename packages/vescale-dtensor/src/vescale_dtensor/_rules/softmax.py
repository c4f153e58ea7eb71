"""Ops that look along one dim and keep the shape: every other dim may be split."""

from __future__ import annotations

from vescale_dtensor._call import Call
from vescale_dtensor._plan import Rule
from vescale_dtensor._rules._names import functions
from vescale_dtensor._strategy import Signature, Strategy


def _along(call: Call) -> Strategy | None:
    dim = call.argument(1, "dim")
    ndim = call.operands[0].ndim
    if not isinstance(dim, int) or len(call.operands) != 1 or ndim == 0:
        return None
    dims = tuple(range(ndim))
    return Signature((dims,), (dims,), fixed=frozenset({dim % ndim})).strategy()


def _sorted(call: Call) -> Strategy | None:
    """`sort` and `topk`-like: values and indices, along a dim that is the last by default."""
    ndim = call.operands[0].ndim
    dim = call.argument(1, "dim", -1)
    if not isinstance(dim, int) or isinstance(dim, bool) or len(call.operands) != 1 or ndim == 0:
        return None
    dims = tuple(range(ndim))
    return Signature((dims,), (dims, dims), fixed=frozenset({dim % ndim})).strategy()


def _triangle(call: Call) -> Strategy | None:
    """`tril`/`triu`: the last two dims make the triangle."""
    ndim = call.operands[0].ndim
    dims = tuple(range(ndim))
    return Signature((dims,), (dims,), fixed=frozenset(dims[-2:]), linear=((0,),)).strategy()


RULES = {
    **{
        f: Rule("softmax", _along)
        for f in functions("softmax log_softmax softmin cumsum cumprod logcumsumexp flip_")
    },
    **{f: Rule("sort", _sorted) for f in functions("sort")},
    **{f: Rule("triangle", _triangle) for f in functions("tril triu")},
}
