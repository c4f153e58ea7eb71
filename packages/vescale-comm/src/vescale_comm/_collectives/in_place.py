"""Collectives into memory that the caller owns. No gradients: what they write has no history."""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from vescale_comm._collectives.all_gather import all_gather, plan_all_gather
from vescale_comm._collectives.all_reduce import all_reduce, plan_all_reduce
from vescale_comm._collectives.broadcast import broadcast
from vescale_comm._collectives.reduce_scatter import plan_reduce_scatter, reduce_scatter
from vescale_comm._engine.autograd import needs_gradient
from vescale_comm._engine.fast_path import StartedGather, is_fast, note_checked
from vescale_comm._engine.handles import Pending, identity
from vescale_comm._engine.operators import FinishedHandle
from vescale_comm._engine.primitives import AllGather, Reduce, Steps
from vescale_comm._engine.runner import StartedCollective, complete
from vescale_comm._errors import CommArgumentError
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._torch.buffers import flattened, nbytes, plain
from vescale_comm._wire.fold import Order
from vescale_comm._wire.formats import Wire
from vescale_comm._wire.reduction import reduction


def all_reduce_(
    x: Tensor,
    group: GroupLike = None,
    *,
    op: str = "sum",
    order: Order = "native",
    wire: Wire | None = None,
    async_op: bool = False,
) -> Any:
    """Like `all_reduce`, into `x`, which is contiguous; without a copy where the backend reduces.

    Returns:
        `x`, or a `Pending` handle of it.
    """
    _check("all_reduce_", x, x)
    if is_compiling():
        return _stored(x, all_reduce(x, group, op=op, order=order, wire=wire), async_op)
    group = as_group(group)
    # Planned in every case, for the checks; carried out only where elements are encoded or folded.
    collective = plan_all_reduce(x, group, op, order, wire)
    how = reduction(op, x.dtype, group.backends[x.device.type], order)
    if group.size == 1:
        return _run("all_reduce_", _nothing(x), async_op)
    if how.plain and wire is None:
        # Right in the caller's memory: what these functions are for.
        return _run("all_reduce_", _reduce(x, group, op, how.backend_op, how.mean), async_op)
    return _run("all_reduce_", _copied(x, collective.steps(x.detach())), async_op)


def broadcast_(x: Tensor, group: GroupLike = None, *, source: int = 0) -> Tensor:
    """Like `broadcast`, into `x`, which is contiguous. Returns `x`."""
    _check("broadcast_", x, x)
    # The copy is of the result, so the source's memory is only ever read.
    x.detach().copy_(broadcast(x.detach(), group, source=source))
    return x


