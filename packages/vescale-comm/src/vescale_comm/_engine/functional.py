"""Primitives as torch's functional collectives, which tracers record and compilers understand.

Functional collectives take and return values, so that a graph of them can be partitioned,
reordered and run again. An ordinary launch writes into memory and hands torch a process group,
neither of which a graph holds.
"""

from collections.abc import Sequence
from functools import singledispatch
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_comm._engine.primitives import (
    AllGather,
    AllToAll,
    Broadcast,
    PointToPoint,
    Primitive,
    Reduce,
    ReduceScatter,
)
from vescale_comm._errors import CommArgumentError
from vescale_comm._wire.backend_dtypes import as_backend_dtype

_NAMES = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}


def all_equal(sizes: Sequence[int]) -> bool:
    """Return whether all parts are of one size; sizes may be symbols, which have no hash."""
    return all(size == sizes[0] for size in sizes)


@singledispatch
def functional(primitive: Primitive) -> list[Tensor]:
    """Return new tensors that hold what `primitive.written()` would, in their order.

    Where that is nothing, it returns an empty tensor: see `depending_on`.

    Raises:
        CommArgumentError: torch has no functional form of it.
    """
    raise CommArgumentError(
        f"{primitive.op} cannot be traced: torch has no functional form of it. Call it outside of "
        "what is compiled"
    )


@functional.register
def _reduce(primitive: Reduce) -> list[Tensor]:
    # Torch has none to one member only. The others have a result, too, and do not use it.
    return [_waited("all_reduce", primitive, primitive.buffer, _NAMES[primitive.how])]


@functional.register
def _gather(primitive: AllGather) -> list[Tensor]:
    sizes, flat = primitive.sizes, primitive.flat
    if all_equal(sizes):
        found = _waited(
            "all_gather_into_tensor", primitive, as_backend_dtype(flat), primitive.group.size
        )
        # Sent as bytes where no backend has the dtype; the caller gets its own dtype back.
        return [found.view(flat.dtype)]
    # In unequal parts only an all-to-all gathers; it takes its input repeated for each member.
    own = (flat.numel(),) * primitive.group.size
    return [_exchanged(primitive, flat.repeat(primitive.group.size), own, sizes)]


@functional.register
def _scatter(primitive: ReduceScatter) -> list[Tensor]:
    sizes, flat, members = primitive.sizes, primitive.flat, primitive.group.size
    # Torch's functional form takes equal parts only; padding what is reduced changes none of it.
    width = max(sizes)
    if not all_equal(sizes):
        starts = [0, *accumulate(sizes)]
        parts = [flat.narrow(0, at, n) for at, n in zip(starts, sizes, strict=False)]
        flat = torch.cat([torch.constant_pad_nd(x, [0, width - x.numel()]) for x in parts])
    found = _waited("reduce_scatter_tensor", primitive, flat, _NAMES[primitive.how], members)
    return [found.narrow(0, 0, sizes[primitive.group.rank])]


@functional.register
def _exchange(primitive: AllToAll) -> list[Tensor]:
    return [_exchanged(primitive, primitive.flat, primitive.send, primitive.receive)]


@functional.register
def _spread(primitive: Broadcast) -> list[Tensor]:
    found = _waited("broadcast", primitive, as_backend_dtype(primitive.buffer), primitive.root)
    return [found.view(primitive.buffer.dtype)]


@functional.register
def _transfer(primitive: PointToPoint) -> list[Tensor]:
    if primitive.op in ("send", "recv"):  # of two members, where a functional collective is of all
        return functional.dispatch(Primitive)(primitive)
    send, receive = primitive.traffic()
    # An all-to-all takes one buffer, ordered by member. The sort is stable: several tensors to one
    # member stay in the order of sending.
    leaving = [x for x, _ in sorted(primitive.sends, key=lambda each: each[1])]
    like = [*leaving, *primitive.written(), primitive.x][0]
    assert like is not None
    flat = torch.cat(leaving) if leaving else like.new_empty(0)
    arrived = _exchanged(primitive, flat, tuple(send), tuple(receive))
    starts = [0, *accumulate(receive)]
    found = [arrived.narrow(0, starts[m], receive[m]) for _, m in primitive.receives]
    # Who receives nothing still has something that depends on the call: see `depending_on`.
    return found or [arrived]


def _exchanged(primitive: Primitive, flat: Tensor, send: Any, receive: Any) -> Tensor:
    wire = as_backend_dtype(flat)
    # Sizes count elements; a dtype that travels as bytes has `element_size` of them each.
    width = 1 if wire.dtype == flat.dtype else flat.element_size()
    incoming, outgoing = ([width * size for size in sizes] for sizes in (receive, send))
    return _waited("all_to_all_single", primitive, wire, incoming, outgoing).view(flat.dtype)


def _waited(name: str, primitive: Primitive, x: Tensor, *args: Any) -> Tensor:
    ops: Any = torch.ops._c10d_functional
    group = primitive.group.process_group.group_name
    # Waited for at once: in a graph the compiler decides where the wait stands.
    found: Tensor = ops.wait_tensor(getattr(ops, name)(x, *args, group))
    return found
