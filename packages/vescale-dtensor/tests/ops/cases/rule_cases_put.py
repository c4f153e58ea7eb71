"""Cases: writing and taking where lists of indices and masks say, and writes that go through."""

from __future__ import annotations

import torch
from rule_fuzz import T
from rule_table import A, B, C, E, N, add, each


def written(x, index, value):
    """What `x[index] = value` makes of a copy."""
    copy = x * 1
    copy[index] = value
    return copy


SOME = torch.tensor([3, 0, -1])
PAIR = torch.tensor([[0, 2], [1, 1]])
CUBE, BELOW = T((4, 5, 3)), T((3,), "i", high=4)

# Indices are distinct, but where values are added up.
PUT = [
    lambda x, i, s: x.index_put((torch.tensor([0, 3, -1]),), s[:3]),
    lambda x, i, s: torch.index_put(x, (i,), s[0, 0], accumulate=True),
    lambda x, i, s: x.index_put((i, i), s[:3, 0], True),
    lambda x, i, s: x.index_put((i % 3, i, i % 3), s[:3, 0, 0], accumulate=True),
    lambda x, i, s: (x * 1).index_put_((i,), s[:3], accumulate=True),
    lambda x, i, s: (x * 1).index_put_((torch.tensor([1, 0]), torch.tensor([4, 2])), s[0, :1]),
    lambda x, i, s: torch.index_put_(x * 1, [PAIR], s[:2].unsqueeze(0), accumulate=True),
    lambda x, i, s: x.index_put((torch.tensor(2),), s[0]),
    lambda x, i, s: x.index_put(indices=(torch.tensor([[2], [1]]), PAIR), values=s[:2, :2]),
    lambda x, i, s: x.index_put((x.detach()[:, 0, 0] > 0,), s[0]),
    lambda x, i, s: x.index_put((x.detach() > 0,), s.sum()),
    lambda x, i, s: x.index_put((x.detach() > 0,), torch.ones((), dtype=x.dtype), True),
    lambda x, i, s: x.index_put((x.detach()[:, :, 0] > 0, torch.tensor([1])), s[0, 0, 0]),
    lambda x, i, s: (x * 1).index_put_((torch.tensor([True, False, True, True]),), s[:3]),
    lambda x, i, s: x.index_put((i,), s),
    lambda x, i, s: x.index_put((x.detach()[:3] > 0,), s[0, 0, 0]),
]
each("put", PUT, CUBE, BELOW, CUBE, data=True)
each("put_one", PUT[:4], T((1, 1, 3)), T((3,), "i", high=1), T((3, 3, 3)))
each(
    "put_empty",
    [
        lambda x, i: x.index_put((i,), torch.zeros((), dtype=x.dtype)),
        lambda x, i: x.t().index_put((i, i), x[:, 0].sum(), accumulate=True),
        lambda x, i: written(x, i, 2.0),
        lambda x, i: x.index_put((x.detach() > 0,), torch.zeros((), dtype=x.dtype)),
    ],
    T((3, 0)),
    T((0,), "i", high=1),
)

# Lists, of which every rank has the whole, beside indices that may be sharded.
LISTED = [
    lambda x, i: x[[0, 2, 3], i],
    lambda x, i: x[i, :, [0, 1, 2]],
    lambda x, i: x[[1], i],
    lambda x, i: x[i, [0, 1, 2], i % 3],
    lambda x, i: x[i[:, None], [0, 2]],
    lambda x, i: written(x, ([0, 2, 3], i), 2.0),
]
each("listed", LISTED, CUBE, BELOW)

