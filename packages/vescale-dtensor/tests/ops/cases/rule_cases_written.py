"""Cases: writing by index, products, and functions that torch makes of others."""

from __future__ import annotations

import torch
from rule_fuzz import T
from rule_table import A, B, add, each

AT = T((3, 4), "i", high=5)
WRITTEN = [
    lambda x, i, s: x.scatter(0, i, s),
    lambda x, i, s: torch.scatter_add(x, 0, i, s),
    lambda x, i, s: x.scatter_add(0, index=i, src=s),
    lambda x, i, s: (x * 1).scatter_add_(0, i, s),
    lambda x, i, s: (x * 1).scatter_(0, i, s),
    lambda x, i, s: x.scatter_reduce(0, i, s, "sum"),
    lambda x, i, s: x.scatter_reduce(0, i, s, "amax"),
    lambda x, i, s: x.scatter_reduce(0, i, s, "amin", include_self=False),
    lambda x, i, s: x.scatter_reduce(0, i, s, "mean"),
    lambda x, i, s: torch.scatter_reduce(x, 0, i, s, reduce="prod"),
    lambda x, i, s: x.scatter_add(0, i[:2], s) + x.scatter_add(-2, i[:, :2], s),
    lambda x, i, s: x.scatter(0, i, 2.5),
    lambda x, i, s: (x * 1).scatter_(0, i[:1], value=1.5),
    lambda x, i, s: x.gather(0, i) * s,
    lambda x, i, s: x.take_along_dim(i, 0) + s,
]
# Of several values for one place torch takes any: here each place has one.
each("written", WRITTEN[1:4] + WRITTEN[5:], A, AT, T((3, 4)))
ONCE = [
    lambda x, s: x.scatter(0, torch.tensor([[0, 4, 2, 1], [3, 1, 0, 2]]), s),
    lambda x, s: (x * 1).scatter_(0, torch.tensor([[0, 4, 2, 1], [3, 1, 0, 2]]), s),
    lambda x, s: torch.index_copy(x, 0, torch.tensor([3, 1]), s),
    lambda x, s: (x * 1).index_copy_(0, torch.tensor([0, 4]), s),
    lambda x, s: x.index_add(0, torch.tensor([3, 3]), s),
    lambda x, s: x.index_add(0, torch.tensor([3, 0]), s, alpha=2),
    lambda x, s: (x * 1).index_add_(0, torch.tensor([4, 0]), s),
    lambda x, s: x.index_reduce(0, torch.tensor([1, 1]), s, "amax"),
    lambda x, s: x.index_reduce(0, torch.tensor([1, 2]), s, "mean", include_self=False),
    lambda x, s: x.index_fill(0, torch.tensor([1, -1]), 2.0) + s.sum(),
    lambda x, s: (x * 1).index_fill_(1, torch.tensor([0, 3]), 1.0),
    lambda x, s: x.index_fill(0, torch.tensor([2]), s.sum()),
]
each("written_once", ONCE, A, T((2, 4)))
each(
    "written_rows",
    [
        lambda x, i, s: x.index_add(0, i, s),
        lambda x, i, s: torch.index_add(x, 0, i, s, alpha=0.5),
        lambda x, i, s: (x * 1).index_add_(0, i, s),
    ],
    A,
    T((6,), "i", high=5),
    T((6, 4)),
)

