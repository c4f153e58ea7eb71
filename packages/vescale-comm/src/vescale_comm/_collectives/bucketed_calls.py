"""Collectives of many tensors in few buffers, overlapped with the code that makes or uses them."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from vescale_comm._checks.arguments import check_tensor
from vescale_comm._collectives.all_reduce import plan_all_reduce
from vescale_comm._collectives.bucket import CAP_BYTES, Bucket
from vescale_comm._collectives.in_place import all_gather_into_tensor, all_reduce_
from vescale_comm._collectives.reduce_scatter import reduce_scatter
from vescale_comm._engine import flat_ops
from vescale_comm._engine.autograd import StartedLinear, apply
from vescale_comm._engine.handles import Pending, Ready
from vescale_comm._engine.operators import call, name_of, register
from vescale_comm._errors import CommArgumentError, CommError
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._wire.fold import Order
from vescale_comm._wire.formats import Wire


def all_reduce_bucketed(
    tensors: Sequence[Tensor],
    group: GroupLike = None,
    *,
    op: str = "sum",
    order: Order = "native",
    wire: Wire | None = None,
    cap_bytes: int = CAP_BYTES,
    async_op: bool = False,
) -> list[Tensor]:
    """Reduce many tensors with one all-reduce for each buffer that they fill.

    Each tensor is copied once, into its buffer; a native reduction is done there.

    Args:
        tensors: any shapes and dtypes, the same list on every member.
        group: from `group_of`, a torch process group, or None for the default one.
        op: as for `all_reduce`.
        order: as for `all_reduce`.
        wire: as for `all_reduce`.
        cap_bytes: most bytes that travel at once.
        async_op: whether to return one `Pending` handle at once.

    Returns:
        The reduced tensors, in the order given; they are views of the buffers.

    Raises:
        CommArgumentError: as for `all_reduce` and `Bucket.plan`.
    """
    if is_compiling():
        how = op, order, wire, cap_bytes
        found = call("all_reduce_bucketed", tensors, name_of(group), *how, async_op=async_op)
        return cast(list[Tensor], found)
    return _all_reduce_bucketed(tensors, as_group(group), op, order, wire, cap_bytes, async_op)


def _all_reduce_bucketed(
    tensors: Sequence[Tensor],
    group: Group,
    op: str,
    order: str,
    wire: str | None,
    cap_bytes: int,
    async_op: bool = False,
) -> list[Tensor]:
    for x in tensors:
        check_tensor("all_reduce_bucketed", x, group)
    # From shapes and dtypes only, which are the same on every member: so are the buffers.
    bucket = Bucket.plan(
        [x.shape for x in tensors], [x.dtype for x in tensors], cap_bytes=cap_bytes
    )
    flats = bucket.pack(tensors)
    # All are planned before the first is sent: what one dtype lacks is found in time.
    plans = [plan_all_reduce(flat, group, op, order, wire, owned=True) for flat in flats]
    if async_op:
        # All are started before any is waited for: that is the overlap.
        pairs = zip(plans, flats, strict=True)
        alone = group.size == 1
        under_way = [Ready(flat) if alone else StartedLinear(plan, flat) for plan, flat in pairs]
        pending: Any = Pending("all_reduce_bucketed", _Several(under_way), bucket.unpack)
        return cast(list[Tensor], pending)
    if group.size > 1:
        flats = [apply(plan, flat) for plan, flat in zip(plans, flats, strict=True)]
    return bucket.unpack(flats)


register(
    "all_reduce_bucketed(Tensor[] tensors, str group, str op, str order, str? wire, int cap_bytes)"
    " -> Tensor[]",
    _all_reduce_bucketed,
)


class _Several:
    def __init__(self, under_way: Sequence[StartedLinear | Ready]) -> None:
        self._under_way = under_way

    def finish(self) -> list[Tensor]:
        """Wait for each, and return all results."""
        # In the order of starting, which is the same on every rank.
        return [each.finish() for each in self._under_way]


class Reducer:
    """Reduces the tensors of a bucket while others are still being made, as in a backward.

    Give it each tensor when it is there, in any order; a buffer whose tensors are all there is on
    its way at once. Members have to start their collectives in one order, and autograd does not
    promise one: buffers start in the order of their last tensors in the plan, one that is complete
    too early waits for those before it. So plan tensors in the order in which they will be made.

    A tensor is copied once, into its buffer, or not at all if it is the view in `views`. Holds no
    gradients: what is reduced has no history.

    Args:
        bucket: the plan.
        group: from `group_of`, a torch process group, or None for the default one.
        op: as for `all_reduce`.
        order: as for `all_reduce`.
        wire: as for `all_reduce`.
        scatter: whether each member gets only its part of each buffer (`Bucket.own_parts`).
        device: where the buffers are.

    Examples:
        reducer = Reducer(bucket, group, op="avg")
        for index, parameter in enumerate(in_reverse):
            parameter.register_post_accumulate_grad_hook(
                lambda p, index=index: reducer.put(index, p.grad)
            )
        loss.backward()
        gradients = reducer.wait()
    """

    def __init__(
        self,
        bucket: Bucket,
        group: GroupLike = None,
        *,
        op: str = "sum",
        order: Order = "native",
        wire: Wire | None = None,
        scatter: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self._bucket, self._group = bucket, as_group(group)
        self._how: dict[str, Any] = {"op": op, "order": order, "wire": wire}
        self._scatter = scatter
        self._flats = bucket.allocate(device)
        for flat in self._flats:  # what cannot be reduced is said before anything is made
            plan_all_reduce(flat, self._group, op, order, wire)
        self.views: list[Tensor] = bucket.unpack(self._flats)
        """The tensors in the buffers: who writes there saves the copy."""
        self._home = {m: i for i, each in enumerate(bucket.buffers) for m in each.members}
        self._begin()

    def put(self, member: int, x: Tensor) -> None:
        """Say that a tensor is there.

        Args:
            member: its index in the plan.
            x: the tensor; its values are copied now.

        Raises:
            CommArgumentError: no such tensor, one of another shape or dtype, or one that was given
                before.
        """
        index = self._home.get(member)
        if index is None:
            raise CommArgumentError(f"Reducer: no tensor {member} in {self._bucket!r}")
        if member not in self._missing[index]:
            raise CommArgumentError(
                f"Reducer: tensor {member} of {self._bucket!r} was given twice; call wait() "
                "between two rounds"
            )
        self._bucket.check_member(self._bucket.buffers[index], member, x)
        view = self.views[member]
        # The same memory and strides: it was written into the view, and there is nothing to copy.
        if x.data_ptr() != view.data_ptr() or x.stride() != view.stride():
            view.copy_(x.detach())
        self._missing[index].discard(member)
        # Only the first may start. Backward makes tensors in an order that may differ between
        # ranks, and collectives that start in different orders would pair the wrong buffers.
        while self._waiting and not self._missing[self._waiting[0]]:
            self._start(self._waiting.pop(0))

    def wait(self) -> list[Tensor]:
        """Return the reduced tensors, as views, or this member's parts; then all begins anew.

        The buffers are used again in the next round: what is returned is overwritten then.

        Raises:
            CommError: a tensor was never given.
        """
        lacking = sorted(member for missing in self._missing for member in missing)
        if lacking:
            raise CommError(
                f"Reducer: tensors {lacking} of {self._bucket!r} were never given: their buffers "
                "cannot be sent"
            )
        found = [self._handles[index].wait() for index in range(len(self._flats))]
        self._begin()
        return found if self._scatter else self.views

    def _begin(self) -> None:
        buffers = self._bucket.buffers
        self._missing = [set(each.members) for each in buffers]
        # By the last tensor of each, which is when it is full if tensors come in the planned order.
        self._waiting = sorted(range(len(buffers)), key=lambda i: buffers[i].members[-1])
        self._handles: dict[int, Pending[Tensor]] = {}

    def _start(self, index: int) -> None:
        flat, started = self._flats[index], None
        if self._scatter:
            sizes = flat_ops.near_equal(flat.numel(), self._group.size)
            started = reduce_scatter(flat, self._group, sizes=sizes, async_op=True, **self._how)
        else:
            # In place: the buffer is the reducer's own, and the views of it are the result.
            started = all_reduce_(flat, self._group, async_op=True, **self._how)
        self._handles[index] = cast(Any, started)


def gather_ahead(
    bucket: Bucket, parts: Sequence[Tensor], group: GroupLike = None, *, ahead: int = 1
) -> Iterator[dict[int, Tensor]]:
    """Gather sharded buffers one after the other, while the one before is used: a forward.

    Goes through all buffers, in the order of the plan. While the tensors of one are used, the next
    `ahead` are on their way; the memory of one is free when its views are.

    Args:
        bucket: the plan.
        parts: this member's part of each buffer, as `Bucket.own_parts` gives them.
        group: from `group_of`, a torch process group, or None for the default one.
        ahead: number of buffers under way beside the one that is used; 0: none.

    Yields:
        The tensors of one buffer, by their indices in the plan: views of the receive buffer.

    Raises:
        CommArgumentError: parts that are not those of the plan, or `ahead` is negative.
    """
    group = as_group(group)
    if ahead < 0:
        raise CommArgumentError(f"gather_ahead: ahead is {ahead}; it counts buffers")
    # Checked here and not in the generator below: an error is raised at the call, on every rank.
    sizes = [flat_ops.near_equal(each.numel, group.size) for each in bucket.buffers]
    given = [(part.numel(), part.dtype) for part in parts]
    own = [
        (each[group.rank], buffer.dtype) for each, buffer in zip(sizes, bucket.buffers, strict=True)
    ]
    if given != own:
        raise CommArgumentError(
            f"gather_ahead: the parts of {bucket!r} on member {group.rank} are {own}, not {given}"
        )
    return _gathered(bucket, parts, group, sizes, ahead)


def _gathered(
    bucket: Bucket, parts: Sequence[Tensor], group: Group, sizes: Sequence[Any], ahead: int
) -> Iterator[dict[int, Tensor]]:
    following = iter(range(len(parts)))
    under_way: deque[Pending[Tensor]] = deque()

    def _start_next() -> None:
        index = next(following, None)
        if index is not None:
            # A gather ahead of use has no place in a graph; gradients are reduced by who uses the
            # views.
            part = parts[index].detach()
            # New for each buffer, and kept by its views alone: freed as soon as they are.
            out = part.new_empty(bucket.buffers[index].numel)
            under_way.append(
                all_gather_into_tensor(out, part, group, sizes=sizes[index], async_op=True)
            )

    for _ in range(ahead):
        _start_next()
    for index in range(len(parts)):
        _start_next()  # so that `ahead` are left when this one is waited for
        yield bucket.views(index, under_way.popleft().wait())
