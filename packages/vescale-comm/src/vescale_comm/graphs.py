"""Collectives of a traced graph, carried as those of eager mode are.

A graph holds torch's functional collectives, by overload. Called in their place, with the same
arguments, these send what is small over gloo in one exchange where gloo goes round a ring; all else
they leave to the overload. Results have its bits. Members have to call the same.

    started = start_all_reduce(x, "sum", name)      # ..._c10d_functional.all_reduce(x, "sum", name)
    total = finish(started)                         # ..._c10d_functional.wait_tensor(started)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_comm._engine.direct_exchange import PairSum, gathers, is_small, start_gather, sums_pair
from vescale_comm._engine.waitable import Waitable
from vescale_comm._groups.group import as_group
from vescale_comm._torch.buffers import flattened, plain
from vescale_comm._wire.backend_dtypes import as_backend_dtype

__all__ = ["Started", "finish", "start_all_gather", "start_all_reduce"]

_ops: Any = torch.ops._c10d_functional


class _PendingGather:
    """A gather under way; what is sent is kept until it is over."""

    __slots__ = ("_out", "_work", "_x")

    def __init__(self, out: Tensor, x: Tensor, work: Waitable) -> None:
        self._out, self._x, self._work = out, x, work

    def finish(self) -> Tensor:
        """Wait, and return what was gathered."""
        self._work.wait()
        return self._out


Started = Tensor | PairSum | _PendingGather
"""A collective under way: what `finish` takes, and nothing else."""


def start_all_gather(x: Tensor, members: int, name: str) -> Started:
    """Start to concatenate the members' tensors along dim 0.

    Args:
        x: of this one, of the shape of all.
        members: of the group.
        name: of the process group.
    """
    group = as_group(name)
    if members > 1 and x.dim():
        out = x.new_empty((members * x.shape[0], *x.shape[1:]))
        if gathers(group.backends.get(x.device.type), out):
            # What gloo has no number for goes as bytes: it only has to arrive.
            own = as_backend_dtype(flattened(plain(x)))
            received = as_backend_dtype(out.view(-1))
            work = start_gather(group.process_group, received, own, group.rank, members)
            return _PendingGather(out, own, work)
    found: Tensor = _ops.all_gather_into_tensor(x, members, name)
    return found


def start_all_reduce(x: Tensor, op: str, name: str, *, owned: bool = False) -> Started:
    """Start to reduce the members' tensors, of one shape and dtype, to the same one on each.

    Args:
        x: of this one.
        op: as torch's functional collectives name it.
        name: of the process group.
        owned: whether nobody else reads `x`, or writes to it, from now on.
    """
    group = as_group(name)
    how = dist.ReduceOp.SUM if op == "sum" else None
    if sums_pair(group.backends.get(x.device.type), group.size, x.dtype, how) and is_small(x):
        # Copied, as torch's does: a graph may write to it while the collective is under way.
        own = plain(x)
        if own is x and not owned:  # else it is a copy already
            own = x.clone(memory_format=torch.contiguous_format)
        return PairSum(group.process_group, own.contiguous(), group.rank)
    found: Tensor = _ops.all_reduce(x, op, name)
    return found


def finish(started: Started) -> Tensor:
    """Wait for a collective, also for one of torch's functional ones, and return its result."""
    if isinstance(started, Tensor):
        found: Tensor = _ops.wait_tensor(started)
        return found
    return started.finish()
