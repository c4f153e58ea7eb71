"""Cases: reductions, products, ops along a dim, and norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rule_fuzz import T
from rule_table import BOOL, WHOLE, B, D, N, each

# Reductions.
REDUCTIONS = [
    lambda x: x.sum(),
    lambda x: x.sum(0),
    lambda x: x.sum((0, -1)),
    lambda x: x.sum(1, keepdim=True),
    lambda x: x.sum(dim=-1),
    lambda x: torch.sum(x, [0, 1]),
    lambda x: x.sum(axis=0),
    lambda x: x.sum(()),
    lambda x: x.sum(dtype=torch.float32),
    lambda x: torch.sum(input=x, dim=0),
    lambda x: x.sum(0, True),
    lambda x: x.mean(),
    lambda x: x.mean(0),
    lambda x: x.mean((0, 2)),
    lambda x: x.mean(-1, keepdim=True),
    lambda x: x.mean(dim=1, dtype=torch.float32),
    lambda x: x.mean((0, 1, 2)),
    lambda x: x.mean([]),
    lambda x: x.amax(),
    lambda x: x.amax(0),
    lambda x: x.amax((1, 2), keepdim=True),
    lambda x: x.amin(-1),
    lambda x: x.max(),
    lambda x: x.max(0),
    lambda x: x.max(dim=-1, keepdim=True),
    lambda x: x.min(1)[0],
    lambda x: x.argmax(),
    lambda x: x.argmax(-1),
    lambda x: x.argmin(0, keepdim=True),
    lambda x: x.logsumexp(0),
    lambda x: torch.logsumexp(x, (0, 1)),
    lambda x: x.prod(),
    lambda x: x.prod(0),
    lambda x: x.norm(),
    lambda x: x.norm(dim=1),
    lambda x: x.norm(p=1),
    lambda x: torch.linalg.vector_norm(x),
    lambda x: torch.linalg.vector_norm(x, 1),
    lambda x: torch.linalg.vector_norm(x, dim=0),
    lambda x: torch.linalg.vector_norm(x, 2, (0, 1), True),
    lambda x: x.nansum(),
    lambda x: x.median(),
    lambda x: x.median(0),
    lambda x: x.count_nonzero(),
    lambda x: x.any(),
    lambda x: x.all(-1),
    lambda x: torch.aminmax(x),
    lambda x: x.detach().item() if x.numel() == 1 else 0,
    lambda x: x.detach().sum().item(),
    lambda x: x.detach().max().item(),
    lambda x: float(x.detach().mean()),
    lambda x: bool(x.detach().sum() > 0),
    lambda x: int(x.detach().sum()),
    lambda x: x.tolist(),
    lambda x: x.sum(5),
    lambda x: x.max(3),
    lambda x: x.mean(-4),
    lambda x: x.argmax(7),
    lambda x: x.sum((0, 0)),
    lambda x: len(x),
    lambda x: f"{x.sum().detach():.3f}",
    lambda x: x.diff(dim=0),
    lambda x: x.detach().numpy().sum() * 1.0,
    lambda x: (x.mean() - x.sum() / x.numel()).abs() < 1e-9,
    lambda x: x.quantile(0.5),
    lambda x: x.sum(0).sum(0),
    lambda x: x.mean(0).mean(-1),
    lambda x: x.sum(-1).max(),
    lambda x: x.square().mean().sqrt(),
    lambda x: torch.max(x, x * 2),
    lambda x: torch.min(x, 0 * x),
    lambda x: x.max(other=-x),
    lambda x: x.mean(0, True),
    lambda x: x.sum(dim=None),
    lambda x: x.sum(dim=0, keepdim=True) * x,
    lambda x: (x - x.mean(0)) / (1 + x.var(0)),
]
MOMENTS = [
    lambda x: x.var(),
    lambda x: x.std(0),
    lambda x: x.var((0, 1), unbiased=False),
    lambda x: torch.var_mean(x, 0),
    lambda x: torch.linalg.vector_norm(x, float("inf")),
]
REDUCED = {
    "": T((3, 5, 4), "d"),
    "_empty": T((0, 5, 2), "d"),
    "_one": T((1, 1, 1), "d"),
    "_scalar": N,
}
for tag, operand in REDUCED.items():
    each(f"reduce{tag}_", REDUCTIONS, operand)
    each(f"moments{tag}_", MOMENTS, operand)
each("reduce_integer", REDUCTIONS, WHOLE)
each("reduce_bool", REDUCTIONS, BOOL)
SCALARS = [
    lambda x: x.softmax(0),
    lambda x: x.cumsum(0),
    lambda x: x.sort(),
    lambda x: x.sort(0),
    lambda x: x.t(),
    lambda x: torch.stack([x, x]),
    lambda x: torch.cat([x, x]),
    lambda x: x.repeat(2),
    lambda x: x.transpose(0, 0),
    lambda x: x.squeeze(),
    lambda x: x.squeeze(0),
    lambda x: x.unsqueeze(0),
    lambda x: x.expand(3),
    lambda x: x.reshape(1),
    lambda x: x.view(1, 1),
    lambda x: x.view(-1),
    lambda x: x.flatten(),
]
each("scalar", SCALARS, N)
ORDERED = [
    lambda x: x.float().sum(),
    lambda x: x.bincount() if x.ndim == 1 else x.flatten().bincount(),
    lambda x: x.sort(1),
    lambda x: x.argsort(1, stable=True),
    lambda x: F.one_hot(x, 6),
    lambda x: torch.unique(x, return_counts=True),
]
each("ordered_integer", ORDERED, WHOLE, exact=True)

# A mean divides each rank's sum: its rounding is that of another order.
each("mean_integer", [lambda x: x.float().mean(), lambda x: x.double().mean(0)], WHOLE)
each("mean_bool", [lambda x: x.float().mean(), lambda x: x.double().mean(1)], BOOL)

# Products.
each(
    "matmul",
    [
        torch.matmul,
        torch.mm,
        lambda x, y: x @ y,
        lambda x, y: x.matmul(y),
        lambda x, y: torch.einsum("ij,jk->ik", x, y),
        lambda x, y: F.linear(x, y.T),
        lambda x, y: F.linear(x, weight=y.t()),
        lambda x, y: torch.tensordot(x, y, 1),
        lambda x, y: torch.linalg.multi_dot([x, y]),
        lambda x, y: F.linear(weight=y.t(), input=x),
    ],
    T((5, 4)),
    T((4, 6)),
)
each("matmul_small", [torch.matmul, torch.mm], T((2, 3)), T((3, 1)))
each("matmul_empty", [torch.matmul, torch.mm], T((5, 0)), T((0, 3)))
each("matmul_vector", [torch.matmul, torch.mv], T((5, 4)), B)
each(
    "matmul_vectors",
    [torch.matmul, torch.dot, torch.inner, torch.vdot, torch.outer],
    T((6,)),
    T((6,)),
)
each("vector_matmul", [torch.matmul], T((4,)), T((3, 4, 2)))
each("matmul_batch", [torch.matmul, torch.bmm], T((3, 5, 4)), T((3, 4, 2)))
each("matmul_broadcast", [torch.matmul], T((3, 1, 5, 4)), T((2, 4, 2)))
each("matmul_broadcast_one", [torch.matmul], T((1, 5, 4)), T((3, 4, 2)))
each("matmul_two", [torch.matmul], T((3, 5, 4)), T((4, 2)))
each(
    "linear",
    [
        F.linear,
        lambda x, w, b: F.linear(x, w, bias=b),
        lambda x, w, b: F.linear(x, bias=b, weight=w),
        lambda x, w, b: F.linear(bias=b, weight=w, input=x),
        lambda x, w, b: x @ w.t() + b,
    ],
    T((2, 5, 4)),
    T((6, 4)),
    T((6,)),
)
each("linear_one", [F.linear], T((4,)), T((6, 4)), T((6,)))
each("linear_scalar", [F.linear], T((5, 4)), T((4,)))
ADDED = [
    torch.addmm,
    lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=0.5),
    lambda c, a, b: c.addmm(a, b, beta=0),
    lambda c, a, b: c.clone().addmm_(a, b),
]
each("addmm", ADDED, T((5, 6)), T((5, 4)), T((4, 6)))
each("addmm_row", ADDED, T((6,)), T((5, 4)), T((4, 6)))
each("addmm_one", ADDED, T((5, 1)), T((5, 4)), T((4, 6)))
each(
    "baddbmm",
    [torch.baddbmm, lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2), torch.addbmm],
    T((5, 6)),
    T((3, 5, 4)),
    T((3, 4, 6)),
)

# Along a dim.
ALONG = [
    lambda x: torch.softmax(x, 1, dtype=torch.float32),
    lambda x: x.argsort(0),
    lambda x: x.tril(diagonal=-1),
    lambda x: x.roll(2),
    lambda x: x.softmax(5),
    lambda x: x.cumsum(-3),
    lambda x: torch.linalg.qr(x)[1].abs(),
    lambda x: x.gather(1, torch.zeros(5, 2, dtype=torch.long)),
    lambda x: x.index_select(0, torch.tensor([2, 0])),
    lambda x: x.take(torch.tensor([1, 3])),
    lambda x: x.scatter(0, torch.zeros(1, 4, dtype=torch.long), 1.0),
    lambda x: torch.einsum("ij->ji", x),
    lambda x: x.unflatten(1, (2, 2)),
    lambda x: F.softmax(x),
    lambda x: F.softmax(input=x, dim=0),
    lambda x: x.cumsum(0, dtype=torch.float32),
    lambda x: x.T,
    lambda x: x.H,
    lambda x: x.adjoint(),
    lambda x: list(x),
    lambda x: [r.sum() for r in x],
    lambda x: x.reshape(-1)[0],
    lambda x: F.gumbel_softmax(x, dim=-1),
    lambda x: x.nonzero(),
    lambda x: x.new_tensor(1.0) + x,
    lambda x: x.swapaxes(0, 1),
    lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).double()),
    lambda x: F.max_pool1d(x, 2),
    lambda x: F.one_hot(x.argmax(1), 4),
]
# The sign of a QR is the solver's; ties in sort have no order.
each("along", ALONG, D)

# Norms.
each(
    "norm",
    [
        lambda x: F.layer_norm(x, (4,)),
        lambda x: F.rms_norm(x, (4,)),
        lambda x: F.layer_norm(x, [5, 4]),
        lambda x: F.layer_norm(x, normalized_shape=(4,), eps=1e-3),
        lambda x: F.layer_norm(x, (3, 5, 4)),
        lambda x: F.layer_norm(x, (5,)),
    ],
    T((3, 5, 4), "d"),
)
each(
    "norm_weight",
    [
        lambda x, w, b: F.layer_norm(x, (4,), w, b),
        lambda x, w, b: F.layer_norm(x, (4,), bias=b, weight=w),
        lambda x, w, b: F.rms_norm(x, (4,), w),
        lambda x, w, b: F.layer_norm(x, (4,), weight=w),
        lambda x, w, b: F.layer_norm(x, (4,), bias=b),
        lambda x, w, b: F.layer_norm(input=x, normalized_shape=(4,), weight=w),
        lambda x, w, b: F.layer_norm(weight=w, input=x, normalized_shape=(4,)),
    ],
    T((3, 5, 4), "d"),
    B,
    B,
)
each(
    "norm_uneven",
    [lambda x, w: F.rms_norm(x, (3,), w), lambda x, w: F.layer_norm(x, (3,), w)],
    T((1, 3), "d"),
    T((3,)),
)
