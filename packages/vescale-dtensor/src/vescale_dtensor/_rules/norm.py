"""Normalisation over trailing dims: leading dims may be split."""

from __future__ import annotations

from vescale_dtensor._call import Call, Reads
from vescale_dtensor._plan import Rule
from vescale_dtensor._rules._names import functions, in_order
from vescale_dtensor._strategy import Dims, Signature, Strategy


def _trailing(call: Call) -> Strategy | None:
    if not in_order(call, "input normalized_shape weight bias"):
        return None
    shape = call.argument(1, "normalized_shape")
    ndim = call.operands[0].ndim
    trailing = 1 if isinstance(shape, int) else len(tuple(shape))
    if trailing > ndim:
        return None
    dims: Dims = tuple(range(ndim))
    fixed = frozenset(dims[ndim - trailing :])
    parameters = tuple(dims[ndim - trailing :] for _ in call.operands[1:])
    return Signature((dims, *parameters), (dims,), fixed=fixed).strategy()


RULES = {
    f: Rule("layer_norm", _trailing, Reads.NUMBERS | Reads.EXTENTS)
    for f in functions("layer_norm rms_norm")
}
