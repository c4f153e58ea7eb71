"""All members of a group in one process: the same collectives, over lists of tensors."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from vescale_comm._checks.arguments import check_member, check_pair, check_tensor
from vescale_comm._collectives.all_gather import plan_all_gather, plan_gather_pieces
from vescale_comm._collectives.all_reduce import plan_all_reduce
from vescale_comm._collectives.all_to_all import plan_all_to_all
from vescale_comm._collectives.broadcast import LinearBroadcast
from vescale_comm._collectives.bucket import CAP_BYTES, Bucket
from vescale_comm._collectives.permute import plan_permute
from vescale_comm._collectives.reduce_scatter import plan_reduce_scatter
from vescale_comm._collectives.scatter import plan_scatter
from vescale_comm._engine.autograd import Linear, without_view
from vescale_comm._engine.primitives import Steps
from vescale_comm._errors import CommArgumentError, CommError
from vescale_comm._groups.group import Group
from vescale_comm._torch.buffers import plain, views
from vescale_comm._wire.fold import Order
from vescale_comm._wire.formats import Feedback, Wire
from vescale_comm._wire.reduction import divided_in, reduction


def _no_process_group() -> None:
    """Take the place of a `Group`'s weak reference to its process group: there is none."""


_BACKENDS = MappingProxyType({"cpu": "gloo", "cuda": "gloo"})


