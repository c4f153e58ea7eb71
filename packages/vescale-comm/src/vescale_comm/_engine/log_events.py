"""Collectives as events of the execution log of their group."""

from torch import Tensor

from vescale_comm._engine.primitives import (
    AllGather,
    AllToAll,
    Barrier,
    Broadcast,
    PointToPoint,
    Primitive,
    Reduce,
    ReduceScatter,
)
from vescale_comm._watchdog.execution_log import ExecutionLog

# Between two members only: the others do not come.
_PAIRWISE = frozenset({"send", "recv"})
# Those of which no member has a result before all have arrived.
_TOGETHER = (AllGather, AllToAll, ReduceScatter, Barrier)

_IN_GRAPH = "of an input that requires a gradient"


def record_event(log: ExecutionLog, primitive: Primitive, *, together: bool) -> None:
    """Record a collective that is about to be launched.

    Args:
        log: of its group.
        primitive: what is launched.
        together: whether this rank waits for it.
    """
    if primitive.op in _PAIRWISE:
        return
    waits = isinstance(primitive, _TOGETHER) or (
        isinstance(primitive, Reduce) and primitive.root is None
    )
    words = _words(primitive)
    # Else only some of the ranks would come to the collective of the backward.
    if primitive.in_graph:
        words = (*words, _IN_GRAPH)
    log.record(words, together=together and waits)


def record_fast(
    log: ExecutionLog,
    op: str,
    x: Tensor,
    numel: int,
    *,
    in_graph: bool = False,
    together: bool = True,
) -> None:
    """Record a collective that takes the fast path, as if it took the other one.

    Which of the two it takes may differ from rank to rank, by the strides of a tensor.
    """
    mark = (_IN_GRAPH,) if in_graph else ()
    log.record((op, x.dtype, numel, *mark), together=together)


def _words(primitive: Primitive) -> tuple[object, ...]:
    """Return what is the same on all members, whichever way each of them takes here."""
    if isinstance(primitive, Reduce):
        root = () if primitive.root is None else (f"to member {primitive.root}",)
        return ("all_reduce", primitive.buffer.dtype, primitive.buffer.numel(), *root)
    if isinstance(primitive, AllGather):
        return ("all_gather", primitive.out.dtype, primitive.out.numel())
    if isinstance(primitive, ReduceScatter):
        return ("reduce_scatter", primitive.flat.dtype, sum(primitive.sizes))
    if isinstance(primitive, AllToAll):
        return ("all_to_all", primitive.flat.dtype)
    if isinstance(primitive, Broadcast):
        x = primitive.buffer
        return ("broadcast", x.dtype, x.numel(), f"from member {primitive.root}")
    if isinstance(primitive, PointToPoint):
        return (primitive.op,)
    return ("barrier",)