ASSIGNED = [
    lambda x, v: written(x, SOME, v),
    lambda x, v: written(x, (slice(None), SOME), v[0]),
    lambda x, v: written(x, (slice(1, 4), [2, 0]), v[0, :2]),
    lambda x, v: written(x, (Ellipsis, SOME[:2]), v[0, 0, :2]),
    lambda x, v: written(x, (0, slice(None), SOME[:2]), v[0, :, :2]),
    lambda x, v: written(x, (SOME, slice(None), torch.tensor([0, 1, 2])), v[:, :, 0]),
    lambda x, v: written(x, (SOME, torch.tensor([0, 1, 2])), 2.5),
    lambda x, v: written(x, (None, SOME), v),
    lambda x, v: written(x, (SOME, None, slice(0, 3)), v[:, :1, :3]),
    lambda x, v: written(x, ([1, 2], slice(None, None, 2)), v[:2, :3]),
    lambda x, v: written(x, (torch.tensor(1), slice(None), torch.tensor([0, 2])), v[0, :, :2]),
    lambda x, v: written(x, torch.tensor(1), v[0]),
    lambda x, v: written(x, x.detach() > 0, 0.5),
    lambda x, v: written(x, x.detach() > 0, v.sum()),
    lambda x, v: written(x, x.detach()[:, 0, 0] > 0, v[0]),
    lambda x, v: written(x, x.detach()[:, :, 0] > 0, v[0, :1]),
    lambda x, v: written(x, torch.tensor([True, False, True, True]), v),
    lambda x, v: written(x, (slice(None), [True, False, True, False, True]), v[:1, :3]),
    lambda x, v: written(x, x.detach() > 9, torch.zeros(0, dtype=x.dtype)),
    lambda x, v: written(x, (slice(0, 4), 1), v[0, :1]),
    lambda x, v: written(x, SOME, v[:, :2]),
    lambda x, v: written(x, x.detach() > 0, v.reshape(-1)[:2]),
]
each("assigned", ASSIGNED, CUBE, T((3, 5, 3)), data=True)


def _assigned_integers(x):
    y = x.clone()
    y[y > 2] = 7
    y[y < 1] = 2.5
    y[torch.tensor([1, 3])] = -1
    return y


add("assigned_integers", _assigned_integers, T((5, 4), "i"), exact=True)
add("assigned_leaf", lambda x: x.__setitem__(torch.tensor([1]), 2.0), A, exact=True)
add("assigned_cast", lambda x: written(x, torch.tensor([1, 2]), torch.ones(4)), A, exact=True)

MASKED = [
    lambda x, m, s: x.masked_scatter(m, s),
    lambda x, m, s: torch.masked_scatter(x, m[:, :1], s),
    lambda x, m, s: x[0].masked_scatter(m, s),
    lambda x, m, s: (x * 1).masked_scatter_(m, s),
    lambda x, m, s: (x * 1).masked_scatter_(m[0], s),
    lambda x, m, s: x.masked_scatter(m, s.reshape(-1)),
    lambda x, m, s: x.masked_scatter(m | True, s[:2]),
    lambda x, m, s: x.masked_select(m[:, 1:2]) * 2,
]
each("masked_scatter", MASKED, A, T((5, 4), "b"), T((6, 4)), data=True)
AT = T((3, 2), "i", high=20)
EACH = [
    lambda x, i, s: x.put(i, s, accumulate=True),
    lambda x, i, s: torch.put(x, i - 20, s, True),
    lambda x, i, s: (x * 1).put_(i, s, accumulate=True),
    lambda x, i, s: x.put(torch.tensor([[4, -1]]), s[:1]),
    lambda x, i, s: x.take(i) + s,
    lambda x, i, s: torch.unravel_index(i, (5, 4))[1] * s,
    lambda x, i, s: torch.unravel_index(i, 20),
]
each("put_flat", EACH, A, AT, T((3, 2)), data=True)
each(
    "taken_along",
    [
        lambda x, i: torch.take_along_dim(x, i, 0),
        lambda x, i: x.take_along_dim(i[:1], 1),
        lambda x, i: torch.take_along_dim(x[:, :1], i.t() % 1, dim=-1),
        lambda x, i: x.gather(0, i.int()),
    ],
    A,
    T((2, 4), "i", high=4),
)
each(
    "taken_flat",  # torch takes no others than such as lie in rows
    [lambda x, i: torch.take_along_dim(x, i[0]), lambda x, i: torch.take_along_dim(x, i)],
    A,
    T((2, 4), "i", high=20),
    ordered=False,
)
PARTS = [
    lambda x, s: x.select_scatter(s[0], 0, -1),
    lambda x, s: torch.select_scatter(x, s[:, 0], 1, 2),
    lambda x, s: x.slice_scatter(s[:2], 0, 1, 5, 3),
    lambda x, s: torch.slice_scatter(x, s, 0, 0, 7),
    lambda x, s: x.slice_scatter(s[:, :1], dim=1, start=-1),
    lambda x, s: x.slice_scatter(s[:0], 0, 3, 2),
    lambda x, s: x.diagonal_scatter(s[0, :4]),
    lambda x, s: torch.diagonal_scatter(x, s[0, :3], offset=1),
    lambda x, s: x.diagonal_scatter(s[0, :2], -3, 0, 1),
    lambda x, s: x.diagonal_scatter(s[0, :2]),
    lambda x, s: torch.combinations(x[0]) * 2,
    lambda x, s: torch.combinations(s[:, 1], 3, True),
    lambda x, s: torch.nonzero_static(x, size=4),
    lambda x, s: x.nonzero_static(size=30, fill_value=7),
]
each("parts_written", PARTS, A, A)
add("diagonals_written", lambda x, s: x.diagonal_scatter(s, 1, 2, 0), E, T((5, 2)))