class Emulator:
    """The collectives of `world_size` members, run for all of them in one process.

    Each function is the one of the same name, over a list with one input for each member; it
    returns a list with one result for each. Ordered reductions and wire formats have the bits that
    real processes have: the same code runs, and only the movements between members are emulated.
    With `order="native"` sums are folded in rank order; a real backend's own order may differ.
    Differentiable, like the functions.

    Args:
        world_size: number of members.

    Examples:
        Emulator(2).all_reduce([torch.ones(2), torch.ones(2)], order="tree")
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise CommArgumentError(f"Emulator: world_size is {world_size}; it has to be positive")
        ranks = tuple(range(world_size))
        self.groups = tuple(
            # gloo's table of native reductions, because that is what the folds here imitate.
            Group(ranks, world_size, rank, (), _BACKENDS, _no_process_group)
            for rank in ranks
        )

    def all_reduce(
        self,
        xs: Sequence[Tensor],
        *,
        op: str = "sum",
        order: Order = "native",
        wire: Wire | None = None,
        feedback: Sequence[Feedback] | None = None,
    ) -> list[Tensor]:
        """See `all_reduce`; `feedback` is one for each member."""
        # One for each member, as each process would have its own: residuals are of a member's
        # input.
        kept = self._each(feedback)
        plans = [
            plan_all_reduce(x, group, op, order, wire, own)
            for x, group, own in zip(self._inputs(xs), self.groups, kept, strict=True)
        ]
        # Every member is planned before any runs: a wrong argument leaves no residual changed.
        return self._apply(plans, xs)

    def reduce_scatter(
        self,
        xs: Sequence[Tensor],
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        op: str = "sum",
        order: Order = "native",
        wire: Wire | None = None,
        feedback: Sequence[Feedback] | None = None,
    ) -> list[Tensor]:
        """See `reduce_scatter`; `feedback` is one for each member."""
        kept = self._each(feedback)
        plans = [
            plan_reduce_scatter(x, group, dim, sizes, op, order, wire, own)
            for x, group, own in zip(self._inputs(xs), self.groups, kept, strict=True)
        ]
        return self._apply(plans, xs)

    def all_gather(
        self, xs: Sequence[Tensor], *, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> list[Tensor]:
        """See `all_gather`."""
        pairs = zip(self._inputs(xs), self.groups, strict=True)
        return self._apply([plan_all_gather(x, group, dim, sizes) for x, group in pairs], xs)

    def gather_pieces(
        self, xs: Sequence[Tensor], *, shapes: Sequence[Sequence[int]]
    ) -> list[list[Tensor]]:
        """See `gather_pieces`."""
        pairs = zip(self._inputs(xs), self.groups, strict=True)
        plans, flats, cuts = zip(
            *(plan_gather_pieces(x, group, shapes) for x, group in pairs), strict=True
        )
        found = self._apply(plans, flats)
        return [views(flat, cut) for flat, cut in zip(found, cuts, strict=True)]

    def all_to_all(self, pieces: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """See `all_to_all`; `pieces[i][j]` goes from member i to member j."""
        rows = self._inputs(pieces)
        plans, flats, cuts = zip(
            *(
                plan_all_to_all(row, group, [tuple(each[group.rank].shape) for each in rows])
                for row, group in zip(rows, self.groups, strict=True)
            ),
            strict=True,
        )
        found = self._apply(plans, flats)
        return [views(flat, cut) for flat, cut in zip(found, cuts, strict=True)]

    def broadcast(self, xs: Sequence[Tensor], *, source: int = 0) -> list[Tensor]:
        """See `broadcast`."""
        for x, group in zip(self._inputs(xs), self.groups, strict=True):
            check_tensor("broadcast", x, group)
        check_member("broadcast", "source", source, self.groups[0])
        return self._apply([LinearBroadcast(group, source) for group in self.groups], xs)

    def permute(self, xs: Sequence[Tensor], *, pairs: Sequence[tuple[int, int]]) -> list[Tensor]:
        """See `permute`; what arrives has the shape of what was sent, else of the own tensor."""
        listed = [check_pair(pair) for pair in pairs]
        for member in (member for pair in listed for member in pair):
            check_member("permute", "pairs", member, self.groups[0])
        # A real receiver is told its shape; here that of the sender is at hand.
        source = {to: origin for origin, to in listed}
        shapes = [tuple(self._inputs(xs)[source.get(m, m)].shape) for m in range(len(xs))]
        plans = [
            plan_permute(x, group, pairs, shape)
            for x, group, shape in zip(xs, self.groups, shapes, strict=True)
        ]
        return apply_together(plans, xs)

    def scatter(
        self,
        xs: Sequence[Tensor],
        *,
        source: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """See `scatter`."""
        pairs = zip(self._inputs(xs), self.groups, strict=True)
        return self._apply([plan_scatter(x, group, source, dim, sizes) for x, group in pairs], xs)

    def all_reduce_bucketed(
        self,
        lists: Sequence[Sequence[Tensor]],
        *,
        op: str = "sum",
        order: Order = "native",
        wire: Wire | None = None,
        cap_bytes: int = CAP_BYTES,
    ) -> list[list[Tensor]]:
        """See `all_reduce_bucketed`; `lists[i]` are the tensors of member i."""
        first = self._inputs(lists)[0]
        shapes, dtypes = [x.shape for x in first], [x.dtype for x in first]
        # One plan, of member 0, for all: members that differ from it are refused by `pack`.
        bucket = Bucket.plan(shapes, dtypes, cap_bytes=cap_bytes)
        packed = zip(*(bucket.pack(each) for each in lists), strict=True)
        totals = [self.all_reduce(flats, op=op, order=order, wire=wire) for flats in packed]
        return [bucket.unpack([flats[member] for flats in totals]) for member in range(len(lists))]

    def all_reduce_hierarchical(
        self, xs: Sequence[Tensor], *, inner: int, op: str = "sum", order: Order = "native"
    ) -> list[Tensor]:
        """See `all_reduce_hierarchical`; `inner` members after each other are an inner group.

        Raises:
            CommArgumentError: they do not divide the members.
        """
        count = len(self._inputs(xs))
        if inner < 1 or count % inner:
            raise CommArgumentError(
                f"Emulator.all_reduce_hierarchical: groups of {inner} do not divide {count} members"
            )
        reduction(op, xs[0].dtype, "gloo", order)  # as the function itself, before anything
        # As there, the average is computed once, over all, of a sum that torch can divide.
        dtype, summed = xs[0].dtype, "sum" if op == "avg" else op
        wide = [x.to(divided_in(dtype)) for x in xs] if op == "avg" else xs
        rows = [wide[start : start + inner] for start in range(0, count, inner)]
        # Full tensors in both steps: which part of them a member would hold changes no bits.
        inside = [Emulator(inner).all_reduce(row, op=summed, order=order) for row in rows]
        across = Emulator(len(rows))
        totals = [
            across.all_reduce(column, op=summed, order=order)
            for column in zip(*inside, strict=True)
        ]
        found = [totals[member % inner][member // inner] for member in range(count)]
        return [(x / count).to(dtype) for x in found] if op == "avg" else found

    def _inputs(self, xs: Sequence[Any]) -> Sequence[Any]:
        if len(xs) != len(self.groups):
            raise CommArgumentError(
                f"an Emulator of {len(self.groups)} members takes {len(self.groups)} inputs, not "
                f"{len(xs)}"
            )
        return xs

    def _each(self, feedback: Sequence[Feedback] | None) -> Sequence[Feedback | None]:
        return self._inputs([None] * len(self.groups) if feedback is None else feedback)

    def _apply(self, plans: Sequence[Linear], xs: Sequence[Tensor]) -> list[Tensor]:
        # As the functions do: a group of one skips its collective, and returns a copy.
        if len(self.groups) == 1:
            return [xs[0].clone(memory_format=torch.contiguous_format)]
        return apply_together(plans, xs)


def apply_together(plans: Sequence[Linear], xs: Sequence[Tensor]) -> list[Tensor]:
    """Run the members' collectives together, with a node in the graph where one is needed."""
    # Before the node, as in `autograd.apply`: resolving a lazy negation is differentiable by
    # itself.
    xs = list(map(plain, xs))
    # One node over the inputs of all members: the gradient of one depends on the results of all.
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        found: tuple[Tensor, ...] = _MembersFunction.apply(tuple(plans), *xs)  # type: ignore[no-untyped-call]
        return list(found)
    return run_in_step([plan.steps(x) for plan, x in zip(plans, xs, strict=True)])


