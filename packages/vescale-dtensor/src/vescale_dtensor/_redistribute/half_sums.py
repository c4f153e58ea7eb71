"""Reductions over ranks of half-precision tensors: added in float32, and rounded once.

A backend adds halves in halves. On the way from rank to rank a sum may then pass 65504, the largest
number of float16, where the final sum is small: the result is inf or NaN where one device has a
number; and every addition rounds. Torch's kernels add halves in float32, so ranks do, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import current_thread
from typing import Literal, get_args

import torch
from torch import Tensor
from vescale_comm import Group, Order, all_reduce, reduce_scatter

from vescale_dtensor._errors import DTensorError
from vescale_dtensor._layout.placements import ReduceOp

HalfSums = Literal["float32", "native"]
"""How ranks add half-precision tensors: in float32, or as the backend does it."""

# The dtype in which local tensors are added, where that is not their own.
_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
# Not maxima and minima, which are one of the operands: exact in any dtype.
_ROUNDING = frozenset({"sum", "avg", "prod"})
# Below so many elements for each rank, to start a message costs more than what is in it.
_FEW = 1024

_current: ContextVar[HalfSums | None] = ContextVar("vescale_dtensor_half_sums", default=None)
# The choices of all blocks that are open, in any thread; see `half_sums_mode`.
_open: list[HalfSums] = []


@contextmanager
def half_sums(how: HalfSums) -> Iterator[None]:
    """Choose how ranks add float16 and bfloat16 tensors inside the `with` block.

    It holds for sums, averages and products over ranks that are carried out in the block, forward
    and backward, whatever asked for them: redistributions, ops, gradients. All ranks choose alike.

    Args:
        how: `"float32"`, the default: added in float32 and rounded once, as a kernel of one device
            does, in as many bytes; in twice as many where fewer than 1,024 elements for each rank
            are all-reduced, and from one reduction to the next where one call takes several.
            `"native"`: as the backend does it, which may overflow or round on the way, in one
            collective of the backend.

    Raises:
        DTensorError: there is no such way.

    Examples:
        with half_sums("native"):
            loss.backward()
            optimizer.step()
    """
    if how not in get_args(HalfSums):
        known = " and ".join(map(repr, get_args(HalfSums)))
        raise DTensorError(f"half_sums({how!r}): half-precision terms are added as {known}")
    token = _current.set(how)
    _open.append(how)
    try:
        yield
    finally:
        _open.remove(how)
        _current.reset(token)


def half_sums_mode() -> HalfSums:
    """What holds here."""
    found = _current.get()
    if found is not None or not _open:
        return found or "float32"
    # No context variable reaches the threads of autograd on CUDA, which Python did not start. They
    # add as the block that was opened last: whoever asked for the backward waits in it.
    try:
        return _open[-1] if current_thread().name.startswith("Dummy-") else "float32"
    except IndexError:  # closed by its thread a moment ago
        return "float32"


def wide_dtype(dtype: torch.dtype, op: str = "sum") -> torch.dtype | None:
    """The dtype in which tensors of `dtype` are reduced by `op`; None: in their own."""
    wide = _WIDE.get(dtype)
    return None if wide is None or op not in _ROUNDING or half_sums_mode() == "native" else wide


def reduce_over(x: Tensor, group: Group, op: ReduceOp = "sum") -> Tensor:
    """`vescale_comm.all_reduce`, of halves in float32. Differentiable."""
    wide = wide_dtype(x.dtype, op)
    if wide is None:
        return all_reduce(x, group, op=op)
    # Chosen by what all ranks share. For few elements twice the bytes cost little: they use the one
    # collective that costs least to start; many travel as they are, and are added where they come.
    if x.numel() < _FEW * group.size:
        return all_reduce(x.to(wide), group, op=op).to(x.dtype)
    return all_reduce(x, group, op=op, order="rank")


def scatter_over(
    x: Tensor, group: Group, op: ReduceOp, dim: int, sizes: Sequence[int] | None
) -> Tensor:
    """`vescale_comm.reduce_scatter`, of halves in float32. Differentiable.

    One collective of as many bytes, whatever the size: shards are added where they arrive.
    """
    order: Order = "native" if wide_dtype(x.dtype, op) is None else "rank"
    return reduce_scatter(x, group, dim=dim, sizes=sizes, op=op, order=order)
