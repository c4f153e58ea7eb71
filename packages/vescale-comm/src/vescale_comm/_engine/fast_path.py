"""Fast path: a call like one that was checked before goes straight to torch.

What is checked and planned for a call depends on the group, the dtype, the device and the op only.
Once that combination is known to travel as it is, a call is an allocation and torch's own function.
Not for tensors with a gradient, nor while a hook, a torch function mode or a tracer watches.
"""

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import has_torch_function_unary

from vescale_comm._engine.annotated_groups import AnnotatedGroup
from vescale_comm._engine.direct_exchange import (
    PairSum,
    folded,
    gathers,
    is_small,
    start_exchange,
    start_gather,
)
from vescale_comm._engine.failures import failure
from vescale_comm._engine.hooks import hooks
from vescale_comm._engine.log_events import record_fast
from vescale_comm._engine.primitives import (
    Barrier,
    Primitive,
    all_gather_single,
    reduce_scatter_single,
)
from vescale_comm._groups.group import Group
from vescale_comm._torch.compat import being_traced, dispatch_modes
from vescale_comm._wire.backend_dtypes import BACKEND_DTYPES


def note_checked(op: str, x: Tensor, group: Group) -> None:
    """Remember that tensors like `x` pass the checks of `op` and travel as they are."""
    # Any other dtype travels as bytes, which is a step that the fast path does not have.
    if x.dtype in BACKEND_DTYPES:
        group._known[op, x.dtype, x.device] = True


def is_fast(op: str, x: Any, group: Group) -> bool:
    """Return whether `x` is contiguous, has no gradient, and is like one that was checked."""
    return (
        type(x) is Tensor
        and not x.requires_grad
        and not hooks
        and (op, x.dtype, x.device) in group._known
        and x.layout is torch.strided
        and x.dim() > 0
        and x.is_contiguous()
        and not x.is_neg()
        and not has_torch_function_unary(None)  # a mode that records sees collectives
        # Asked as well: in a backward no torch function mode is active. `x` itself is no tracer's.
        and not (dispatch_modes() and being_traced(x))
    )


def is_fast_send(x: Any, target: Any, group: Group) -> bool:
    """`is_fast`, of a message to a member that was checked as well."""
    return is_fast_message("send", x, target, group) and x.is_contiguous() and not x.is_neg()


def is_fast_message(op: str, x: Any, member: Any, group: Group) -> bool:
    """Whether messages like `x` were checked with a member; of "recv", whatever its strides are."""
    return (
        type(x) is Tensor
        and not x.requires_grad
        and not hooks
        and (op, member, x.dtype, x.device) in group._known
        and x.layout is torch.strided
        and x.numel() > 0  # of nothing there is no message
        and not has_torch_function_unary(None)
        and not (dispatch_modes() and being_traced(x))
    )


def note_message(op: str, x: Tensor, member: int, group: Group) -> None:
    """Remember that tensors like `x` travel to or from a member as they are, by one call."""
    # Other backends start lists of messages. A simulated group is told words around each call.
    simulated = isinstance(group.process_group, AnnotatedGroup)
    is_gloo = group.backends.get(x.device.type) == "gloo"
    if is_gloo and not simulated and x.dtype in BACKEND_DTYPES:
        group._known[op, member, x.dtype, x.device] = True


class StartedMessage:
    """A message to or from one member; `finish` waits.

    Args:
        op: "send" or "recv".
        x: what is sent, contiguous, or the memory that is filled.
        member: the other one, counted within the group.
        group: of both.
    """

    __slots__ = ("_group", "_op", "_work", "_x")

    def __init__(self, op: str, x: Tensor, member: int, group: Group) -> None:
        # Kept until it is over: a backend that uses freed memory would not say so.
        self._op, self._x, self._group = op, x, group
        process_group = group.process_group
        try:
            if op == "send":
                self._work = process_group.send([x], member, 0)
            else:
                self._work = process_group.recv([x], member, 0)
        except (RuntimeError, ValueError) as error:
            raise failure(_described(op, x, group), error) from error

    def finish(self) -> Tensor:
        """Wait, and return the memory."""
        try:
            _wait(self._work)
        except (RuntimeError, ValueError) as error:
            raise failure(_described(self._op, self._x, self._group), error) from error
        return self._x