def all_gather_into_tensor(
    out: Tensor,
    x: Tensor,
    group: GroupLike = None,
    *,
    sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> Any:
    """Like `all_gather` along dim 0, into `out`, which is contiguous and not copied.

    Returns:
        `out`, or a `Pending` handle of it.
    """
    if is_compiling():
        _check("all_gather_into_tensor", out, x)
        return _stored(out, all_gather(x, group, sizes=sizes), async_op)
    if type(group) is not Group:
        _check("all_gather_into_tensor", out, x)
        group = as_group(group)
    # Before all checks, which take longer: what is taken here passes them.
    if sizes is None and is_fast("all_gather", x, group) and _fits(out, x, group):
        started = StartedGather(out, x, group, async_op=async_op)
        return (
            Pending("all_gather_into_tensor", started, identity) if async_op else started.finish()
        )
    _check("all_gather_into_tensor", out, x)
    # Planned only to check the arguments and to learn the sizes; the gather below writes to `out`.
    plan = plan_all_gather(x, group, 0, sizes)
    _check_shape("all_gather_into_tensor", out, x, (sum(plan.sizes), *x.shape[1:]))
    note_checked("all_gather", x, group)
    return _run("all_gather_into_tensor", _gather(out, x, group, plan.sizes), async_op)


def reduce_scatter_tensor(
    out: Tensor,
    x: Tensor,
    group: GroupLike = None,
    *,
    sizes: Sequence[int] | None = None,
    op: str = "sum",
    order: Order = "native",
    wire: Wire | None = None,
    async_op: bool = False,
) -> Any:
    """Like `reduce_scatter` along dim 0, into `out`, which is contiguous.

    Returns:
        `out`, or a `Pending` handle of it.
    """
    _check("reduce_scatter_tensor", out, x)
    if is_compiling():
        how: Any = {"sizes": sizes, "op": op, "order": order, "wire": wire}
        return _stored(out, reduce_scatter(x, group, **how), async_op)
    group = as_group(group)
    plan = plan_reduce_scatter(x, group, 0, sizes, op, order, wire)
    # The plan has refused an extent that equal parts do not divide.
    own = x.shape[0] // group.size if sizes is None else sizes[group.rank]
    _check_shape("reduce_scatter_tensor", out, x, (own, *x.shape[1:]))
    # A member's result is smaller than what is reduced, so `out` cannot serve as the buffer.
    steps = _nothing(x) if group.size == 1 else plan.steps(plain(x.detach()))
    return _run("reduce_scatter_tensor", _copied(out, steps), async_op)


def _stored(out: Tensor, result: Tensor, async_op: bool) -> Any:
    """Return what a compiler is given: a value, and where to write it."""
    out.detach().copy_(result.view(out.shape))
    return FinishedHandle(out) if async_op else out


def _run(name: str, steps: Steps[Tensor], async_op: bool) -> Any:
    # Never through `autograd`: `_check` has refused whatever a graph would have to know of.
    return Pending(name, StartedCollective(steps), identity) if async_op else complete(steps)


def _fits(out: Tensor, x: Tensor, group: Group) -> bool:
    """Whether memory of which `_check` has nothing to say takes equal shards like `x` as is."""
    return (
        group.size > 1
        and type(out) is Tensor
        and (out.dtype, out.device) == (x.dtype, x.device)
        and out.shape == (group.size * x.shape[0], *x.shape[1:])
        and not out.requires_grad
        and out.is_contiguous()
        and not (out.is_neg() or out.is_conj())
    )


def _nothing(x: Tensor) -> Steps[Tensor]:
    # Makes this a generator: one that sends nothing and returns at its first step.
    yield from ()
    return x


def _reduce(x: Tensor, group: Group, op: str, native: Any, mean: bool) -> Steps[Tensor]:
    sent = 2 * nbytes(x) * (group.size - 1) // group.size
    # Written through a detached alias, so that autograd does not see a write to a leaf; its version
    # counter is the same, and tensors saved for a backward are still found changed.
    own = x.detach()
    (total,) = yield Reduce("all_reduce", group, sent, x, own, native, detail=op)
    if total is not own:  # a tracer keeps values, and no memory
        own.copy_(total)
    elif not x.is_inference():  # those have no version counter
        # A backend writes without counting, and a graph that saved `x` would use what is there now.
        increment_version(x)
    if mean:
        own.div_(group.size)
    return x


def _gather(out: Tensor, x: Tensor, group: Group, sizes: tuple[int, ...]) -> Steps[Tensor]:
    each = prod(x.shape[1:])
    flat, target = flattened(plain(x.detach())), flattened(out.detach())
    if group.size == 1:
        target.copy_(flat)
        return out
    numels = tuple(each * size for size in sizes)
    sent = (group.size - 1) * nbytes(flat)
    (filled,) = yield AllGather("all_gather", group, sent, x, flat, target, numels)
    # A tracer returns new values and leaves `target` as it was.
    if filled is not target:
        target.copy_(filled)
    return out


def _copied(out: Tensor, steps: Steps[Tensor]) -> Steps[Tensor]:
    out.detach().copy_((yield from steps))
    return out


def _check(op: str, out: Tensor, x: Tensor) -> None:
    for each in (out, x):
        if not isinstance(each, Tensor):
            raise CommArgumentError(f"{op} takes tensors, not {type(each).__name__}")
    if not is_compiling() and (out.is_conj() or out.is_neg()):
        raise CommArgumentError(
            f"{op}: the output is a conjugated or negated view, whose memory is not its values: "
            "pass out.resolve_conj().resolve_neg()"
        )
    # A backend writes contiguous memory. A temporary would work, but hides the copy that these
    # functions exist to avoid.
    if not out.is_contiguous():
        raise CommArgumentError(
            f"{op}: the output is not contiguous (shape {tuple(out.shape)}, strides "
            f"{out.stride()}): pass a contiguous one, or use the function that returns a new tensor"
        )
    # A write that autograd does not see would leave a wrong gradient behind, silently.
    if needs_gradient(out) or needs_gradient(x):
        raise CommArgumentError(
            f"{op} writes in place and has no gradient: call it under torch.no_grad(), or use the "
            "function that returns a new tensor"
        )


def _check_shape(op: str, out: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    if (tuple(out.shape), out.dtype, out.device) != (shape, x.dtype, x.device):
        raise CommArgumentError(
            f"{op}: the output is {out.dtype} {tuple(out.shape)} on {out.device}, and the result "
            f"{x.dtype} {shape} on {x.device}"
        )
