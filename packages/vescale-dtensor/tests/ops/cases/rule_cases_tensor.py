"""Cases: tensor operators by family; complex numbers, cumulation, scattering, sorting, joining."""

from __future__ import annotations

import torch
from rule_fuzz import T
from rule_table import A, B, P, add, each

# Complex numbers are made of two operands, so that their parts lie and require grad differently.
COMPLEX = [
    lambda x, y: torch.complex(x, y),
    lambda x, y: torch.complex(x, y).conj(),
    lambda x, y: torch.complex(x, y).conj() * x,
    lambda x, y: torch.complex(x, y).conj().sum(0),
    lambda x, y: torch.complex(x, y).real,
    lambda x, y: torch.imag(torch.complex(x, y)) + y,
    lambda x, y: torch.view_as_real(torch.complex(x, y)),
    lambda x, y: torch.view_as_complex(torch.stack([x, y], -1)).abs(),
    lambda x, y: torch.complex(x, y).abs().sum(),
    lambda x, y: torch.complex(x, y).angle(),
    lambda x, y: torch.polar(x, y).real.sum(1),
    lambda x, y: torch.complex(x, y).sum(1),
    lambda x, y: torch.complex(x, y).mean(),
    lambda x, y: torch.complex(x, y).conj().resolve_conj().imag,
    lambda x, y: torch.complex(x, y).H,
    lambda x, y: torch.complex(x, y).mH.real,
    lambda x, y: torch.complex(x, y).adjoint() @ x.to(torch.complex128),
    lambda x, y: torch.complex(x, y) @ torch.complex(y, x).t(),
    lambda x, y: torch.view_as_real(torch.complex(x, y).conj().resolve_conj()),
    lambda x, y: torch.isreal(torch.complex(x, y)),
    lambda x, y: torch.conj_physical(torch.complex(x, y)).real,
    lambda x, y: x.cdouble().imag + y.real,
    lambda x, y: torch.complex(x, y).cumsum(0),
    lambda x, y: torch.view_as_complex(x),
]
each("complex", COMPLEX, A, A)
each("complex_scalar", COMPLEX[:6], T(()), T(()))
each("complex_empty", COMPLEX[:12], T((0, 3)), T((0, 3)))

# Functions of one number after another that `rule_cases_pointwise` does not name.
each(
    "numbers",
    [
        lambda x: torch.frexp(x),
        lambda x: torch.polygamma(1, x),
        lambda x: torch.special.polygamma(2, x),
        lambda x: torch.mvlgamma(x + 2, 2),
        lambda x: torch.special.zeta(x + 1.5, 2.0),
        lambda x: torch.special.xlog1py(x, x),
        lambda x: torch.special.ndtri(x / 20),
        lambda x: torch.special.log_ndtr(x),
        lambda x: torch.special.i0e(x) + torch.special.i1(x) - torch.special.i1e(x),
        lambda x: torch.special.bessel_j0(x.detach()),
        lambda x: torch.special.chebyshev_polynomial_t(x.detach(), 3),
        lambda x: torch.igamma(x.detach(), torch.tensor(2.0, dtype=torch.float64)),
        lambda x: torch.fill(x, 2.5),
        lambda x: (x * 1).float_power_(2),
        lambda x: (x * 1).lgamma_() + (x * 1).erfinv_(),
        lambda x: (x * 1).atan2_(x + 1),
        lambda x: (x * 1).ldexp_(torch.tensor(2)),
        lambda x: (x * 1).absolute_().copysign_(-x),
    ],
    P,
)
each(
    "integers",
    [
        lambda x: (x << 2) >> 1,
        lambda x: x.clone().bitwise_left_shift_(1),
        lambda x: x.gcd(x + 6) + x.lcm(x + 2),
        lambda x: 3 << x,
        lambda x: x.clone().lcm_(x + 1),
    ],
    T((5, 4), "i", low=1),
    exact=True,
)
add("fill_tensor", lambda x, n: torch.fill(x, n), A, T(()))
add("addcmul_row", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), A, B, B)