def fast_all_reduce(
    x: Tensor,
    group: Group,
    options: Any,
    divisor: int | None,
    paired: bool,
    *,
    in_graph: bool = False,
    owned: bool = False,
) -> Tensor:
    """All-reduces a copy of `x`, or `x` if it is `owned`, and divides it in place.

    `options` are torch's; `paired`: two members may send each other what they have.
    """
    if group._log is not None:
        record_fast(group._log, "all_reduce", x, x.numel(), in_graph=in_graph)
    try:
        if paired and is_small(x):
            own = x.contiguous()
            target = own if owned else None
            out = PairSum(group.process_group, own, group.rank, target).finish()
        else:
            out = x if owned else x.clone(memory_format=torch.contiguous_format)
            _wait(group.process_group.allreduce([out], options))
    except (RuntimeError, ValueError) as error:
        raise failure(_described("all_reduce", x, group), error) from error
    return out if divisor is None else out.div_(divisor)


# Past the wrappers that time and log every call of torch.distributed: half of what one costs.
# Older versions of torch have these methods under private names only.
_gather: Any = getattr(dist.ProcessGroup, "all_gather_single", None)
_scatter: Any = getattr(dist.ProcessGroup, "reduce_scatter_single", None)
# Shared and never changed: making one costs as much as the rest of a small call. Those of calls
# that are waited for at once say so: NCCL then runs them on the current stream.
_SUM, _SUM_NOW = dist.ReduceScatterOptions(), dist.ReduceScatterOptions()
_SUM_NOW.asyncOp = False


