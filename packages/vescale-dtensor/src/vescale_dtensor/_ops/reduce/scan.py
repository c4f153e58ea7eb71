"""Scans and softmax, along a sharded dim too: ranks exchange only their totals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.local_shards import box_of
from vescale_dtensor._ops.common.functions import both_forms, entries
from vescale_dtensor._ops.common.letters import letters
from vescale_dtensor._ops.common.sharded_dim import (
    ShardedDims,
    extreme_identity,
    is_refused,
    pad_empty_dims,
    rank_index,
    sharded_dim_strategy,
    with_sharded_kernel,
)
from vescale_dtensor._ops.reduce.log_sums import log_of_sums, scaled_sum
from vescale_dtensor._planning import LocalContext, OpCall, Reads, Rule, Strategy
from vescale_dtensor._torch.opmath import opmath_dtype, product_dtype, result_dtype, to_opmath
from vescale_dtensor._torch.worlds import cached


class ShardedScan(ShardedDims):
    """One scan along a sharded dim, as this rank sees it.

    Attributes:
        x: the local tensor.
        dim: the dim that is scanned.
        args, kwargs: local arguments of the call.
    """

    def __init__(self, context: LocalContext, dim: int, args: Any, kwargs: Any) -> None:
        self.x: Tensor = args[0]
        self.dim, self.args, self.kwargs = dim, args, kwargs
        super().__init__(context, (dim,))

    def local_result(self) -> Any:
        """The out-of-place function's result for the local tensor alone."""
        name = self.func.__name__
        func = getattr(torch, name[:-1]) if name.endswith("_") else self.func
        return func(*self.args, **self.kwargs)

    def preceding_totals(self, total: Tensor) -> Tensor:
        """The totals of the shards before this one, along a new first dim, which may be empty."""
        return self.gather(total)[: self.rank]

    def dtype(self) -> torch.dtype | None:
        """The dtype that was asked for."""
        given = [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, torch.dtype)]
        return given[0] if given else None

    def widened(self, scan: Callable[..., Tensor]) -> tuple[Tensor, torch.dtype]:
        """The local tensor in the dtype in which `scan` accumulates, and the dtype of the result.

        Halves are converted once, so that the totals of other shards, and cotangents, are added to
        them in single precision as well.
        """
        own = self.dtype()
        if own is None:
            # Torch takes integers as int64, and autocast widens products.
            own = result_dtype(scan, self.x.new_zeros(1), 0)
        return self.x.to(opmath_dtype(own)), own


def _scan_strategy(
    scan: Callable[[ShardedScan], Any],
    outputs: int = 1,
    nothing: Callable[[ShardedScan], Any] | None = None,
) -> Callable[[OpCall], Strategy | None]:
    """The strategy of a scan.

    Args:
        scan: its kernel along a sharded dim.
        outputs: number of results.
        nothing: gives the result of a shard without elements along a dim that is not sharded, where
            torch's has not the histories that other ranks' have.
    """

    def strategy(call: OpCall) -> Strategy | None:
        dim_index = call.dim(1)
        if dim_index is None or len(call.operands) != 1 or is_refused(call):
            return None
        writes = call.func.__name__.endswith("_")

        def kernel(context: LocalContext, args: Any, kwargs: Any) -> Any:
            found = ShardedScan(context, dim_index, args, kwargs)
            run = scan if found.axes or nothing is None else nothing
            if not writes:
                return run(found)
            target = found.x
            # The scan saves its input for backward: the write below must not touch that tensor.
            found.x = target.clone()
            found.args = (found.x, *args[1:])
            return target.copy_(run(found))

        dims = letters(call.operands[0].ndim)
        strategy = sharded_dim_strategy(dims, (dims,) * outputs, (dim_index,), (False,) * outputs)
        return with_sharded_kernel(strategy, (dim_index,), kernel, or_empty=nothing is not None)

    return strategy


def _squares(scan: ShardedScan) -> Tensor:
    """Nothing, whose gradient depends on the operand and on the cotangent, as a product's does."""
    with torch.no_grad():
        dtype = scan.local_result().dtype
    return scan.x.square().to(dtype)


def _copied(scan: ShardedScan) -> Any:
    """Nothing, whose gradient depends on the cotangent, as an extreme's does; and no indices."""
    with torch.no_grad():
        found = scan.local_result()
    return type(found)((scan.x.clone(), found.indices))


def _sum(scan: ShardedScan) -> Tensor:
    x, own = scan.widened(torch.cumsum)
    # Of an empty shard too, whose total is zero: every rank has to send one.
    total = x.sum(scan.dim, keepdim=True)
    found = x.cumsum(scan.dim) + scan.preceding_totals(total).sum(0).to(total.dtype)
    return found.to(own)


def _product(scan: ShardedScan) -> Tensor:
    x, own = scan.widened(torch.cumprod)
    # Torch multiplies in double precision, too; what comes before may be as large as a part is
    # small. The product of no elements is one, which changes nothing behind it.
    x = x.to(product_dtype(own))
    total = x.prod(scan.dim, keepdim=True)
    found = x.cumprod(scan.dim) * scan.preceding_totals(total).prod(0).to(total.dtype)
    return found.to(own)


