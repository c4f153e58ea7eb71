"""Cumulation and softmax: along a cut dim, too, where ranks tell each other their totals only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch.execute import Run
from vescale_dtensor._layout.local_shards import box_of
from vescale_dtensor._ops.common.functions import functions
from vescale_dtensor._ops.common.sharded_dim import (
    crossing,
    cutting,
    highest,
    lowest,
    place,
    stacked,
    starts,
    summed,
    with_something,
)
from vescale_dtensor._planning.op_call import Call, Reads
from vescale_dtensor._planning.plan import Rule
from vescale_dtensor._planning.strategy import Strategy


class Scan:
    """One call, on a rank that holds a piece of the dim.

    Attributes:
        x: the piece.
        dim: along which it goes.
        run, args, kwargs: the call.
    """

    def __init__(self, run: Run, dim: int, args: Any, kwargs: Any) -> None:
        self.x: Tensor = args[0] if args else kwargs["input"]
        self.run, self.dim, self.args, self.kwargs = run, dim, args, kwargs
        self.layout = run.input_layout(0)
        self.axes = cutting(self.layout, (dim,))

    def own(self) -> Any:
        """The function's result for the piece alone, in a tensor of its own."""
        func = self.run.call.func
        if func.__name__.endswith("_"):
            func = getattr(torch, func.__name__[:-1])
        return func(*self.args, **self.kwargs)

    def before(self, total: Tensor) -> Tensor:
        """The totals of the pieces before this one, along a new first dim; there may be none."""
        return stacked(total, self.layout, self.axes)[: place(self.layout, self.axes)]

    def dtype(self) -> torch.dtype | None:
        """The dtype that was asked for."""
        given = [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, torch.dtype)]
        return given[0] if given else None


def _rule(scan: Callable[[Scan], Any], outputs: int = 1) -> Callable[[Call], Strategy | None]:
    def strategy(call: Call) -> Strategy | None:
        dim, ndim = call.argument(1, "dim", call.kwargs.get("axis")), call.operands[0].ndim
        if not isinstance(dim, int) or len(call.operands) != 1 or not -ndim <= dim < ndim:
            return None
        along = dim % ndim
        writes = call.func.__name__.endswith("_")

        def local(run: Run, args: Any, kwargs: Any) -> Any:
            if not cutting(run.input_layout(0), (along,)):
                return run.call.func(*args, **kwargs)
            found = Scan(run, along, args, kwargs)
            if not writes:
                return scan(found)
            target = found.x
            found.x = target.clone()  # whose version stays what autograd has seen
            found.args = (found.x, *args[1:])
            return target.copy_(scan(found))

        def bind(run: Run) -> Callable[..., Any] | None:
            return None if cutting(run.input_layout(0), (along,)) else run.call.func

        dims = tuple(range(ndim))
        return replace(
            crossing(dims, (dims,) * outputs, (along,), (False,) * outputs), local=local, bind=bind
        )

    return strategy


def _sum(scan: Scan) -> Tensor:
    total = scan.x.sum(scan.dim, keepdim=True, dtype=scan.dtype())
    before = scan.before(total).sum(0).to(total.dtype)
    return scan.own() + before  # type: ignore[no-any-return]


def _product(scan: Scan) -> Tensor:
    total = scan.x.prod(scan.dim, keepdim=True, dtype=scan.dtype())
    own: Tensor = scan.own()
    # Autocast widens products, and no cumulations.
    return (own * scan.before(total).prod(0)).to(own.dtype)


def _log_sum(scan: Scan) -> Tensor:
    before = scan.before(torch.logsumexp(scan.x, scan.dim, keepdim=True)).logsumexp(0)
    nothing = before.isneginf()
    # Two of minus infinity would have a sum, but no gradient.
    both = torch.logaddexp(scan.own(), torch.where(nothing, 0, before))
    return torch.where(nothing, scan.own(), both)


def _running_extreme(scan: Scan) -> Any:
    """`cummax`, `cummin`: of what ties the last counts, and NaN beats everything."""
    most = scan.run.call.func.__name__ == "cummax"
    values, indices = scan.own()
    indices = indices + starts(scan.run)[scan.dim]
    inert = (lowest if most else highest)(values.dtype)
    last = values.shape[scan.dim] - 1 if values.shape[scan.dim] else 0
    top = with_something(values, (scan.dim,), inert).narrow(scan.dim, last, 1)
    at = with_something(indices, (scan.dim,), -1).narrow(scan.dim, last, 1)
    held = _holding(scan)
    tops, places = scan.before(top)[held], scan.before(at)[held]
    kind = getattr(torch.return_types, scan.run.call.func.__name__)
    if not len(held):
        # The sum of nothing keeps what was sent in the graph: backward asks every rank.
        return kind((values + tops.sum(0).to(values.dtype), indices))
    best, row = (tops.cummax(0) if most else tops.cummin(0)) if len(held) > 1 else (tops, None)
    where = places if row is None else places.gather(0, row)
    best, where = best[-1], where[-1]
    keeps = (values >= best if most else values <= best) | values.isnan()
    return kind((torch.where(keeps, values, best), torch.where(keeps, indices, where)))


def _holding(scan: Scan) -> list[int]:
    """Which of the pieces before this one hold anything."""
    layout, shape = scan.layout, tuple(scan.run.call.operands[0].shape)
    found = []
    for row in range(place(layout, scan.axes)):
        coordinate, rest = list(layout.coordinate), row
        for axis in reversed(scan.axes):
            rest, coordinate[axis] = divmod(rest, layout.sizes[axis])
        low, high = box_of(layout, shape, tuple(coordinate))[scan.dim]
        if high > low:
            found.append(row)
    return found


def _softmax(scan: Scan) -> Tensor:
    """The maximum and the sum over all ranks; each keeps its piece of the result."""
    name = scan.run.call.func.__name__  # torch.special calls these by longer names
    wanted = scan.dtype() or scan.x.dtype
    x = scan.x.to(torch.promote_types(wanted, torch.float32))  # as torch's own kernels do
    x = -x if name.endswith("softmin") else x
    with torch.no_grad():
        held = with_something(x, (scan.dim,), lowest(x.dtype))
        peak = stacked(held.amax(scan.dim, keepdim=True), scan.layout, scan.axes).amax(0)
    shifted = x - peak
    powers = shifted.exp()
    total = summed(powers.sum(scan.dim, keepdim=True), scan.layout, scan.axes)
    result = shifted - total.log() if name.endswith("log_softmax") else powers / total
    return result.to(wanted)


_READS = Reads.NUMBERS
_SOFTMAX = Rule("softmax", _rule(_softmax), _READS)
RULES = {
    **{f: Rule("cumulation", _rule(_sum), _READS) for f in functions("cumsum")},
    **{f: Rule("cumulation", _rule(_sum), _READS, writes=0) for f in functions("cumsum_")},
    **{f: Rule("cumulation", _rule(_product), _READS) for f in functions("cumprod")},
    **{f: Rule("cumulation", _rule(_product), _READS, writes=0) for f in functions("cumprod_")},
    **{f: Rule("cumulation", _rule(_log_sum), _READS) for f in functions("logcumsumexp")},
    **{
        f: Rule("cumulation", _rule(_running_extreme, 2), _READS)
        for f in functions("cummax cummin")
    },
    **{f: _SOFTMAX for f in functions("softmax log_softmax softmin")},
}