def fast_all_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Gather equal shards along a dim; if that is not 0, with one copy."""
    shape = x.shape
    if group._log is not None:
        record_fast(group._log, "all_gather", x, group.size * x.numel())
    out = x.new_empty((group.size * shape[0], *shape[1:]))
    try:
        if group._has_gloo and gathers(group.backends.get(x.device.type), out):
            start_gather(group.process_group, out, x, group.rank, group.size).wait()
        elif _gather is None:
            all_gather_single(out, x, group=group.process_group)
        else:
            _wait(group.process_group.all_gather_single(out, x))
    except (RuntimeError, ValueError) as error:
        raise failure(_described("all_gather", x, group), error) from error
    if dim == 0:
        return out
    if prod(shape[:dim]) == 1:  # the members' shards follow one another in memory
        return out.view(*shape[:dim], group.size * shape[dim], *shape[dim + 1 :])
    return torch.cat(out.view(group.size, *shape).unbind(), dim)


class StartedGather:
    """Gathers equal shards along dim 0 into memory of the caller; `finish` waits.

    Args:
        out: contiguous, of the dtype and on the device of `x`.
        x: this rank's shard.
        group: of the ranks.
        async_op: whether this rank goes on meanwhile.
    """

    __slots__ = ("_group", "_out", "_work", "_x")

    def __init__(self, out: Tensor, x: Tensor, group: Group, *, async_op: bool) -> None:
        if group._log is not None:
            numel = group.size * x.numel()
            record_fast(group._log, "all_gather", x, numel, together=not async_op)
        # Both are kept until it is over: a backend that reads freed memory would not say so.
        self._out, self._x, self._group = out, x, group
        try:
            if gathers(group.backends.get(x.device.type), out):
                self._work = start_gather(group.process_group, out, x, group.rank, group.size)
            elif _gather is None:
                self._work = all_gather_single(out, x, group=group.process_group, async_op=async_op)
            else:
                self._work = group.process_group.all_gather_single(out, x)
        except (RuntimeError, ValueError) as error:
            raise failure(_described("all_gather", x, group), error) from error

    def finish(self) -> Tensor:
        """Wait, and return the memory that was filled."""
        try:
            if self._work is not None:
                self._work.wait()
        except (RuntimeError, ValueError) as error:
            raise failure(_described("all_gather", self._x, self._group), error) from error
        return self._out


def fast_reduce_scatter(x: Tensor, group: Group, dim: int = 0, *, mean: bool = False) -> Tensor:
    """Reduce and scatter equal shards along a dim; if that is not 0, with one copy."""
    result = None
    if dim and prod(x.shape[:dim]) == 1:  # the members' shards follow one another in memory
        result = (*x.shape[:dim], x.shape[dim] // group.size, *x.shape[dim + 1 :])
        x = x.flatten(0, dim)
    elif dim:
        x = torch.cat(x.tensor_split(group.size, dim))
    shape = x.shape
    if group._log is not None:
        record_fast(group._log, "reduce_scatter", x, x.numel())
    out = x.new_empty((shape[0] // group.size, *shape[1:]))
    try:
        if _scatter is None:
            reduce_scatter_single(out, x, group=group.process_group)
        else:
            _wait(group.process_group.reduce_scatter_single(out, x, _SUM_NOW))
    except (RuntimeError, ValueError) as error:
        raise failure(_described("reduce_scatter", x, group), error) from error
    if mean:
        out.div_(group.size)
    return out if result is None else out.view(result)


class StartedScatter:
    """Reduces and scatters equal shards along dim 0, while this rank goes on; `finish` waits.

    Args:
        x: this rank's contribution.
        group: of the ranks.
        mean: whether the sum is divided by their number.
    """

    __slots__ = ("_group", "_mean", "_out", "_work", "_x")

    def __init__(self, x: Tensor, group: Group, *, mean: bool) -> None:
        if group._log is not None:
            record_fast(group._log, "reduce_scatter", x, x.numel(), together=False)
        # Both are kept until it is over: a backend that reads freed memory would not say so.
        self._x, self._group, self._mean = x, group, mean
        self._out = out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
        try:
            if _scatter is None:
                self._work = reduce_scatter_single(out, x, group=group.process_group, async_op=True)
            else:
                self._work = group.process_group.reduce_scatter_single(out, x, _SUM)
        except (RuntimeError, ValueError) as error:
            raise failure(_described("reduce_scatter", x, group), error) from error

    def finish(self) -> Tensor:
        """Wait, and return this rank's shard."""
        try:
            if self._work is not None:
                self._work.wait()
        except (RuntimeError, ValueError) as error:
            raise failure(_described("reduce_scatter", self._x, self._group), error) from error
        return self._out.div_(self._group.size) if self._mean else self._out


class StartedFold:
    """As `StartedScatter`, by one exchange; members are added up first to last, when it is there.

    Args:
        x: this rank's contribution, in float32 or float64.
        group: of the ranks.
        mean: whether the sum is divided by their number.
        async_op: whether this rank goes on meanwhile.
    """

    __slots__ = ("_group", "_mean", "_rows", "_work", "_x")

    def __init__(self, x: Tensor, group: Group, *, mean: bool, async_op: bool) -> None:
        if group._log is not None:
            # In the words of the other path, which another member may take.
            group._log.record(("all_to_all", x.dtype), together=not async_op)
        self._x, self._group, self._mean = x, group, mean
        self._rows = rows = x.new_empty((group.size, x.shape[0] // group.size, *x.shape[1:]))
        try:
            own, arriving = x.view(-1), rows.view(-1)
            self._work = start_exchange(group.process_group, arriving, own, group.size)
        except (RuntimeError, ValueError) as error:
            raise failure(_described("reduce_scatter", x, group), error) from error

    def finish(self) -> Tensor:
        """Wait, add up, and return this rank's shard."""
        try:
            self._work.wait()
        except (RuntimeError, ValueError) as error:
            raise failure(_described("reduce_scatter", self._x, self._group), error) from error
        total = folded(self._rows.unbind())
        return total.div_(self._group.size) if self._mean else total


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _described(op: str, x: Tensor, group: Group) -> Primitive:
    return Barrier(op, group, 0, x)