each(
    "product",
    [
        torch.outer,
        lambda x, y: torch.einsum("i,j->ij", x, y),
        lambda x, y: torch.kron(x, y),
        lambda x, y: torch.meshgrid(x, y, indexing="xy"),
        lambda x, y: torch.cartesian_prod(x, y),
        lambda x, y: torch.hstack([x, y]),
        lambda x, y: torch.addr(torch.zeros(5, 3, dtype=x.dtype), x, y, beta=0.5, alpha=2),
        lambda x, y: torch.ger(x, y),
        lambda x, y: torch.broadcast_tensors(x, y[:1]),
    ],
    T((5,)),
    T((3,)),
)
each(
    "products",
    [
        lambda x, y: torch.einsum("bij,bjk->bik", x, y),
        lambda x, y: torch.einsum("bij,bjk", x, y),
        lambda x, y: torch.einsum("...ij,...jk->...ik", x, y),
        lambda x, y: torch.einsum("bij,bjk->i", x, y),
        lambda x, y: torch.einsum("bij, bjk -> ", [x, y]),
        lambda x, y: torch.einsum("bii->bi", x[:, :4, :4]) + y.sum(),
        lambda x, y: torch.einsum("bij,ojk->bik", x, y[:1]),
        lambda x, y: torch.tensordot(x, y, ([0, 2], [0, 1])),
        lambda x, y: torch.tensordot(x, y[0], 1),
        lambda x, y: torch.tensordot(x[:, :4], torch.stack([y[0]] * 4), 2),
        lambda x, y: torch.inner(x, y.mT),
        lambda x, y: torch.linalg.vecdot(x[:, :2], y.mT),
        lambda x, y: torch.cdist(x, y.mT),
        lambda x, y: torch.linalg.multi_dot([x[0], y[0], y[1].T]),
        lambda x, y: torch.addbmm(x[0, :, :2], x, y),
        lambda x, y: y.mT.__rmatmul__(x.sum(0)[:, :2]),
        lambda x, y: torch.linalg.cross(x[:, :, :3], x[:, :1, 1:]) + y.sum(),
    ],
    T((3, 5, 4)),
    T((3, 4, 2)),
)
each(
    "products_of_vectors",
    [
        lambda x, y: torch.vdot(x[0], y),
        lambda x, y: torch.addmv(x[:, 0], x, y, beta=2),
        lambda x, y: torch.addmv(x[:1, 0], x, y, alpha=0.5),
        lambda x, y: torch.linalg.multi_dot([x[:, 0], x, y]),
        lambda x, y: torch.dist(x, y),
        lambda x, y: torch.dist(x, y, 3),
        lambda x, y: torch.vstack([x, y]),
        lambda x, y: torch.dstack([x, x * y]),
        lambda x, y: torch.column_stack([x.T, y]),
        lambda x, y: torch.equal(x, x * 1) + 0 * y.detach().sum(),
        lambda x, y: torch.equal(x, y),
        lambda x, y: x.detach().allclose(x.detach() * 1),
        lambda x, y: torch.kron(x, y),
        lambda x, y: x.sum_to_size(1, 4) * y,
        lambda x, y: x.sum_to_size((4,)),
    ],
    A,
    B,
)
each(
    "composed",
    [
        lambda x: torch.atleast_1d(x),
        lambda x: torch.atleast_2d(x, x.sum()),
        lambda x: torch.atleast_3d([x, x[0]]),
        lambda x: x.tile((2, 1)),
        lambda x: x.tile(2),
        lambda x: x.nanmean(0),
        lambda x: torch.where(x > 1, torch.nan, x).nanmean(),
        lambda x: x.norm(1),
        lambda x: x.norm(3, 0),
        lambda x: x.norm(dim=(0, 1), keepdim=True),
        lambda x: torch.norm(x, p=torch.inf, dim=1),
        lambda x: torch.norm(x, "nuc"),
        lambda x: torch.linalg.norm(x),
        lambda x: torch.linalg.norm(x, 1),
        lambda x: torch.linalg.norm(x, 2, 0),
        lambda x: torch.linalg.norm(x, "fro", (0, 1)),
        lambda x: torch.take(x, torch.tensor([[1, 3], [0, 19]])),
        lambda x: torch.diagflat(x),
        lambda x: x.trace(),
        lambda x: torch.permute_copy(x, (1, 0)),
        lambda x: torch.expand_copy(x, (2, 5, 4)),
        lambda x: torch.unbind_copy(x, 1),
        lambda x: torch.narrow_copy(x, 0, 1, 2),
        lambda x: torch.view_copy(x, (20,)),
        lambda x: torch.trace(x[:, :2]),
        lambda x: torch._weight_norm(x, x[:, :1] + 3),
        lambda x: torch._weight_norm(x, x[:1] + 3, 1),
        lambda x: torch._weight_norm(x, x.sum(), -1),
        lambda x: torch._weight_norm(x[0], x[0] + 3),
        lambda x: (x > -9).detach()._is_all_true(),
        lambda x: torch._is_all_true((x > 0).detach()),
        lambda x: torch.max(x.detach(), 0, out=(x.detach()[0] * 0, x.detach()[0].long())),
        lambda x: torch.hstack([x.detach()] * 2, out=torch.cat([x.detach()] * 2, 1) * 0),
        lambda x: torch.sort(x.detach(), 1, out=(x.detach() * 0, x.detach().long())),
        lambda x: torch.view_copy(x.t(), (20,)),
        lambda x: torch.view_copy(x.t(), dtype=torch.float64),
        lambda x: torch._weight_norm(x.t(), x.t()[:1] + 3, 1),
    ],
    T((5, 4), "d"),
)
TOP = [
    lambda x: x.topk(2),
    lambda x: x.topk(4, 0),
    lambda x: torch.topk(x, k=3, dim=0, largest=False)[0] * 2,
    lambda x: torch.topk(x, 1, dim=-1, sorted=True)[1],
    lambda x: torch.where(x > 0, -torch.inf, x).topk(4, 0)[0],
    lambda x: x.topk(9, 0),
]
each("top", TOP, T((7, 4), "d"))
# So long that the best of every rank are gathered, and not the rows.
TOP_OF_MANY = [
    lambda x: x.topk(2, 0),
    lambda x: torch.topk(x, k=3, dim=0, largest=False)[0] * 2,
    lambda x: torch.where(x > 0, -torch.inf, x).topk(4, 0)[0],
]
each("top_of_many", TOP_OF_MANY, T((61, 3), "d"))
add("top_few", lambda x: x.topk(1, 0), T((2, 3), "d"))

