"""All-reduce: every member gets the reduction of the members' tensors."""

from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_unary

from vescale_comm._checks.arguments import check_tensor
from vescale_comm._collectives.compressed_reductions import CompressedAllReduce
from vescale_comm._engine import flat_ops
from vescale_comm._engine.annotated_groups import AnnotatedGroup
from vescale_comm._engine.autograd import Linear, no_gradient
from vescale_comm._engine.direct_exchange import sums_pair
from vescale_comm._engine.fast_path import fast_all_reduce
from vescale_comm._engine.handles import ready, run_or_start
from vescale_comm._engine.hooks import hooks
from vescale_comm._engine.operators import call, name_of, register
from vescale_comm._engine.primitives import Steps
from vescale_comm._engine.runner import complete
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._torch.buffers import copy
from vescale_comm._torch.compat import being_traced
from vescale_comm._wire.fold import Order
from vescale_comm._wire.formats import Feedback, Wire, check_traceable, check_wire
from vescale_comm._wire.reduction import reduction


@dataclass(frozen=True, slots=True)
class LinearAllReduce(Linear):
    """Its own adjoint: each output depends in the same way on each input, and the reverse.

    An `owned` input is a buffer that nothing else reads: where the backend reduces, it is reduced
    in place.
    """

    group: Group
    op: str
    order: str = "native"
    owned: bool = False

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Reduce as the dtype, the backend and the order ask for."""
        how = reduction(self.op, x.dtype, self.group.backends[x.device.type], self.order)
        return flat_ops.all_reduce(x, self.group, how, owned=self.owned)

    def run(self, x: Tensor, *, in_graph: bool = False) -> Tensor:
        """Take the fast path for a call that was checked before."""
        # The same key as `plan_all_reduce` writes; a wire format or feedback never takes this path.
        key = (self.op, self.order, None, None, x.dtype, x.device)
        known = None if hooks else self.group._known.get(key)
        plain = type(x) is Tensor and x.layout is torch.strided
        # The fast path says nothing to a group that compares calls, and this one says no gradient.
        silent = in_graph and isinstance(self.group.process_group, AnnotatedGroup)
        if known is not None and plain and not (silent or being_traced(x)):
            return fast_all_reduce(x, self.group, *known, in_graph=in_graph, owned=self.owned)
        return complete(self.steps(x), in_graph=in_graph)

    def owning(self) -> "LinearAllReduce":
        """Return the same one, of a contiguous buffer that nothing else reads."""
        return replace(self, owned=True)

    def adjoint(self) -> "LinearAllReduce":
        """Return itself, for an input of somebody else; refuse what is not linear."""
        if self.op not in ("sum", "avg"):
            no_gradient("all_reduce", self.op)
        # The gradient belongs to autograd, which may use it again: never reduced in place.
        return replace(self, owned=False) if self.owned else self


def all_reduce(
    x: Tensor,
    group: GroupLike = None,
    *,
    op: str = "sum",
    order: Order = "native",
    wire: Wire | None = None,
    feedback: Feedback | None = None,
    async_op: bool = False,
) -> Tensor:
    """Reduce the members' tensors element by element; every member gets the result.

    Args:
        x: tensor of any shape and strides, the same shape and dtype on every member.
        group: from `group_of`, a torch process group, or None for the default one.
        op: `"sum"`, `"avg"` (floating-point and complex), `"max"`, `"min"`, `"prod"`, or, for
            integers and booleans, `"band"`, `"bor"`, `"bxor"`. On booleans sum is *or*, prod is
            *and*. A NaN is the maximum, and the minimum.
        order: `"native"`: as the backend does it. `"rank"`: `((x0 + x1) + x2) + x3`. `"tree"`:
            neighbours first, `(x0 + x1) + (x2 + x3)`, an odd last one going up as it is. The
            latter two have the same bits on every backend and for every size: 16- and 8-bit floats
            are folded in fp32; avg divides the sum; then the result is rounded once. A complex
            product is (ac - bd) + (ad + bc)i with every operation rounded.
        wire: format in which elements travel, for sum and avg of floating-point tensors: see
            `WIRES`. None: as they are.
        feedback: remembers what quantisation left out and adds it to the next call's `x`.
        async_op: whether to return a `Pending` handle at once.

    Returns:
        A new contiguous tensor of the shape and dtype of `x`. 8-bit floats are reduced in fp32 and
        rounded once; avg is the sum, divided at the end.

    Raises:
        CommArgumentError: no such op, order or wire format, not for this dtype, or without a
            gradient where one is asked for; a tensor that is not on a device of the group's
            backend.
    """
    if is_compiling():
        check_traceable("all_reduce", feedback)
        return cast(
            Tensor, call("all_reduce", x, name_of(group), op, order, wire, async_op=async_op)
        )
    if type(group) is not Group:
        group = as_group(group)
    if type(x) is Tensor and not x.requires_grad and not hooks and not async_op:
        # Before any check: `plan_all_reduce` stores the key after its checks, so a hit has passed
        # them. It never stores one with a wire format or feedback.
        known = group._known.get((op, order, wire, feedback, x.dtype, x.device))
        plain = x.layout is torch.strided
        # A torch function mode that records sees collectives, as one function each; a tracer does
        # not see what a backend does, and in a backward only `being_traced` knows of it.
        watched = has_torch_function_unary(None) or being_traced(x)
        if known is not None and plain and not watched:
            return fast_all_reduce(x, group, *known)
    return _all_reduce(x, group, op, order, wire, feedback, async_op)


def _all_reduce(
    x: Tensor,
    group: Group,
    op: str,
    order: str,
    wire: str | None,
    feedback: Feedback | None = None,
    async_op: bool = False,
) -> Tensor:
    collective = plan_all_reduce(x, group, op, order, wire, feedback)
    if group.size == 1:
        # Copied: the caller may write into the result, and its own tensor must stay as it is.
        return cast(Tensor, ready("all_reduce", copy(x), async_op))
    return cast(Tensor, run_or_start("all_reduce", collective, x, async_op))


register("all_reduce(Tensor x, str group, str op, str order, str? wire) -> Tensor", _all_reduce)


def plan_all_reduce(
    x: Tensor,
    group: Group,
    op: str = "sum",
    order: str = "native",
    wire: str | None = None,
    feedback: Feedback | None = None,
    owned: bool = False,
) -> Linear:
    """Check the arguments of `all_reduce`."""
    check_tensor("all_reduce", x, group)
    # Raises on a wrong op or dtype, also where the wire format below does not need the result.
    how = reduction(op, x.dtype, group.backends[x.device.type], order)
    if check_wire("all_reduce", wire, op, x, feedback) is not None:
        return CompressedAllReduce(group, op, order, cast(str, wire), feedback)
    if how.plain and group.size > 1:
        # Made once and kept: making torch's options costs as much as the rest of a small call. Not
        # for a group of one, which never reaches a backend.
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(how.backend_op)
        options.asyncOp = False  # the fast path waits at once
        # Backends round an average at different places; dividing the sum here is the same on all.
        divisor = group.size if how.mean else None
        backend = group.backends[x.device.type]
        paired = sums_pair(backend, group.size, x.dtype, how.backend_op)
        group._known[op, order, None, None, x.dtype, x.device] = options, divisor, paired
    return LinearAllReduce(group, op, order, owned)
