"""All-reduce over two axes of different speed: inside first, then across, then inside again."""

from dataclasses import dataclass
from typing import cast

from torch import Tensor
from torch.compiler import is_compiling

from vescale_comm._checks.arguments import check_tensor
from vescale_comm._engine import flat_ops
from vescale_comm._engine.autograd import Linear, no_gradient
from vescale_comm._engine.handles import run_or_start
from vescale_comm._engine.operators import call, name_of, register
from vescale_comm._engine.primitives import Steps
from vescale_comm._errors import CommArgumentError
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._torch.buffers import copy, flattened
from vescale_comm._wire.fold import Order
from vescale_comm._wire.reduction import Reduction, divided_in, reduction


@dataclass(frozen=True, slots=True)
class HierarchicalAllReduce(Linear):
    """Its own adjoint, as an all-reduce is."""

    inner: Group
    outer: Group
    op: str
    order: str

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Reduce inside, then across, and gather inside."""
        flat, op, mean = flattened(x), self.op, self.op == "avg"
        inner, outer = (group.backends[x.device.type] for group in (self.inner, self.outer))
        reduction(op, x.dtype, inner, self.order)  # it is defined for the dtype
        if mean:
            # The average is computed once, over all members, from a sum that is not rounded to
            # what torch cannot divide.
            flat, op = flat.to(divided_in(x.dtype)), "sum"
        inside = reduction(op, flat.dtype, inner, self.order)
        across = reduction(op, flat.dtype, outer, self.order)
        total = yield from self._total(flat, inside, across, x)
        if mean:
            total = (total / (self.inner.size * self.outer.size)).to(x.dtype)
        return total.view(x.shape)

    def _total(
        self, flat: Tensor, inside: Reduction, across: Reduction, x: Tensor
    ) -> Steps[Tensor]:
        # Copied: where both groups are of one, this buffer is the result, which must not be the
        # caller's memory.
        if self.inner.size == 1:
            part = copy(flat)
        else:
            sizes = flat_ops.near_equal(flat.numel(), self.inner.size)
            part = yield from flat_ops.reduce_scatter(flat, self.inner, sizes, inside, x)
        if self.outer.size > 1:
            # Every member of the inner group reduces another part over its own outer group, all at
            # the same time; each sends 1 / inner.size of the elements across.
            part = yield from flat_ops.all_reduce(part, self.outer, across)
        if self.inner.size == 1:
            return part
        return (yield from flat_ops.gather(part, self.inner, sizes, x))

    def adjoint(self) -> "HierarchicalAllReduce":
        """Return itself; refuse what is not linear."""
        if self.op not in ("sum", "avg"):
            no_gradient("all_reduce_hierarchical", self.op)
        # Sum and average over a grid of ranks are the same map on every rank, and symmetric.
        return self


def all_reduce_hierarchical(
    x: Tensor,
    inner: GroupLike,
    outer: GroupLike,
    *,
    op: str = "sum",
    order: Order = "native",
    async_op: bool = False,
) -> Tensor:
    """Reduce over two groups: reduce-scatter over `inner`, all-reduce over `outer`, all-gather.

    What crosses the outer group, the slow one, is one part in `inner.size`. With n bytes, i inner
    and o outer members, each member sends 2 n (i - 1) / i inside and 2 (n / i) (o - 1) / o across
    (parts that do not divide evenly differ by one element); `Trace.bytes_by_axis` shows it.

    Args:
        x: tensor of any shape and strides, the same shape and dtype on every member.
        inner: the fast group, such as `group_of(mesh, "tp")`.
        outer: the slow one; each pair of an inner and an outer group shares this rank only.
        op: as for `all_reduce`.
        order: as for `all_reduce`, first inside, then across: with `"rank"` the fold is
            `((x00 + x01) + (x10 + x11))` where xij is inner member j of outer member i. Each fold
            is rounded to the dtype of `x`.
        async_op: whether to return a `Pending` handle at once.

    Returns:
        A new contiguous tensor; the same on all members of both. Its gradient is reduced likewise.

    Raises:
        CommArgumentError: groups that share more than this rank, or as for `all_reduce`.
    """
    if is_compiling():
        names = name_of(inner), name_of(outer)
        found = call("all_reduce_hierarchical", x, *names, op, order, async_op=async_op)
        return cast(Tensor, found)
    return _all_reduce_hierarchical(x, as_group(inner), as_group(outer), op, order, async_op)


def _all_reduce_hierarchical(
    x: Tensor, inside: Group, across: Group, op: str, order: str, async_op: bool = False
) -> Tensor:
    # Groups that share more would add some inputs twice; groups that share none have no order.
    shared = set(inside.ranks) & set(across.ranks)
    if len(shared) != 1:
        raise CommArgumentError(
            f"all_reduce_hierarchical: {inside.name} {list(inside.ranks)} and {across.name} "
            f"{list(across.ranks)} share ranks {sorted(shared)}: they are axes of one mesh only if "
            "they share one"
        )
    for group in (inside, across):
        check_tensor("all_reduce_hierarchical", x, group)
        # For its errors: what does not exist is said before the first of the three collectives.
        reduction(op, x.dtype, group.backends[x.device.type], order)
    collective = HierarchicalAllReduce(inside, across, op, order)
    return cast(Tensor, run_or_start("all_reduce_hierarchical", collective, x, async_op))


register(
    "all_reduce_hierarchical(Tensor x, str inner, str outer, str op, str order) -> Tensor",
    _all_reduce_hierarchical,
    groups=(1, 2),
)