class _MembersFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plans: tuple[Linear, ...], *xs: Tensor) -> tuple[Tensor, ...]:
        """Run the members' collectives in step."""
        ctx.adjoints = [plan.adjoint() for plan in plans]
        found = run_in_step([plan.steps(x) for plan, x in zip(plans, xs, strict=True)])
        return tuple(map(without_view, found))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Run their adjoints in step."""
        # `apply_together` and not `run_in_step`: under create_graph=True the adjoints get a node,
        # too.
        return (None, *apply_together(ctx.adjoints, grads))


def run_in_step(members: Sequence[Steps[Tensor]]) -> list[Tensor]:
    """Drive the members' generators in step, emulating what they yield.

    Raises:
        CommError: they do not yield the same kinds of movement.
    """
    results: dict[int, Tensor] = {}
    arrived: list[list[Tensor] | None] = [None] * len(members)
    while len(results) < len(members):
        primitives = []
        for member, steps in enumerate(members):
            try:
                # A generator that has not begun takes None.
                primitives.append(steps.send(cast(list[Tensor], arrived[member])))
            except StopIteration as stop:
                results[member] = stop.value
        kinds = {type(each).__name__ for each in primitives}
        # Members of one collective yield the same kinds in the same order, or the plan has a bug.
        if len(kinds) > 1 or (primitives and results):
            raise CommError(f"the members disagree: some are at {kinds}, {len(results)} are done")
        if primitives:
            primitives[0].emulate(primitives)
            # Collected after all have been emulated: one member's output may be another's input.
            arrived = [each.written() for each in primitives]
    return [results[member] for member in range(len(members))]