# Reductions that combine what the ranks found, with ties (kind f) and without.
CALM = [
    lambda x: x.prod(-1, keepdim=True),
    lambda x: torch.prod(x, dim=1),
    lambda x: x.amax((0, 1)),
    lambda x: x.amin(2, True),
    lambda x: torch.aminmax(x, dim=0),
    lambda x: torch.aminmax(x, dim=-1, keepdim=True),
    lambda x: x.max(1, keepdim=True)[0] * x,
    lambda x: x.min(2),
    lambda x: torch.min(x, dim=0, keepdim=True),
    lambda x: x.argmax(1, keepdim=True),
    lambda x: x.argmin(),
    lambda x: x.argmax(keepdim=True),
    lambda x: x.logsumexp((0, 2), True),
    lambda x: x.logsumexp(-1) * 2,
    lambda x: torch.linalg.vector_norm(x, 3, (0, 1)),
    lambda x: torch.linalg.vector_norm(x, -1, 1),
    lambda x: torch.linalg.vector_norm(x, 0),
    lambda x: torch.linalg.vector_norm(x, torch.inf, (1, 2)),
    lambda x: torch.linalg.vector_norm(x, 2, 1) * x.sum(1),
    lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
    lambda x: x.nansum(0),
    lambda x: x.nansum((0, 1), keepdim=True),
    lambda x: torch.count_nonzero(x, 1),
    lambda x: x.count_nonzero((0, 2)),
    lambda x: (x > 0).any(1),
    lambda x: (x > -9).all((0, 1), keepdim=True),
    lambda x: (x > 0).all(),
    lambda x: (x > 0).any(0, keepdim=True),
    lambda x: torch.where(x > 1, torch.nan, x).amax(0),
    lambda x: torch.where(x > 1, torch.nan, x).max(1)[1],
    lambda x: torch.where(x > 1, torch.nan, x).argmin(),
    lambda x: torch.where(x > 1, torch.nan, x).nansum(),
    lambda x: torch.where(x > 1, -torch.inf, x).max(0),
    lambda x: torch.full_like(x, -torch.inf).max(0),
    lambda x: torch.full_like(x, torch.inf).argmin(2),
    lambda x: torch.zeros_like(x).max(),
    lambda x: torch.complex(x, x).prod(0),
]
COMBINED = [
    *CALM,
    lambda x: torch.linalg.vector_norm(x, -torch.inf, 0, keepdim=True),
    lambda x: x.std((0, 1), keepdim=True),
    lambda x: x.std(1, correction=0),
    lambda x: torch.var(x, unbiased=False),
    lambda x: x.var(0, False, True),
    lambda x: x.var((1, 2), correction=3),
    lambda x: torch.std_mean(x, (0, 2), keepdim=True),
    lambda x: torch.var_mean(x, correction=0),
    lambda x: (x * 0).std(0),
    lambda x: (x + 1e6).var(0),
    lambda x: torch.complex(x, x + 1).var(1),
]
each("combined", COMBINED, T((3, 5, 4)))
each("combined_distinct", COMBINED, T((3, 5, 4), "d"))
# Of too few numbers torch's variance warns, once.
each("combined_one", CALM, T((1, 2, 3), "d"))
each("combined_empty", CALM, T((2, 0, 3)))
each("combined_scalar", CALM, T(()))
each("combined_integer", CALM, T((5, 4), "i"))
NARROW = [
    lambda x: x.prod(1, dtype=torch.float32),
    lambda x: x.bool().amax(0),
    lambda x: x.to(torch.uint8).all(0),
    lambda x: x.bool().max(1)[0],
    lambda x: x.float().argmax(0, True),
]
each("combined_narrow", NARROW, T((5, 4), "i"))