def _log_sum(scan: ShardedScan) -> Tensor:
    own, x = scan.x.dtype, to_opmath(scan.x)
    if x.is_complex():
        parts = scan.preceding_totals(torch.logsumexp(x, scan.dim, keepdim=True))
    else:
        parts = scan.preceding_totals(scaled_sum(x, (scan.dim,), keepdim=True))
    if not len(parts) or not x.shape[scan.dim]:
        # A product with nothing keeps what was sent in the graph, as backward asks every rank; and
        # what it sends back depends on the operand there, as on other ranks.
        nothing = parts.sum() * x.narrow(scan.dim, 0, 0).sum()
        return torch.logcumsumexp(x, scan.dim).to(own) + nothing.to(own)
    if x.is_complex():
        before = parts.logsumexp(0)
    else:
        before = log_of_sums(parts)
        # Before an infinite sum nothing counts: its derivative is 0, which torch has as a quotient
        # of infinities.
        before = torch.where(before == torch.inf, before.detach(), before)
    # What comes before is one more element, so that gradients are those of one long row.
    found = torch.logcumsumexp(torch.cat([before, x], scan.dim), scan.dim)
    return found.narrow(scan.dim, 1, x.shape[scan.dim]).to(own)


def _running_extreme(scan: ShardedScan) -> Any:
    """`cummax`, `cummin`: the last of equal elements counts, and NaN beats everything."""
    largest = scan.func.__name__ == "cummax"
    with torch.no_grad():
        indices = scan.local_result()[1]
    # Not torch's values: of an empty shard their gradient is cut off from the cotangent, so that a
    # second backward would wait for that rank.
    values = scan.x.gather(scan.dim, indices)
    indices = indices + scan.offsets[scan.dim]
    inert = extreme_identity(values.dtype, largest=largest)
    last = values.shape[scan.dim] - 1 if values.shape[scan.dim] else 0
    top = pad_empty_dims(values, (scan.dim,), inert).narrow(scan.dim, last, 1)
    at = pad_empty_dims(indices, (scan.dim,), -1).narrow(scan.dim, last, 1)
    # `padded` are rows of what is gathered: the collective is the same on every rank.
    shape = tuple(scan.context.call.operands[0].shape)
    padded = list(_nonempty_preceding(scan.layout, shape, scan.dim, scan.axes))
    tops, places = scan.preceding_totals(top)[padded], scan.preceding_totals(at)[padded]
    kind = getattr(torch.return_types, scan.func.__name__)
    if not len(padded):
        # The sum of nothing keeps what was sent in the graph: backward asks every rank.
        return kind((values + tops.sum(0).to(values.dtype), indices))
    best, row = (tops.cummax(0) if largest else tops.cummin(0)) if len(padded) > 1 else (tops, None)
    where = places if row is None else places.gather(0, row)
    best, where = best[-1], where[-1]
    # Ties go to the later element, which is this rank's; NaN here or before wins.
    keeps = (values >= best if largest else values <= best) | values.isnan()
    return kind((torch.where(keeps, values, best), torch.where(keeps, indices, where)))


# Cached, as it looks at every rank that shares the dim; a layout is one rank's.
@cached(1024)
def _nonempty_preceding(
    layout: Layout, shape: Shape, dim: int, axes: tuple[int, ...]
) -> tuple[int, ...]:
    """Of the ranks that share a dim, those before this one whose shards are not empty.

    Layouts tell: no communication, and no identity element that could tie with a real one.
    """
    found = []
    for row in range(rank_index(layout, axes)):
        coordinate, rest = list(layout.coordinate), row
        for axis in reversed(axes):
            rest, coordinate[axis] = divmod(rest, layout.sizes[axis])
        low, high = box_of(layout, shape, tuple(coordinate))[dim]
        if high > low:
            found.append(row)
    return tuple(found)


def _softmax(scan: ShardedScan) -> Tensor:
    """Softmax with the maximum and the sum of all ranks; the result is sharded as the operand."""
    name = scan.func.__name__  # torch.special calls these by longer names
    wanted = scan.dtype() or scan.x.dtype
    x = scan.x.to(torch.promote_types(wanted, torch.float32))  # as torch's own kernels do
    x = -x if name.endswith("softmin") else x
    with torch.no_grad():  # softmax does not depend on the shift
        padded = pad_empty_dims(x, (scan.dim,), extreme_identity(x.dtype, largest=True))
        peak = scan.gather(padded.amax(scan.dim, keepdim=True)).amax(0)
    shifted = x - peak
    # Shifted by the largest element on any rank, so that no power overflows.
    powers = shifted.exp()
    total = scan.total(powers.sum(scan.dim, keepdim=True))
    result = shifted - total.log() if name.endswith("log_softmax") else powers / total
    return result.to(wanted)


_READS = Reads.NUMBERS
_SOFTMAX = Rule("softmax", _scan_strategy(_softmax), _READS)
RULES = {
    **both_forms("cumsum", Rule("cumulation", _scan_strategy(_sum), _READS)),
    **both_forms("cumprod", Rule("cumulation", _scan_strategy(_product, 1, _squares), _READS)),
    **entries("logcumsumexp", Rule("cumulation", _scan_strategy(_log_sum, 1, _squares), _READS)),
    **entries(
        "cummax cummin", Rule("cumulation", _scan_strategy(_running_extreme, 2, _copied), _READS)
    ),
    **entries("softmax log_softmax softmin", _SOFTMAX),
}