SEARCHED = [
    lambda x, s: torch.searchsorted(s.sort().values, x),
    lambda x, s: torch.searchsorted(s.sort().values, x, right=True, out_int32=True),
    lambda x, s: torch.searchsorted(s.sort().values, 0.5),
    lambda x, s: torch.searchsorted(s, x, sorter=s.argsort()),
    lambda x, s: torch.bucketize(x, s.sort().values),
    lambda x, s: torch.bucketize(0.25, boundaries=s.sort().values, right=True),
    lambda x, s: torch.isin(x, s),
    lambda x, s: torch.isin(x, 0.5, invert=True) & torch.isin(x, s, assume_unique=True),
    lambda x, s: x.detach().histc(4) + s.sum().detach(),
    lambda x, s: torch.histc(x.detach(), bins=3, min=-1, max=1),
    lambda x, s: torch.histc(x.detach() * 0, 5),
    lambda x, s: torch.diff(x.T, prepend=s.detach()[:4, None]),
    lambda x, s: torch.trapezoid(x, s[:4]),
    lambda x, s: torch.cumulative_trapezoid(x, x * 2, dim=0),
    lambda x, s: x.quantile(s.detach().abs() / 4, 0),
    lambda x, s: torch.nanquantile(x, s.detach().abs()[:2] / 4),
]
each("searched", SEARCHED, A, T((7,)))
each(
    "searched_rows",
    [
        lambda x, s: torch.searchsorted(s.sort(-1).values, x),
        lambda x, s: torch.searchsorted(s, x, sorter=s.argsort(-1)),
    ],
    A,
    T((5, 3)),
    exact=True,
)
each(
    "counted",
    [
        lambda x: x.bincount(),
        lambda x: torch.bincount(x, minlength=9),
        lambda x: torch.bincount(x, x.double()),
        lambda x: x.unique(return_counts=True),
        lambda x: torch.unique(x),
        lambda x: x.unique(return_inverse=True),
    ],
    T((7,), "i"),
)
SELECTED = [
    lambda x, m: x[m],
    lambda x, m: torch.masked_select(x, m) * 2,
    lambda x, m: x.masked_select(mask=m).sum(),
    lambda x, m: x[m[:, 0]] + 1,
    lambda x, m: m.nonzero(),
    lambda x, m: torch.nonzero(x * m, as_tuple=True),
    lambda x, m: torch.argwhere(x),
    lambda x, m: x[m.nonzero(as_tuple=True)],
    lambda x, m: x.detach().unique(),
    lambda x, m: torch.unique(x.detach(), return_counts=True),
    lambda x, m: x[m & False],
    lambda x, m: x.masked_select(m[:1]),
]
each("selected", SELECTED, A, T((5, 4), "b"))
each("selected_empty", SELECTED[:6], T((0, 4)), T((0, 4), "b"))


def assigned(index, value):
    def call(x, m):
        result = x * 1
        result[index(m)] = value
        return result

    return call


each(
    "selected_assigned",
    [assigned(lambda m: m, 2.5), assigned(lambda m: m[:, 0], -1)],
    A,
    T((5, 4), "b"),
    exact=True,
)
each(
    "lists",
    [lambda x, y: torch._foreach_sin([x, y]), lambda x, y: torch._foreach_sigmoid_([x * 1, y * 1])],
    A,
    A,
)


def bounded(x, y):
    found = [x * 1, y * 1]
    torch._foreach_maximum_(found, [y, x])
    torch._foreach_minimum_(found, 0.5)
    return found


add("lists_bounded", bounded, T((5, 4), grad=False), T((5, 4), grad=False), exact=True)
each(
    "composed_more",
    [
        lambda x, y: torch.select_scatter(x, y, 0, 2),
        lambda x, y: x.select_scatter(y, 0, -1) * x,
        lambda x, y: torch.slice_scatter(x, y[None].expand(2, 4), 0, 1, 3),
        lambda x, y: torch.slice_scatter(x, y.expand(3, 4) * 2, 0, step=2),
        lambda x, y: torch.block_diag(x, y, x[:1]),
        lambda x, y: torch.cov(x, correction=0) + y.sum(),
        lambda x, y: torch.cov(y),
        lambda x, y: torch.corrcoef(x),
        lambda x, y: torch.linalg.tensorinv(
            (x[:4] + 40 * torch.eye(4, dtype=x.dtype)).reshape(2, 2, 4), 2
        ),
        lambda x, y: torch.masked_select(x, y > 0),
        lambda x, y: torch.masked_select(y, x > 0).sum(),
    ],
    T((5, 4), "d"),
    B,
)
