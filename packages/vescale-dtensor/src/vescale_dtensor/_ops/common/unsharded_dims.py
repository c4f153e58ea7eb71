"""The strategy of operations that need some dims unsharded; every other dim may be sharded.

A shard of a dim that may not be sharded is moved to another dim, or gathered: see
`reshard_offer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from vescale_dtensor._ops.common.letters import letters
from vescale_dtensor._ops.common.reshard_offer import offer_reshard
from vescale_dtensor._planning import Dims, OpCall, Signature, Strategy
from vescale_dtensor._planning.op_call import wrap_dim


def unsharded_dims_strategy(
    call: OpCall,
    dims: Iterable[int] | int | None,
    outputs: tuple[str, ...],
    linear: bool = False,
    others: Callable[[Dims], Sequence[Dims]] | None = None,
) -> Strategy | None:
    """The strategy of an op that needs these dims unsharded.

    Args:
        call: with one operand, unless `others` tells of more.
        dims: which; negative ones count from the end. None: the rule does not hold.
        outputs: per output `same` (has all dims of the operand) or `drop` (lacks the unsharded
            ones), and behind it `front` or `back` for each dim that it has besides.
        linear: whether a partial operand gives partial results.
        others: the letters of further operands, given those of the first.
    """
    ndim = call.operands[0].ndim
    if dims is None or (len(call.operands) != 1 and others is None) or not ndim:
        return None
    unsharded = {wrap_dim(d, ndim) for d in ([dims] if isinstance(dims, int) else dims)}
    if None in unsharded:
        return None
    operand = letters(ndim, unsharded)
    results = tuple(_result(operand, unsharded, kind.split()) for kind in outputs)
    groups = ((0,),) if linear else ()
    more = () if others is None else tuple(others(operand))
    return offer_reshard(call, Signature((operand, *more), results, linear=groups).strategy())


def _result(operand: Dims, unsharded: set[int | None], kind: list[str]) -> Dims:
    dims = tuple(d for i, d in enumerate(operand) if i not in unsharded or kind[0] == "same")
    return (*(None,) * kind.count("front"), *dims, *(None,) * kind.count("back"))