MASK_AND_PLACES = (T((3,), "b"), T((3,), "i", high=9, low=-1))
each(
    "put_unsafe",
    [
        lambda x, m, i, s: torch._unsafe_masked_index(x, m, [i, i], 0.5) * s[:, 0],
        lambda x, m, i, s: torch._unsafe_masked_index(x, m.unsqueeze(1), [i], 0.5) * s,
        lambda x, m, i, s: torch._unsafe_masked_index_put_accumulate(x, m, [i, i], s[:, 0]),
        lambda x, m, i, s: torch._unsafe_masked_index_put_accumulate(x, m.unsqueeze(1), [i], s),
    ],
    A,
    *MASK_AND_PLACES,
    T((3, 4)),
)

# What lies so that the op cannot write to it: a partial sum, a cut that another operand has not.
THROUGH = [
    lambda x, y: (x * 1).abs_(),
    lambda x, y: (x * 1).clamp_(min=y),
    lambda x, y: (x * 1).pow_(2).add_(y, alpha=2),
    lambda x, y: (x * 1).tril_().mul_(y),
    lambda x, y: (x * 1).renorm_(2, 0, 1.0) + y,
    lambda x, y: (x * 1).copy_(y.sum(0)),
    lambda x, y: (x * 1).addmm_(y, x[:4]),
    lambda x, y: (x * 1).addr_(y[:, 0], x[0], beta=0.5),
    lambda x, y: (x * 1)[0].addmv_(y.t(), x[:, 0]),
    lambda x, y: torch.addmv_(x[0] * 1, y.t(), x[:, 0]),
    lambda x, y: (x * 1).addbmm_(y.unsqueeze(0), x[:4].unsqueeze(0)),
    lambda x, y: (x * 1).unsqueeze(0).baddbmm_(y.unsqueeze(0), x[:4].unsqueeze(0)),
]
each("through", THROUGH, A, A)
each("through_row", THROUGH[1:3], A, B)
each("through_column", THROUGH[1:3], A, C)
each("through_number", [lambda x: (x * 1).abs_(), lambda x: (x * 1).exp_().sin_()], N)
each("through_view", [lambda x: (x * 1)[1:3].abs_(), lambda x: (x * 1).t().sqrt_()], A)
each("through_leaf", [lambda x: x.abs_(), lambda x: x.detach().exp_()], A)
