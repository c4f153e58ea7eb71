"""Normalisation over trailing dims: leading dims may be split."""

from __future__ import annotations

from vescale_dtensor._call import Call
from vescale_dtensor._plan import Rule
from vescale_dtensor._rules._names import functions
from vescale_dtensor._strategy import Dims, Signature, Strategy


def _trailing(call: Call) -> Strategy | None:
    shape = call.argument(1, "normalized_shape")
    ndim = call.operands[0].ndim
    trailing = len(tuple(shape))
    dims: Dims = tuple(range(ndim))
    fixed = frozenset(dims[ndim - trailing :])
    parameters = tuple(dims[ndim - trailing :] for _ in call.operands[1:])
    return Signature((dims, *parameters), (dims,), fixed=fixed).strategy()


RULES = {f: Rule("layer_norm", _trailing) for f in functions("layer_norm rms_norm")}
