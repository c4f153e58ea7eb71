"""Cases: ops that look along some dims, cumulate, or take the last dims as a matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rule_fuzz import T
from rule_table import each


def steady(x):
    """A matrix that can be inverted, positive definite where `x` is symmetric."""
    return x + 40 * torch.eye(4, dtype=x.dtype)


CUMULATED = [
    lambda x: x.cumsum(0),
    lambda x: torch.cumsum(x, dim=-1),
    lambda x: x.cumsum(1, dtype=torch.float64) * x,
    lambda x: x.cumprod(0),
    lambda x: torch.cumprod(x, 1),
    lambda x: x.logcumsumexp(0),
    lambda x: torch.logcumsumexp(x, -1),
    lambda x: x.cummax(0),
    lambda x: torch.cummax(x, dim=1),
    lambda x: x.cummin(-1),
    lambda x: x.cummin(0)[0] * x,
    lambda x: torch.where(x > 1, torch.nan, x).cummax(0),
    lambda x: torch.where(x > 1, -torch.inf, x).cummin(1),
    lambda x: (x * 1).cumsum_(0),
    lambda x: (x * 1).cumprod_(1),
    lambda x: x.softmax(0),
    lambda x: F.log_softmax(x, 0),
    lambda x: torch.softmax(x, 0, dtype=torch.float64),
    lambda x: F.softmin(x, 1),
    lambda x: x.log_softmax(-1).exp() * x,
    lambda x: F.softmax(x, dim=0).sum(1),
    lambda x: torch.where(x > 1, -torch.inf, x).softmax(0),
]
each("cumulated", CUMULATED, T((7, 4)))
each("cumulated_distinct", CUMULATED, T((3, 2, 5), "d"))
each("cumulated_empty", CUMULATED, T((0, 3)))
each("cumulated_one", CUMULATED, T((1, 2)))
each("cumulated_integer", CUMULATED[:15], T((5, 4), "i"))
NARROW = [lambda x: x.bool().cumsum(0), lambda x: x.to(torch.int32).cumsum(0)]
each("cumulated_narrow", NARROW, T((5, 4), "i"), exact=True)

ALONG = [
    lambda x: x.sort(0),
    lambda x: torch.sort(x, descending=True),
    lambda x: torch.sort(x, stable=True, dim=1),
    lambda x: x.argsort(dim=0, descending=True),
    lambda x: x.msort(),
    lambda x: x.topk(2),
    lambda x: x.topk(2, 0),
    lambda x: x.topk(3, 0, largest=False),
    lambda x: torch.topk(x, k=1, dim=-1)[0] * 2,
    lambda x: x.kthvalue(2, 0),
    lambda x: x.kthvalue(1, -1, keepdim=True),
    lambda x: x.mode(0)[0],
    lambda x: x.median(0),
    lambda x: x.median(dim=1, keepdim=True),
    lambda x: x.nanmedian(0),
    lambda x: x.median(),
    lambda x: x.quantile(0.3, 0),
    lambda x: x.nanquantile(0.5, dim=1, keepdim=True),
    lambda x: x.quantile(0.25),
    lambda x: x.flip(0),
    lambda x: torch.flip(x, dims=(0, -1)),
    lambda x: x.flip(0, 1),
    lambda x: x.flipud() + x.fliplr(),
    lambda x: x.roll(1, 0),
    lambda x: torch.roll(x, (1, -2), (0, 1)),
    lambda x: x.roll(3),
    lambda x: x.rot90(),
    lambda x: torch.rot90(x, 2, [0, 1]),
    lambda x: x.diff(),
    lambda x: torch.diff(x, n=2, dim=0),
    lambda x: torch.trapezoid(x, dim=0),
    lambda x: torch.cumulative_trapezoid(x, dx=0.5),
    lambda x: x.renorm(2, 1, 1.0),
    lambda x: x.unfold(0, 2, 1),
    lambda x: x.unfold(-1, 2, 2),
    lambda x: F.pad(x, (1, 2)),
    lambda x: F.pad(x, (0, 0, 1, 0), value=2.5),
    lambda x: F.pad(x, (-1, 1), "constant", 3.0),
    lambda x: torch.constant_pad_nd(x, (1, 1, 0, 2)),
    lambda x: x.tril(1) - x.triu(diagonal=1),
    lambda x: (x * 1).tril_(),
    lambda x: x.diagonal(),
    lambda x: torch.diagonal(x, offset=-1, dim1=0, dim2=1),
    lambda x: torch.linalg.diagonal(x),
    lambda x: x.diag(),
    lambda x: x.sum(0).diag(1),
    lambda x: torch.diag_embed(x),
    lambda x: torch.diag_embed(x, 1, 0, 2),
    lambda x: torch.linalg.matrix_norm(x),
    lambda x: torch.linalg.matrix_norm(x, 1, keepdim=True),
    lambda x: torch.linalg.matrix_norm(x, "nuc"),
    lambda x: x.repeat(1, 2),
    lambda x: x.repeat(2, 1, 1),
    lambda x: x.repeat((3, 2)),
    lambda x: torch.linalg.vander(x),
    lambda x: torch.fft.fft(x, dim=0).real,
    lambda x: torch.fft.rfft(x).abs(),
    lambda x: torch.fft.irfft(x, n=6, dim=1),
    lambda x: torch.fft.fft2(x).imag,
    lambda x: torch.fft.fftn(x, dim=(0,)).real,
    lambda x: torch.fft.ifftn(x).real.sum(),
    lambda x: torch.fft.fftshift(x, dim=0),
    lambda x: torch.fft.ifftshift(x),
    lambda x: torch.fft.hfft(x, dim=0),
]
each("whole_dims", ALONG, T((5, 4), "d"))
each("whole_dims_of_one", ALONG[:60], T((1, 3), "d"))
BATCHED = [
    lambda x: x.flip(-1) + x.roll(1, 2),
    lambda x: x.diagonal(0, 1, 2),
    lambda x: x.tril(),
    lambda x: F.pad(x, (1, 1), mode="reflect"),
    lambda x: F.pad(x, (1, 0), "circular"),
    lambda x: torch.linalg.matrix_norm(x),
    lambda x: torch.linalg.matrix_norm(x, 2, dim=(0, 1)),
    lambda x: torch.fft.rfft2(x).abs(),
    lambda x: torch.linalg.det(x),
    lambda x: torch.linalg.inv(steady(x)),
    lambda x: torch.linalg.inv_ex(steady(x)),
    lambda x: torch.linalg.cholesky(steady(x @ x.mT)),
    lambda x: torch.linalg.cholesky_ex(steady(x @ x.mT)),
    lambda x: torch.linalg.slogdet(steady(x)),
    lambda x: torch.logdet(steady(x)),
    lambda x: torch.linalg.eigvalsh(x + x.mT),
    lambda x: torch.linalg.eigh(x + x.mT)[0],
    lambda x: torch.linalg.svdvals(x),
    lambda x: torch.linalg.svd(x, full_matrices=False)[1],
    lambda x: torch.linalg.qr(x.detach()),
    lambda x: torch.linalg.qr(x.detach(), "r")[1],
    lambda x: torch.linalg.lu(x.detach()),
    lambda x: torch.linalg.lu_factor(x.detach()),
    lambda x: torch.linalg.lu_factor_ex(x.detach()),
    lambda x: torch.linalg.pinv(x.detach()),
    lambda x: torch.linalg.matrix_rank(x.detach()),
    lambda x: torch.linalg.cond(x.detach()),
    lambda x: torch.linalg.matrix_exp(x / 10),
    lambda x: torch.linalg.matrix_power(x, 3),
    lambda x: torch.linalg.eigvals(x.detach()).abs().sum(-1),
    lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x.detach())),
    lambda x: torch.geqrf(x.detach()),
    lambda x: torch.linalg.householder_product(*torch.geqrf(x.detach())),
    lambda x: torch.pixel_shuffle(x.reshape(1, 4, 3, 4), 2),
]
each("matrices", BATCHED, T((3, 4, 4), "d"))
SOLVED = [
    lambda a, b: torch.linalg.solve(steady(a), b),
    lambda a, b: torch.linalg.solve_ex(steady(a), b),
    lambda a, b: torch.linalg.solve_triangular(steady(a.triu()), b, upper=True),
    lambda a, b: torch.cholesky_solve(b, steady(a.tril())),
    lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(steady(a.detach())), b),
    lambda a, b: torch.triangular_solve(b, steady(a)),
]
each("solved", SOLVED, T((3, 4, 4), "d"), T((3, 4, 2)))
each("solved_broadcast", SOLVED[:3], T((4, 4), "d"), T((2, 3, 4, 2)))
each("solved_vector", SOLVED[:2], T((3, 4, 4), "d"), T((3, 4)))

if torch.cholesky.__module__ != "torch._linalg_utils":  # where torch leaves only an error of it
    each(
        "former_names",
        [lambda a: steady(a @ a.mT).cholesky(), lambda a: torch.cholesky(steady(a @ a.mT))],
        T((4, 4), "d"),
    )

# The same functions by their other names.
each(
    "other_names",
    [
        lambda a: a.addbmm(torch.ones(2, 4, 3, dtype=a.dtype), torch.ones(2, 3, 4, dtype=a.dtype)),
        lambda a: a[0].addmv(a, a[1]),
        lambda a: a.addr(a[0], a[1]),
        lambda a: a.equal(a * 1),
        lambda a: a.index_copy(0, torch.tensor([1, 0]), a[:2]),
        lambda a: (a * 1).index_reduce_(0, torch.tensor([1, 1]), a[:2], "amin"),
        lambda a: torch.index_reduce(a, 0, torch.tensor([1, 1]), a[:2], "prod"),
        lambda a: torch.index_fill(a, 0, torch.tensor([1, -1]), 2.5),
        lambda a: torch.scatter(a, 0, torch.tensor([[3, 1, 0, 2]]), a),
        lambda a: (a * 1).scatter_reduce_(0, torch.tensor([[3, 1, 0, 2]]), a, "amax"),
        lambda a: a.lu_solve(*torch.linalg.lu_factor(steady(a.detach()))),
        lambda a: torch.lu_solve(a, *torch.linalg.lu_factor(steady(a.detach()))),
        lambda a: a.detach().ormqr(a.detach()[0], a.detach()),
        lambda a: torch.ormqr(a.detach(), a.detach()[0], a.detach()),
        lambda a: torch.renorm(a, 2, 0, 1.0),
        lambda a: torch.vander(a[0]),
        lambda a: torch.linalg.ldl_solve(*torch.linalg.ldl_factor((a + a.mT).detach()), a),
        lambda a: torch.linalg.eig(a.detach())[0].abs().sum(),
    ],
    T((4, 4), "d"),
)
