"""The table of ops that the rules are fuzzed with: data, one line per way to call an op."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rule_fuzz import Op, T

CASES: dict[str, Op] = {}

A, B, C, E = T((5, 4)), T((4,)), T((5, 1)), T((3, 5, 4))
P = T((5, 4), "p")
D = T((5, 4), "d")
WHOLE, ROW = T((5, 4), "i", low=1), T((4,), "i", low=1)
BOOL = T((5, 4), "b")
N = T(())


def add(name, call, *operands, **options):
    assert name not in CASES, name
    CASES[name] = Op(call, operands, **options)


def each(prefix, calls, *operands, **options):
    for index, call in enumerate(calls):
        add(f"{prefix}{index}", call, *operands, **options)


# Pointwise: one operand, two, broadcasting, numbers, in place, out=.
UNARY = """abs ceil cos cosh erf exp expm1 floor neg positive relu round sigmoid sign sin sinh
square tan tanh frac trunc isfinite isnan signbit reciprocal rad2deg deg2rad sgn nan_to_num
atan asinh erfc exp2 sinc logical_not asin clone detach"""
for name in UNARY.split():
    add(f"unary_{name}", getattr(torch, name), A if name != "asin" else T((5, 4), "f"), loose=True)
for name in ["log", "sqrt", "rsqrt", "log2", "log10", "log1p", "lgamma", "digamma"]:
    add(f"positive_{name}", getattr(torch, name), P, loose=True)
for name in [
    "gelu",
    "silu",
    "mish",
    "softplus",
    "elu",
    "celu",
    "selu",
    "leaky_relu",
    "relu6",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "logsigmoid",
    "softsign",
    "tanhshrink",
    "softshrink",
    "hardshrink",
]:
    add(f"activation_{name}", getattr(F, name), A, loose=True)
BINARY = "add sub mul maximum minimum atan2 hypot eq ne lt le gt ge fmod remainder copysign"
for name in BINARY.split():
    func = getattr(torch, name)
    add(f"binary_{name}", func, A, T((5, 4), "p"), loose=True)
    add(f"broadcast_{name}", func, E, T((4,), "p"), loose=True)
    add(f"outer_{name}", func, C, T((1, 4), "p"), loose=True)
    add(f"scalar_{name}", func, A, T((), "p"), loose=True)
    add(f"scalar_first_{name}", func, N, T((3, 4), "p"), loose=True)
each(
    "div",
    [
        torch.div,
        torch.true_divide,
        lambda x, y: x / y,
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        lambda x, y: x // y,
        lambda x, y: torch.div(x, other=y),
        lambda x, y: torch.div(input=x, other=y),
    ],
    A,
    T((4,), "p"),
    loose=True,
)
each(
    "number",
    [
        lambda x: x + 1,
        lambda x: 1 + x,
        lambda x: x - 2,
        lambda x: 2 - x,
        lambda x: x * 3,
        lambda x: 3 * x,
        lambda x: x / 4,
        lambda x: 2 / x,
        lambda x: x**2,
        lambda x: 2**x,
        lambda x: x // 2,
        lambda x: 5 // x,
        lambda x: x % 2,
        lambda x: 3 % x,
        lambda x: -x,
        lambda x: +x,
        lambda x: abs(x),
        lambda x: x > 0,
        lambda x: x <= 0.5,
        lambda x: x == 1,
        lambda x: x != 1,
        lambda x: torch.add(x, 1, alpha=2),
        lambda x: torch.rsub(x, 1),
        lambda x: x.add(True),
        lambda x: torch.mul(x, 0.5),
        lambda x: torch.clamp(x, -0.5, 0.5),
        lambda x: x.clamp(min=0),
        lambda x: torch.where(x > 1, x, 0.0),
        lambda x: torch.where(x > 1, 0.0, x),
        lambda x: torch.where(x > 1, 1, 0),
        lambda x: x.masked_fill(x > 0, 7.0),
        lambda x: torch.pow(2.0, x),
        lambda x: torch.float_power(x, 2),
        lambda x: x.round(decimals=1),
        lambda x: torch.neg(input=x),
        lambda x: torch.add(input=x, other=2),
        lambda x: x.mul(other=2),
        lambda x: F.threshold(x, 0.1, 20.0),
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: F.leaky_relu(x, 0.2),
        lambda x: F.softplus(x, beta=2),
        lambda x: x.xlogy(2.0),
        lambda x: torch.ldexp(x, torch.tensor(2)),
        lambda x: x.clip(max=0.25),
        lambda x: x.sub(1, alpha=3),
    ],
    P,
    loose=True,
)
each(
    "ternary",
    [
        torch.lerp,
        torch.addcmul,
        torch.addcdiv,
        lambda x, y, z: torch.addcmul(x, y, z, value=0.5),
        lambda x, y, z: torch.clamp(x, y - 5, z + 5),
        lambda x, y, z: torch.where(x > 0, y, z),
        lambda x, y, z: x.addcdiv(y, z, value=-2),
    ],
    A,
    B,
    P,
    loose=True,
)
each(
    "alpha",
    [
        lambda x, y: torch.add(x, y, alpha=3),
        lambda x, y: torch.sub(x, y, alpha=0.5),
        lambda x, y: x.rsub(y, alpha=2) if hasattr(x, "rsub") else torch.rsub(x, y, alpha=2),
        lambda x, y: torch.rsub(x, y),
        lambda x, y: torch.isclose(x, y),
        lambda x, y: torch.nextafter(x, y),
        lambda x, y: torch.equal(x, x.clone()),
        lambda x, y: torch.allclose(x, y),
        lambda x, y: torch.equal(x, y),
    ],
    A,
    A,
    loose=True,
)
each(
    "integer",
    [
        torch.bitwise_and,
        torch.bitwise_or,
        torch.bitwise_xor,
        torch.gcd,
        torch.lcm,
        torch.add,
        torch.mul,
        torch.sub,
        lambda x, y: x // y,
        lambda x, y: x % y,
        lambda x, y: x / y,
        lambda x, y: x & y,
        lambda x, y: x << 1,
        lambda x, y: x >> y,
        lambda x, y: ~x,
        lambda x, y: x == y,
        lambda x, y: x * 2,
        lambda x, y: x + 0.5,
        lambda x, y: x * 1.5,
        lambda x, y: x**2,
        lambda x, y: x.div(2),
        lambda x, y: -x,
    ],
    WHOLE,
    ROW,
    loose=True,
)
each(
    "bool",
    [
        torch.logical_and,
        torch.logical_or,
        torch.logical_xor,
        lambda x, y: x & y,
        lambda x, y: x | y,
        lambda x, y: ~x,
        lambda x, y: x ^ y,
        lambda x, y: x + y,
        lambda x, y: x * y,
        lambda x, y: x == y,
        lambda x, y: x.sum(),
        lambda x, y: x.any(),
        lambda x, y: x.all(0),
        lambda x, y: x.float().mean(),
        lambda x, y: x.long(),
        lambda x, y: torch.where(x, y, x),
        lambda x, y: x * 2,
    ],
    BOOL,
    T((4,), "b"),
)
each(
    "mask",
    [
        lambda x, m: x.masked_fill(m, 0.0),
        lambda x, m: torch.where(m, x, 0.0),
        lambda x, m: x * m,
        lambda x, m: x.masked_fill(m, torch.tensor(2.0, dtype=torch.float64)),
        lambda x, m: x[m],
        lambda x, m: torch.masked_select(x, m),
        lambda x, m: x.masked_scatter(m, x + 1),
        lambda x, m: torch.where(m),
        lambda x, m: torch.nonzero(m),
        lambda x, m: m.nonzero(as_tuple=True),
        lambda x, m: x.masked_fill(mask=m, value=1.0),
    ],
    A,
    BOOL,
)

# In place. `clone` first where a leaf must not be written.
INPLACE = [
    lambda x, y: x.add_(y),
    lambda x, y: x.sub_(y, alpha=2),
    lambda x, y: x.mul_(y),
    lambda x, y: x.div_(y),
    lambda x, y: x.copy_(y),
    lambda x, y: x.add_(1),
    lambda x, y: x.mul_(2),
    lambda x, y: x.neg_(),
    lambda x, y: x.exp_(),
    lambda x, y: x.zero_(),
    lambda x, y: x.fill_(3.0),
    lambda x, y: x.clamp_(-1, 1),
    lambda x, y: x.relu_(),
    lambda x, y: x.sigmoid_(),
    lambda x, y: x.addcmul_(y, y),
    lambda x, y: x.addcdiv_(y, y),
    lambda x, y: x.lerp_(y, 0.5),
    lambda x, y: x.pow_(2),
    lambda x, y: x.masked_fill_(y > 1, 0.0),
    lambda x, y: x.sqrt_(),
    lambda x, y: x.__iadd__(y),
    lambda x, y: x.__imul__(y),
    lambda x, y: x.__itruediv__(y),
    lambda x, y: x.div_(2),
    lambda x, y: x.sub_(1),
    lambda x, y: x.tril_(),
    lambda x, y: x.cumsum_(0),
    lambda x, y: F.relu(x, inplace=True),
    lambda x, y: F.leaky_relu(x, 0.1, True),
    lambda x, y: x.fill_(y.sum().detach()),
    lambda x, y: F.silu(x, inplace=True),
    lambda x, y: x.t_(),
    lambda x, y: x.squeeze_(),
    lambda x, y: x.index_fill_(0, torch.tensor([0]), 1.0),
    lambda x, y: x.eq_(y),
    lambda x, y: x.tanh_(),
    lambda x, y: x.requires_grad_(False) if not x.requires_grad else x,
]
for index, call in enumerate(INPLACE):
    for tag, wants in (("nograd", False), ("grad", True)):
        add(
            f"inplace{index}_{tag}",
            call,
            T((5, 4), "p", grad=wants),
            T((4,), "p", grad=wants),
            loose=True,
            refuses=index in (31, 32),
        )
    add(
        f"inplace_after{index}",
        lambda x, y, call=call: call(x * 1, y),
        P,
        T((4,), "p"),
        loose=True,
        refuses=index in (31, 32),
    )
each(
    "inplace_odd",
    [
        lambda x, y: y.add_(x),
        lambda x, y: y.copy_(x),
        lambda x, y: y.mul_(x[0]),
        lambda x, y: x.add_(y.long()),
        lambda x, y: x.copy_(y > 0),
        lambda x, y: x.mul_(y[:1]),
    ],
    T((5, 4), grad=False),
    T((4,), grad=False),
    loose=True,
)
each(
    "inplace_integer",
    [
        lambda x, y: x.add_(y),
        lambda x, y: x.mul_(y),
        lambda x, y: x.copy_(y),
        lambda x, y: x.sub_(1),
        lambda x, y: x.div_(2),
        lambda x, y: x.add_(0.5),
        lambda x, y: x.copy_(y * 0.75),
        lambda x, y: x.bitwise_and_(y),
        lambda x, y: x.floor_divide_(2),
        lambda x, y: x.mul_(1.5),
        lambda x, y: x.eq_(2),
    ],
    WHOLE,
    ROW,
)
each(
    "out",
    [
        lambda x, y, o: torch.add(x, y, out=o),
        lambda x, y, o: torch.mul(x, 2, out=o),
        lambda x, y, o: torch.exp(x, out=o),
        lambda x, y, o: torch.cumsum(x, 0, out=o),
        lambda x, y, o: torch.matmul(x, torch.eye(4, dtype=torch.float64), out=o),
    ],
    T((5, 4), grad=False),
    T((4,), grad=False),
    T((5, 4), grad=False),
    loose=True,
)
each(
    "out_wrong",
    [
        lambda x, o: torch.add(x, 1, out=o),
        lambda x, o: torch.exp(x, out=o),
        lambda x, o: torch.sum(x, 0, out=o),
    ],
    T((5, 4), grad=False),
    T((5, 4), "i"),
    refuses=True,
)
each("out_grad", [lambda x, o: torch.add(x, 1, out=o)], A, T((5, 4)))

# Shapes that do not fit: every rank raises.
each("misfit", [torch.add, torch.mul, torch.where if False else torch.maximum], T((3, 5)), T((4,)))
each(
    "misfit_two",
    [torch.add, lambda x, y: x.add_(y), lambda x, y: x.copy_(y)],
    T((5, 4), grad=False),
    T((5, 3), grad=False),
)
each("misfit_few", [torch.add, torch.mul, torch.minimum], T((5, 8)), T((2,)))
each("misfit_matmul", [torch.matmul, torch.mm, F.linear], T((5, 4)), T((8, 6)))
each("misfit_linear", [F.linear], T((5, 8)), T((3, 4)), T((3,)))
each("misfit_bias", [F.linear], T((5, 4)), T((6, 4)), T((3,)))
each("misfit_bmm", [torch.bmm, torch.matmul], T((2, 5, 4)), T((4, 4, 3)))
each(
    "misfit_cat",
    [lambda x, y: torch.cat([x, y], 0), lambda x, y: torch.stack([x, y], 0)],
    T((5, 4)),
    T((5, 8)),
)
each(
    "misfit_norm",
    [lambda x, w: F.layer_norm(x, (8,), w), lambda x, w: F.rms_norm(x, (4,), w)],
    T((5, 8)),
    T((4,)),
)
each("misfit_loss", [F.cross_entropy], T((4, 6)), T((8,), "i", partial=False))

# Casts.
CASTS = [
    lambda x: x.float(),
    lambda x: x.double(),
    lambda x: x.to(torch.float64),
    lambda x: x.long(),
    lambda x: x.int(),
    lambda x: x.bool(),
    lambda x: x.to("cpu"),
    lambda x: x.to(torch.float64, copy=True),
    lambda x: x.to(x),
    lambda x: x.type_as(x),
    lambda x: x.to(torch.device("cpu"), torch.int64),
    lambda x: x.type(torch.float64),
    lambda x: x.to(dtype=torch.float32).to(torch.float64),
    lambda x: x.cpu(),
    lambda x: x.type(),
    lambda x: x.detach(),
    lambda x: x.contiguous(),
    lambda x: x.clone(),
    lambda x: x.data,
    lambda x: x.to(other=x),
    lambda x: x.short(),
    lambda x: x.clone(memory_format=torch.contiguous_format),
    lambda x: x.requires_grad,
    lambda x: x.to(torch.zeros(2)),
]
each("cast", CASTS, A)
each("cast_integer", CASTS, WHOLE)
each(
    "format",
    [
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.clone(memory_format=torch.channels_last),
        lambda x: torch.zeros_like(x, memory_format=torch.channels_last),
        lambda x: x.contiguous(memory_format=torch.channels_last) * 2,
        lambda x: F.dropout(x.contiguous(memory_format=torch.channels_last)),
    ],
    T((2, 3, 4, 5)),
)

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
    lambda x: x.var(),
    lambda x: x.std(0),
    lambda x: x.var((0, 1), unbiased=False),
    lambda x: torch.var_mean(x, 0),
    lambda x: x.norm(),
    lambda x: x.norm(dim=1),
    lambda x: x.norm(p=1),
    lambda x: torch.linalg.vector_norm(x),
    lambda x: torch.linalg.vector_norm(x, 1),
    lambda x: torch.linalg.vector_norm(x, dim=0),
    lambda x: torch.linalg.vector_norm(x, 2, (0, 1), True),
    lambda x: torch.linalg.vector_norm(x, float("inf")),
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
REDUCED = {"": T((3, 5, 4), "d"), "_empty": T((0, 5, 2), "d"), "_one": T((1, 1, 1), "d")}
for tag, operand in REDUCED.items():
    each(f"reduce{tag}_", REDUCTIONS, operand, loose=True)
each(
    "reduce_scalar",
    [
        lambda x: x.sum(),
        lambda x: x.mean(),
        lambda x: x.sum(0),
        lambda x: x.mean(-1),
        lambda x: x.max(0),
        lambda x: x.amax(0),
        lambda x: x.softmax(0),
        lambda x: x.argmax(),
        lambda x: x.sum(1),
        lambda x: x.cumsum(0),
        lambda x: x.sort(),
        lambda x: x.sort(0),
        lambda x: x.norm(),
        lambda x: x.detach().item(),
        lambda x: x.t(),
        lambda x: x.T if False else x.mean(()),
        lambda x: x.squeeze(),
        lambda x: x.unsqueeze(0),
        lambda x: x.expand(3),
        lambda x: x.reshape(1),
        lambda x: x.view(1, 1),
        lambda x: x.flatten(),
        lambda x: x[None],
        lambda x: x[...],
        lambda x: x[()],
        lambda x: torch.stack([x, x]),
        lambda x: x.view(-1),
        lambda x: x.tolist(),
        lambda x: x.transpose(0, 0),
        lambda x: x.squeeze(0),
        lambda x: torch.cat([x, x]),
        lambda x: x.unbind(),
        lambda x: x.repeat(2),
        lambda x: x[0],
    ],
    N,
    loose=True,
)
each(
    "reduce_integer",
    [
        lambda x: x.sum(),
        lambda x: x.sum(0),
        lambda x: x.max(0),
        lambda x: x.mean(),
        lambda x: x.float().mean(),
        lambda x: x.prod(),
        lambda x: x.sum(dtype=torch.float64),
        lambda x: x.amax(),
        lambda x: x.cumsum(0),
        lambda x: x.bincount() if x.ndim == 1 else x.flatten().bincount(),
        lambda x: x.unique(),
        lambda x: x.sort(1),
        lambda x: x.argsort(1, stable=True),
        lambda x: F.one_hot(x, 6),
        lambda x: x.any(0),
        lambda x: torch.unique(x, return_counts=True),
    ],
    WHOLE,
)

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
    loose=True,
)
each("matmul_small", [torch.matmul, torch.mm], T((2, 3)), T((3, 1)), loose=True)
each("matmul_empty", [torch.matmul, torch.mm], T((5, 0)), T((0, 3)), loose=True)
each("matmul_vector", [torch.matmul, torch.mv], T((5, 4)), B, loose=True)
each(
    "matmul_vectors",
    [torch.matmul, torch.dot, torch.inner, torch.vdot, torch.outer],
    T((6,)),
    T((6,)),
    loose=True,
)
each("vector_matmul", [torch.matmul], T((4,)), T((3, 4, 2)), loose=True)
each("matmul_batch", [torch.matmul, torch.bmm], T((3, 5, 4)), T((3, 4, 2)), loose=True)
each("matmul_broadcast", [torch.matmul], T((3, 1, 5, 4)), T((2, 4, 2)), loose=True)
each("matmul_broadcast_one", [torch.matmul], T((1, 5, 4)), T((3, 4, 2)), loose=True)
each("matmul_two", [torch.matmul], T((3, 5, 4)), T((4, 2)), loose=True)
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
    loose=True,
)
each("linear_one", [F.linear], T((4,)), T((6, 4)), T((6,)), loose=True)
each("linear_scalar", [F.linear], T((5, 4)), T((4,)), loose=True)
ADDED = [
    torch.addmm,
    lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=0.5),
    lambda c, a, b: c.addmm(a, b, beta=0),
    lambda c, a, b: c.clone().addmm_(a, b),
]
each("addmm", ADDED, T((5, 6)), T((5, 4)), T((4, 6)), loose=True)
each("addmm_row", ADDED, T((6,)), T((5, 4)), T((4, 6)), loose=True)
each("addmm_one", ADDED, T((5, 1)), T((5, 4)), T((4, 6)), loose=True)
each(
    "baddbmm",
    [torch.baddbmm, lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2), torch.addbmm],
    T((5, 6)),
    T((3, 5, 4)),
    T((3, 4, 6)),
    loose=True,
)
each("bilinear", [F.bilinear], T((5, 3)), T((5, 4)), T((2, 3, 4)), loose=True)

# Along a dim.
ALONG = [
    lambda x: x.softmax(-1),
    lambda x: F.softmax(x, 0),
    lambda x: F.log_softmax(x, dim=1),
    lambda x: torch.softmax(x, 1, dtype=torch.float32),
    lambda x: F.softmin(x, 0),
    lambda x: x.cumsum(0),
    lambda x: x.cumsum(dim=-1),
    lambda x: x.cumprod(1),
    lambda x: x.logcumsumexp(0),
    lambda x: x.sort(),
    lambda x: x.sort(0, descending=True),
    lambda x: torch.sort(x, dim=1, stable=True),
    lambda x: x.argsort(0),
    lambda x: x.topk(2, 0),
    lambda x: x.tril(),
    lambda x: x.triu(1),
    lambda x: x.tril(diagonal=-1),
    lambda x: x.kthvalue(1, 0),
    lambda x: x.cummax(1),
    lambda x: x.flip(0),
    lambda x: x.roll(1, 0),
    lambda x: x.roll(2),
    lambda x: x.rot90(),
    lambda x: x.softmax(5),
    lambda x: x.cumsum(-3),
    lambda x: F.normalize(x, dim=1),
    lambda x: F.glu(x, -1),
    lambda x: x.diagonal(),
    lambda x: x.trace(),
    lambda x: torch.linalg.qr(x)[1].abs(),
    lambda x: x.renorm(2, 0, 1.0),
    lambda x: F.pad(x, (1, 2)),
    lambda x: torch.cdist(x, x + 1),
    lambda x: x.unfold(0, 2, 1),
    lambda x: x.tile((2, 1)),
    lambda x: x.repeat(2, 2),
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
    lambda x: x.mT,
    lambda x: x.H,
    lambda x: x.adjoint(),
    lambda x: list(x),
    lambda x: [r.sum() for r in x],
    lambda x: x.reshape(-1)[0],
    lambda x: F.gumbel_softmax(x, dim=-1),
    lambda x: x.nonzero(),
    lambda x: x.msort(),
    lambda x: torch.meshgrid(x[0], x[:, 0], indexing="ij"),
    lambda x: torch.combinations(x[0]),
    lambda x: x.fliplr(),
    lambda x: x.block_diag(x) if hasattr(x, "block_diag") else torch.block_diag(x, x),
    lambda x: torch.cov(x),
    lambda x: F.cosine_similarity(x, x + 1),
    lambda x: x.pinverse() if False else torch.linalg.svdvals(x),
    lambda x: torch.broadcast_tensors(x, x[:1]),
    lambda x: x.new_tensor(1.0) + x,
    lambda x: torch.atleast_3d(x),
    lambda x: x.swapaxes(0, 1),
    lambda x: F.mse_loss(x, x * 2),
    lambda x: F.l1_loss(x, x + 1, reduction="sum"),
    lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).double()),
    lambda x: F.kl_div(x, x.softmax(-1), reduction="batchmean"),
    lambda x: F.nll_loss(x, torch.tensor([0, 1, 2, 3, 0])),
    lambda x: F.smooth_l1_loss(x, -x),
    lambda x: F.huber_loss(x, -x, reduction="none"),
    lambda x: F.max_pool1d(x, 2),
    lambda x: F.one_hot(x.argmax(1), 4),
    lambda x: F.prelu(x, x.new_ones(1)),
]
# The sign of a QR is the solver's; ties in sort have no order.
each("along", ALONG, D, loose=True)

# Norms.
each(
    "norm",
    [
        lambda x: F.layer_norm(x, (4,)),
        lambda x: F.rms_norm(x, (4,)),
        lambda x: F.layer_norm(x, [5, 4]),
        lambda x: F.layer_norm(x, normalized_shape=(4,), eps=1e-3),
        lambda x: F.layer_norm(x, (3, 5, 4)),
        lambda x: F.group_norm(x, 1),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.instance_norm(x),
        lambda x: F.layer_norm(x, (5,)),
        lambda x: F.local_response_norm(x, 2),
        lambda x: F.normalize(x, dim=-1),
    ],
    T((3, 5, 4), "d"),
    loose=True,
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
    loose=True,
)
each(
    "norm_uneven",
    [lambda x, w: F.rms_norm(x, (3,), w), lambda x, w: F.layer_norm(x, (3,), w)],
    T((1, 3), "d"),
    T((3,)),
    loose=True,
)

# Embedding.
INDEX = T((3, 5), "i", high=7, partial=True)
TABLE = T((7, 4))
each(
    "embedding",
    [
        F.embedding,
        lambda i, w: F.embedding(i, weight=w),
        lambda i, w: F.embedding(i, w, padding_idx=2),
        lambda i, w: F.embedding(i, w, -1),
        lambda i, w: F.embedding(weight=w, input=i),
        lambda i, w: F.embedding(i, w, padding_idx=0, scale_grad_by_freq=True),
        lambda i, w: F.embedding(i[0, 0], w),
        lambda i, w: F.embedding(i.int(), w),
        lambda i, w: w[i],
        lambda i, w: F.embedding(i, w, 9),
        lambda i, w: F.embedding_bag(i, w),
        lambda i, w: F.embedding(i[:0], w),
        lambda i, w: F.embedding(i.flatten(), w, padding_idx=-7),
        lambda i, w: F.embedding(i, w, -8),
    ],
    INDEX,
    TABLE,
    loose=True,
)
each(
    "embedding_few",
    [F.embedding, lambda i, w: F.embedding(i, w, padding_idx=1)],
    T((6,), "i", high=3),
    T((3, 2)),
    loose=True,
)
each(
    "embedding_outside",
    [F.embedding],
    T((6,), "i", high=12, low=11, partial=False),
    T((7, 4)),
    data=True,
)
each(
    "embedding_below",
    [F.embedding],
    T((6,), "i", high=0, low=-2, partial=False),
    T((7, 4)),
    data=True,
)

# Joining and cutting.
each(
    "join",
    [
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.cat((x, y), 1),
        lambda x, y: torch.cat([x, y], dim=-1),
        lambda x, y: torch.stack([x, y]),
        lambda x, y: torch.stack((x, y), dim=-1),
        lambda x, y: torch.stack([x, y], 1),
        lambda x, y: torch.cat([x, y, x]),
        lambda x, y: torch.hstack([x, y]),
        lambda x, y: torch.vstack([x, y]),
        lambda x, y: torch.cat([x, y], axis=1),
        lambda x, y: torch.concat([x, y], 1),
        lambda x, y: torch.cat([x, torch.zeros(2, 4, dtype=torch.float64)]),
        lambda x, y: torch.cat([x, torch.zeros(0, dtype=torch.float64)]),
        lambda x, y: torch.cat(tensors=[x, y]),
        lambda x, y: torch.cat([x, y], 5),
        lambda x, y: torch.stack([x, y], 4),
        lambda x, y: torch.cat([x]),
        lambda x, y: torch.cat([x, y.float()]),
        lambda x, y: torch.dstack([x, y]),
    ],
    A,
    T((5, 4)),
)
CUTS = [
    lambda x: x.split(2),
    lambda x: x.split([1, 4]),
    lambda x: x.split(3, dim=1),
    lambda x: torch.split(x, 2, 0),
    lambda x: x.chunk(2),
    lambda x: torch.chunk(x, 3, dim=1),
    lambda x: x.tensor_split(2),
    lambda x: x.tensor_split((1, 2), dim=1),
    lambda x: x.unbind(),
    lambda x: x.unbind(1),
    lambda x: torch.unbind(x, dim=-1),
    lambda x: x.split([2, 2]),
    lambda x: x.split_with_sizes([2, 3]),
    lambda x: x.hsplit(2),
    lambda x: x.split(7),
    lambda x: x.chunk(2, 9),
    lambda x: x.chunk(chunks=2, dim=0),
    lambda x: x.split(split_size=2),
    lambda x: torch.split(x, split_size_or_sections=[2, 3], dim=0),
    lambda x: x.tensor_split(torch.tensor([1, 3])),
    lambda x: x.split(0),
    lambda x: x.chunk(8),
]
each("cut", CUTS, A)
each("cut_empty", CUTS, T((0, 4)))

# Views.
VIEWS = [
    lambda x: x.transpose(0, 1),
    lambda x: x.transpose(-1, 0),
    lambda x: x.permute(2, 0, 1),
    lambda x: x.permute((0, 2, 1)),
    lambda x: torch.permute(x, (1, 0, 2)),
    lambda x: x.permute(dims=(2, 1, 0)),
    lambda x: x.mT,
    lambda x: x.movedim(0, -1),
    lambda x: x.movedim((0, 1), (1, 0)),
    lambda x: torch.moveaxis(x, 0, 1),
    lambda x: x.unsqueeze(0),
    lambda x: x.unsqueeze(-1),
    lambda x: x.unsqueeze(dim=1),
    lambda x: x.squeeze(),
    lambda x: x.squeeze(0),
    lambda x: x.squeeze(-1),
    lambda x: x.squeeze((0, 1)),
    lambda x: x.unsqueeze(0).expand(2, -1, -1, -1),
    lambda x: x.expand(2, *x.shape),
    lambda x: x.expand(-1, -1, -1),
    lambda x: x.transpose(0, 5),
    lambda x: x.squeeze(6),
    lambda x: x.unsqueeze(5),
    lambda x: x.expand(3),
    lambda x: x.expand(9, 9, 9, 9),
    lambda x: x.permute(0, 1),
    lambda x: x.permute(0, 0, 1),
    lambda x: x.transpose(dim0=0, dim1=1),
    lambda x: x.swapdims(0, 1),
    lambda x: torch.swapaxes(x, 0, 1),
    lambda x: x.broadcast_to(2, *x.shape),
    lambda x: x.reshape(-1),
    lambda x: x.reshape(x.shape[0], -1),
    lambda x: x.reshape(-1, x.shape[-1]),
    lambda x: x.reshape(1, *x.shape),
    lambda x: x.reshape(x.shape[0], 1, -1),
    lambda x: x.flatten(),
    lambda x: x.flatten(1),
    lambda x: x.flatten(0, 1),
    lambda x: x.flatten(start_dim=1, end_dim=-1),
    lambda x: x.ravel(),
    lambda x: x.unflatten(0, (1, -1)),
    lambda x: x.unflatten(-1, (2, -1)),
    lambda x: torch.unflatten(x, dim=0, sizes=(-1, 1)),
    lambda x: x.unflatten(0, (3, 7)),
    lambda x: x.reshape(7, 11),
    lambda x: x.reshape(shape=(-1,)),
    lambda x: torch.reshape(x, (-1,)),
    lambda x: x.reshape_as(x.transpose(0, 1)),
    lambda x: x.contiguous().view(-1),
    lambda x: x.contiguous().view(-1, x.shape[-1]),
    lambda x: x.contiguous().view_as(x),
    lambda x: x.transpose(0, 1).reshape(-1),
    lambda x: x.transpose(0, 1).contiguous(),
    lambda x: x.transpose(0, 2).flatten(0, 1),
    lambda x: x.repeat_interleave(2, 0),
    lambda x: x.repeat_interleave(3, dim=-1),
    lambda x: torch.repeat_interleave(x, 2, dim=1),
    lambda x: x.repeat_interleave(2),
    lambda x: x.repeat_interleave(0, 1),
    lambda x: x.repeat_interleave(-1, 1),
    lambda x: x.repeat_interleave(torch.arange(x.shape[1]), 1),
    lambda x: x.reshape(-1, -1),
    lambda x: x.flatten(2, 1),
    lambda x: x.flatten(0, 5),
    lambda x: x.transpose(1, 2).transpose(0, 1).clone(),
    lambda x: x.unsqueeze(1).squeeze(1),
    lambda x: (x.transpose(0, 1) * 2).transpose(0, 1),
    lambda x: x.transpose(0, 1) + x.transpose(0, 1),
    lambda x: x.mT.sum(0),
    lambda x: x.permute(2, 0, 1).sum(1),
    lambda x: x.expand_as(torch.zeros(2, *x.shape)),
    lambda x: x.contiguous().view(x.numel()),
    lambda x: x.swapdims(axis0=0, axis1=1) if False else x,
    lambda x: x.view(torch.int64),
    lambda x: x.view(torch.float32),
    lambda x: x.reshape(()),
    lambda x: x.movedim(0, 0),
    lambda x: x.movedim(0, 7),
    lambda x: x.movedim((0, 0), (1, 2)),
    lambda x: x.stride() if x.is_contiguous() and x.numel() else 0,
    lambda x: x.numel(),
    lambda x: x.size(-1),
    lambda x: tuple(x.size()),
    lambda x: x.is_contiguous() if x.numel() else True,
    lambda x: x.dim(),
    lambda x: x.shape[0],
    lambda x: x.unsqueeze(0).transpose(0, 1),
    lambda x: x.transpose(0, 1).unsqueeze(1),
    lambda x: x.T if x.ndim == 2 else x.mT,
    lambda x: x.contiguous().view(size=(-1,)),
]
VIEWED = {
    "even": T((4, 8, 2)),
    "uneven": T((6, 5, 4)),
    "one": T((3, 1, 4)),
    "few": T((2, 3, 1)),
    "empty": T((0, 3, 2)),
    "nested": T((8, 6, 3)),
}
for tag, operand in VIEWED.items():
    each(f"view_{tag}_", VIEWS, operand, strides=tag != "empty")

# Indexing.
INDEXED = [
    lambda x: x[0],
    lambda x: x[-1],
    lambda x: x[:, 1],
    lambda x: x[..., 0],
    lambda x: x[1:],
    lambda x: x[:, :2],
    lambda x: x[::2],
    lambda x: x[None],
    lambda x: x[:, None],
    lambda x: x[..., None],
    lambda x: x[0, 1, 2],
    lambda x: x[1, ..., 1:],
    lambda x: x[:, torch.tensor([0, 2])],
    lambda x: x[[0, 1]],
    lambda x: x[torch.tensor(1)],
    lambda x: x[x > 0],
    lambda x: x[9],
    lambda x: x[:, 0:100],
    lambda x: x[0, 0, 0, 0],
    lambda x: x[::-1],
    lambda x: x[True],
    lambda x: x[:, [0, 1], [1, 0]],
    lambda x: x.select(0, 1),
    lambda x: x.select(dim=1, index=-1),
    lambda x: x.narrow(0, 1, 2),
    lambda x: torch.narrow(x, 1, 0, 1),
    lambda x: x.narrow(0, 2, 9),
    lambda x: x.select(0, 9),
    lambda x: x.select(7, 0),
    lambda x: x[()],
    lambda x: x[...],
    lambda x: x[:],
    lambda x: x[:, :, 1:3],
    lambda x: x[2:1],
    lambda x: x[-2:],
    lambda x: x[0].sum() + x[1].sum(),
    lambda x: x[:, 0] * x[0, 0],
    lambda x: x[None, ..., None],
    lambda x: x[torch.tensor([True, False, True])],
    lambda x: x[..., torch.tensor([[0, 1], [1, 0]])],
    lambda x: torch.select(x, 0, 0),
    lambda x: x[None, None, 1],
]
each("index", INDEXED, E)
SET = [
    lambda x, v: x.__setitem__(0, v),
    lambda x, v: x.__setitem__((slice(None), 1), v),
    lambda x, v: x.__setitem__(slice(1, 3), 2.0),
    lambda x, v: x.__setitem__(torch.tensor([0, 2]), v),
    lambda x, v: x.__setitem__(x > 1, 0.0),
    lambda x, v: x.__setitem__(..., v),
    lambda x, v: x.__setitem__((0, 1, 2), 5.0),
    lambda x, v: x.__setitem__(9, v),
    lambda x, v: x.index_copy_(0, torch.tensor([1]), v.expand(1, 5, 4)),
    lambda x, v: x.index_add_(0, torch.tensor([1, 1]), v.expand(2, 5, 4)),
    lambda x, v: x.scatter_(0, torch.zeros(1, 5, 4, dtype=torch.long), 3.0),
    lambda x, v: x.select(0, 0).copy_(v) if False else None,
]
each("set", [lambda x, v, c=c: (lambda y: (c(y, v), y)[1])(x * 1) for c in SET], E, T((4,)))
each("set_plain", SET, T((3, 5, 4), grad=False), T((4,), grad=False))
each(
    "write_view",
    [
        lambda x, v: (x[0].add_(v), x)[1],
        lambda x, v: (x[:, 1].copy_(v), x)[1],
        lambda x, v: (x.view(-1)[0].zero_() if False else x.transpose(0, 1).mul_(2), x)[1],
        lambda x, v: (x.view(15, 4).add_(v), x)[1],
        lambda x, v: (x.reshape(3, 20).zero_(), x)[1],
        lambda x, v: (x.unsqueeze(0).add_(v), x)[1],
        lambda x, v: (x.narrow(0, 1, 1).fill_(7.0), x)[1],
        lambda x, v: (x.flatten().mul_(3), x)[1],
        lambda x, v: (x.split(1)[1].zero_(), x)[1],
        lambda x, v: (x.detach().add_(1), x)[1],
        lambda x, v: (x.squeeze().add_(1), x)[1],
        lambda x, v: (x.mT.add_(1), x)[1],
        lambda x, v: (x.contiguous().add_(1), x)[1],
        lambda x, v: (x.unbind()[0].add_(1), x)[1],
        lambda x, v: (x.chunk(2, 1)[0].mul_(2), x)[1],
        lambda x, v: (x.to(torch.float64).add_(1), x)[1],
        lambda x, v: (x.expand(3, 5, 4).add_(1), x)[1],
        lambda x, v: (x.data.add_(1), x)[1],
        lambda x, v: (x.unflatten(1, (5, 1)).add_(1), x)[1],
        lambda x, v: (x.diagonal().zero_() if False else x[:, 1:3].zero_(), x)[1],
        lambda x, v: (x[torch.tensor([0])].zero_(), x)[1],
        lambda x, v: (x[...].add_(v), x)[1],
        lambda x, v: (x.select(1, 0)[0].fill_(2.0), x)[1],
        lambda x, v: (x.roll(1).zero_(), x)[1],
        lambda x, v: (x.diagonal().zero_(), x)[1],
        lambda x, v: (x.unfold(0, 1, 1).zero_(), x)[1],
        lambda x, v: (x.hsplit(5)[0].zero_(), x)[1],
        lambda x, v: (next(iter(x)).zero_(), x)[1],
    ],
    T((3, 5, 4), grad=False),
    T((4,), grad=False),
    refuses=True,
)
each(
    "written_view",
    [
        lambda x: (x.view(-1), x.add_(1))[0],
        lambda x: (x[0], x.mul_(2))[0],
        lambda x: (x.transpose(0, 1), x.zero_())[0],
        lambda x: (x.detach(), x.add_(1))[0],
        lambda x: (x.reshape(15, 4), x.add_(1))[0],
    ],
    T((3, 5, 4), grad=False),
    refuses=True,
)

# Attention.
Q, K = T((2, 4, 5, 3)), T((2, 4, 6, 3))
SDPA = F.scaled_dot_product_attention
each(
    "attention",
    [
        SDPA,
        lambda q, k, v: SDPA(q, k, v, is_causal=True),
        lambda q, k, v: SDPA(q, k, value=v, scale=0.3),
        lambda q, k, v: SDPA(q, k, v, attn_mask=torch.ones(5, 6, dtype=torch.bool).tril(1)),
        lambda q, k, v: SDPA(q, k, v, dropout_p=0.4),
        lambda q, k, v: SDPA(q, k, v, dropout_p=0.3, is_causal=True),
        lambda q, k, v: SDPA(q, k, v, torch.zeros(2, 1, 5, 6, dtype=torch.float64).fill_(0.5), 0.2),
        lambda q, k, v: SDPA(query=q, key=k, value=v),
        lambda q, k, v: SDPA(value=v, key=k, query=q),
        lambda q, k, v: SDPA(q[0], k[0], v[0]),
        lambda q, k, v: SDPA(q, k, v, dropout_p=1.5),
        lambda q, k, v: SDPA(q, k, v, torch.ones(4, 1, 1, dtype=torch.bool)),
        lambda q, k, v: SDPA(q, k[:, :, :5], v),
        lambda q, k, v: SDPA(q, k, v, dropout_p=0.5, scale=0.1).transpose(1, 2).reshape(2, 5, 12),
    ],
    Q,
    K,
    T((2, 4, 6, 2)),
    loose=True,
    strides=False,
)
each(
    "attention_gqa",
    [
        lambda q, k, v: SDPA(q, k, v, enable_gqa=True),
        lambda q, k, v: SDPA(q, k, v, enable_gqa=True, is_causal=True),
        lambda q, k, v: SDPA(q, k, v, enable_gqa=True, dropout_p=0.4),
        lambda q, k, v: SDPA(q, k, v),
    ],
    T((2, 8, 5, 4)),
    T((2, 4, 5, 4)),
    T((2, 4, 5, 4)),
    loose=True,
    strides=False,
)
each(
    "attention_odd",
    [
        lambda q, k, v: SDPA(q, k, v, enable_gqa=True),
        lambda q, k, v: SDPA(q, k, v, dropout_p=0.4, enable_gqa=True),
    ],
    T((3, 6, 2, 4)),
    T((3, 2, 2, 4)),
    T((3, 2, 2, 4)),
    loose=True,
    strides=False,
)
each(
    "attention_one",
    [SDPA, lambda q, k, v: SDPA(q, k, v, enable_gqa=True)],
    T((2, 4, 5, 3)),
    T((1, 4, 6, 3)),
    T((1, 4, 6, 3)),
    loose=True,
    strides=False,
)
each(
    "attention_head",
    [SDPA],
    T((2, 4, 5, 3)),
    T((2, 1, 6, 3)),
    T((2, 1, 6, 3)),
    loose=True,
    strides=False,
)
each(
    "attention_mask",
    [
        lambda q, k, v, m: SDPA(q, k, v, m),
        lambda q, k, v, m: SDPA(q, k, v, attn_mask=m, dropout_p=0.2),
        lambda q, k, v, m: SDPA(q, k, v, m > 0),
        lambda q, k, v, m: SDPA(q, k, v, attn_mask=m[:, :1]),
        lambda q, k, v, m: SDPA(q, k, v, m[0]),
        lambda q, k, v, m: SDPA(q, k, attn_mask=m, value=v),
    ],
    Q,
    K,
    K,
    T((2, 4, 5, 6), grad=False),
    loose=True,
    strides=False,
)

# Losses.
LOSS = [
    F.cross_entropy,
    lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    lambda x, t: F.cross_entropy(x, t, reduction="none"),
    lambda x, t: F.cross_entropy(x, t, ignore_index=1),
    lambda x, t: F.cross_entropy(x, t, label_smoothing=0.2),
    lambda x, t: F.cross_entropy(x, t, ignore_index=0, reduction="sum"),
    lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, reduction="none"),
    lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, ignore_index=2),
    lambda x, t: F.cross_entropy(x, target=t),
    lambda x, t: F.cross_entropy(input=x, target=t),
    lambda x, t: F.cross_entropy(target=t, input=x),
    lambda x, t: F.cross_entropy(x, t * 0 - 100),
    lambda x, t: F.cross_entropy(x, t, reduction="wrong"),
    lambda x, t: F.cross_entropy(x, t + 50),
    lambda x, t: F.nll_loss(F.log_softmax(x, 1), t),
    lambda x, t: F.cross_entropy(x, t, ignore_index=1, reduction="none"),
    lambda x, t: F.cross_entropy(x.float(), t).double().round(decimals=5),
    lambda x, t: F.cross_entropy(x, t.where(t > 0, -100)),
    lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, ignore_index=1, reduction="sum"),
    lambda x, t: F.multi_margin_loss(x, t),
    lambda x, t: F.cross_entropy(x, t, ignore_index=255),
    lambda x, t: F.cross_entropy(x, t.where(t > 0, 255), ignore_index=255),
    lambda x, t: F.cross_entropy(x * 100, t),
    lambda x, t: F.cross_entropy(x, t - 10),
]
for tag, rows, classes in (
    ("even", 8, 8),
    ("uneven", 5, 7),
    ("few", 2, 3),
    ("none", 0, 6),
    ("classes", 6, 2),
):
    each(
        f"loss_{tag}_",
        LOSS,
        T((rows, classes)),
        T((rows,), "i", high=classes),
        loose=True,
        data=True,
    )
each("loss_dims", LOSS, T((3, 4, 5)), T((3, 5), "i", high=4), loose=True, data=True)
each(
    "loss_empty_dims",
    LOSS[:9],
    T((1, 4, 2, 3)),
    T((1, 2, 3), "i", high=4),
    loose=True,
    strides=False,
)
WEIGHTED = [
    lambda x, t, w: F.cross_entropy(x, t, w),
    lambda x, t, w: F.cross_entropy(x, t, weight=w, reduction="sum"),
    lambda x, t, w: F.cross_entropy(x, t, w, reduction="none"),
    lambda x, t, w: F.cross_entropy(x, t, w, ignore_index=1),
    lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.2),
    lambda x, t, w: F.cross_entropy(x, t.where(t > 0, 255), w, ignore_index=255),
    lambda x, t, w: F.cross_entropy(x, weight=w, target=t),
    lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1, ignore_index=2, reduction="sum"),
]
each(
    "loss_weighted", WEIGHTED, T((5, 6)), T((5,), "i", high=6), T((6,), "p", grad=False), loose=True
)
each(
    "loss_weighted_dims",
    WEIGHTED,
    T((3, 4, 5)),
    T((3, 5), "i", high=4),
    T((4,), "p", grad=False),
    loose=True,
)
each(
    "loss_soft",
    [F.cross_entropy, lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, reduction="sum")],
    T((5, 6)),
    T((5, 6), "p"),
    loose=True,
)
each(
    "loss_single",
    [F.cross_entropy, lambda x, t: F.cross_entropy(x, t, reduction="sum")],
    T((6,)),
    T((), "i", high=6),
    loose=True,
)

# Random: the same bits and the same place in the stream afterwards.
RANDOM = [
    F.dropout,
    lambda x: F.dropout(x, 0.1),
    lambda x: F.dropout(x, p=0.7, training=True),
    lambda x: F.dropout(x, 0.0),
    lambda x: F.dropout(x, 1.0),
    lambda x: F.dropout(x, training=False),
    lambda x: F.dropout(x * 1, 0.5, inplace=True),
    lambda x: torch.dropout(x, 0.3, True),
    lambda x: torch.dropout(x, 0.3, False),
    lambda x: (x * 1).uniform_(),
    lambda x: x.detach().clone().uniform_(-1, 2),
    lambda x: x.detach().clone().normal_(),
    lambda x: x.detach().clone().normal_(1.0, 3.0),
    lambda x: x.detach().clone().normal_(std=0.02),
    lambda x: x.detach().clone().bernoulli_(),
    lambda x: x.detach().clone().bernoulli_(0.2),
    lambda x: torch.rand_like(x),
    lambda x: torch.randn_like(x),
    lambda x: torch.rand_like(x, dtype=torch.float32),
    lambda x: torch.randn_like(x, requires_grad=True),
    lambda x: torch.randint_like(x, 7),
    lambda x: torch.randint_like(x, 2, 9),
    lambda x: torch.randint_like(x, low=1, high=3),
    lambda x: torch.randn_like(input=x),
    lambda x: torch.rand_like(x.detach(), device="cpu"),
    lambda x: torch.bernoulli(x.sigmoid()),
    lambda x: torch.bernoulli(x, 0.3),
    lambda x: x.detach().clone().exponential_(),
    lambda x: x.detach().clone().random_(),
    lambda x: x.detach().clone().log_normal_(),
    lambda x: x.detach().clone().geometric_(0.4),
    lambda x: F.dropout1d(x),
    lambda x: F.alpha_dropout(x),
    lambda x: F.feature_alpha_dropout(x),
    lambda x: F.rrelu(x, training=True),
    lambda x: torch.normal(x, 1.0),
    lambda x: x.detach().clone().uniform_(to=3.0),
    lambda x: F.dropout(x, 1.5),
    lambda x: F.dropout(x, -0.1),
    lambda x: x.detach().clone().uniform_(2, 1),
    lambda x: x.detach().clone().normal_(0, -1),
    lambda x: torch.dropout(x, 2.0, True),
    lambda x: x.detach().clone().bernoulli_(2.0),
    lambda x: F.dropout(F.dropout(x)),
    lambda x: F.dropout(x) + torch.rand_like(x),
    lambda x: torch.empty_like(x).uniform_(),
    lambda x: torch.nn.Dropout(0.25)(x),
    lambda x: torch.nn.Dropout(0.25).eval()(x),
    lambda x: F.dropout(x.transpose(0, 1)),
    lambda x: torch.rand_like(x.transpose(0, 1)),
    lambda x: torch.multinomial(x[..., 0].detach().abs() + 0.1, 2),
    lambda x: F.dropout(x.sum(0)),
    lambda x: torch.rand_like(x, memory_format=torch.contiguous_format),
    lambda x: F.dropout(input=x),
    lambda x: torch.dropout(x, p=0.3, train=True),
    lambda x: torch.rand_like(x, generator=torch.Generator().manual_seed(3)) if False else x,
    lambda x: x.detach().clone().normal_(generator=torch.Generator().manual_seed(3)),
    lambda x: torch.dropout_(x * 1, 0.3, True),
    lambda x: F.dropout2d(x.unsqueeze(0)),
]
for tag, shape in (
    ("even", (8, 4)),
    ("uneven", (5, 7)),
    ("few", (2, 3)),
    ("large", (37, 9)),
    ("empty", (0, 4)),
):
    each(f"random_{tag}_", RANDOM, T(shape))
each("random_scalar", RANDOM[:30], N)

# Factories.
each(
    "factory",
    [
        torch.zeros_like,
        torch.ones_like,
        lambda x: torch.full_like(x, 3.5),
        lambda x: torch.zeros_like(x, dtype=torch.int64),
        lambda x: torch.ones_like(x, requires_grad=True),
        lambda x: torch.zeros_like(input=x),
        lambda x: torch.full_like(x, fill_value=2),
        lambda x: x.new_zeros(3, 2),
        lambda x: x.new_ones((2,)),
        lambda x: x.new_full((2, 2), 1.5),
        lambda x: x.new_tensor([1.0, 2.0]),
        lambda x: x.new_zeros(2, dtype=torch.int64),
        lambda x: torch.empty_like(x).fill_(1.0),
        lambda x: x.new_empty(2, 3).zero_(),
        lambda x: torch.zeros_like(x.transpose(0, 1)),
        lambda x: torch.zeros_like(x, memory_format=torch.contiguous_format),
        lambda x: x.new_zeros(size=(2, 2)),
        lambda x: torch.full_like(x, True, dtype=torch.bool),
        lambda x: torch.zeros_like(x, device="cpu") + x,
        lambda x: torch.empty_like(x, dtype=torch.bool).fill_(True),
        lambda x: x.new_ones(2, requires_grad=True),
        lambda x: x * x.new_ones(4),
        lambda x: x.new_empty_strided((2, 3), (1, 2)).zero_(),
        lambda x: torch.empty_like(x).copy_(x),
    ],
    A,
)

# nn.init.
INIT = torch.nn.init
each(
    "init",
    [
        INIT.uniform_,
        INIT.normal_,
        lambda w: INIT.uniform_(w, -1, 2),
        lambda w: INIT.normal_(w, std=0.02),
        lambda w: INIT.normal_(w, 1.0, 0.5),
        lambda w: INIT.constant_(w, 3.0),
        INIT.ones_,
        INIT.zeros_,
        INIT.xavier_uniform_,
        INIT.xavier_normal_,
        INIT.kaiming_uniform_,
        lambda w: INIT.kaiming_normal_(w, mode="fan_out", nonlinearity="relu"),
        INIT.eye_,
        INIT.trunc_normal_,
        lambda w: INIT.trunc_normal_(w, std=0.02, a=-0.1, b=0.1),
        INIT.orthogonal_,
        lambda w: INIT.sparse_(w, 0.3),
        lambda w: INIT.uniform_(w, b=3.0),
        lambda w: INIT.uniform_(w, a=-3.0),
        lambda w: INIT.normal_(w, generator=torch.Generator().manual_seed(5)),
        lambda w: INIT.uniform_(tensor=w),
        lambda w: INIT.constant_(w, val=2.0),
        INIT.dirac_,
        lambda w: INIT.kaiming_uniform_(w, a=5**0.5),
        lambda w: INIT.constant_(tensor=w, val=2.0),
        lambda w: INIT.zeros_(tensor=w),
    ],
    T((6, 5)),
    loose=True,
)

# Lists of tensors.
FOREACH = [
    "add",
    "sub",
    "mul",
    "div",
    "maximum",
    "minimum",
    "addcmul",
    "addcdiv",
    "lerp",
    "sqrt",
    "neg",
    "abs",
    "exp",
    "pow",
    "reciprocal",
    "clamp_min",
    "clamp_max",
    "sign",
]
for name in FOREACH:
    func, place = getattr(torch, f"_foreach_{name}"), getattr(torch, f"_foreach_{name}_")
    if name in ("addcmul", "addcdiv"):
        each(
            f"foreach_{name}_",
            [
                lambda x, y, z, f=func: f([x, y], [y, z], [z, x]),
                lambda x, y, z, f=place: (f([x, z], [y, y], [z, y], 0.5), x, z)[1:],
                lambda x, y, z, f=func: f([x, y], [y, z], [z, x], value=2.0),
                lambda x, y, z, f=func: f([x, y], [y, z], [z, x], scalars=[1.0, 2.0]),
            ],
            *[T((5, 4), "p", grad=False)] * 3,
            loose=True,
        )
    elif name == "lerp":
        each(
            "foreach_lerp_",
            [
                lambda x, y, z: torch._foreach_lerp([x, y], [y, z], 0.3),
                lambda x, y, z: (torch._foreach_lerp_([x], [y], [z]), x)[1],
            ],
            *[T((5, 4), "p", grad=False)] * 3,
            loose=True,
        )
    elif name in ("sqrt", "neg", "abs", "exp", "reciprocal", "sign"):
        each(
            f"foreach_{name}_",
            [
                lambda x, y, z, f=func: f([x, y, z]),
                lambda x, y, z, f=place: (f([x, y]), x, y),
                lambda x, y, z, f=place: f((x, z)),
            ],
            *[T((5, 4), "p", grad=False)] * 3,
            loose=True,
        )
    else:
        each(
            f"foreach_{name}_",
            [
                lambda x, y, z, f=func: f([x, y], [y, z]),
                lambda x, y, z, f=func: f([x, y, z], 2.0),
                lambda x, y, z, f=func: f([x, y], [2.0, 3.0]),
                lambda x, y, z, f=place: (f([x, z], [y, y]), x, z),
                lambda x, y, z, f=place: (f([x, z], 2), x, z),
            ],
            *[T((5, 4), "p", grad=False)] * 3,
            loose=True,
        )
each(
    "foreach_more",
    [
        lambda x, y, z: torch._foreach_norm([x, y, z]),
        lambda x, y, z: torch._foreach_norm([x, y], 1),
        lambda x, y, z: torch._foreach_norm([x, y], ord=float("inf")),
        lambda x, y, z: (torch._foreach_zero_([x, y]), x, y),
        lambda x, y, z: (torch._foreach_copy_([x, y], [z, z]), x, y),
        lambda x, y, z: torch._foreach_add([x, y], [y, z], alpha=2),
        lambda x, y, z: torch._foreach_mul([x, y], z.sum()),
        lambda x, y, z: (torch._foreach_mul_([x, y], z.mean()), x, y),
        lambda x, y, z: (torch._foreach_div_([x, y], torch.tensor(2.0, dtype=torch.float64)), x, y),
        lambda x, y, z: torch._foreach_pow(2.0, [x, y]),
        lambda x, y, z: torch._foreach_max([x, y]),
        lambda x, y, z: torch._foreach_tanh([x, y]),
        lambda x, y, z: (torch._foreach_tanh_([x, y]), x, y),
        lambda x, y, z: torch._foreach_add([x, y * 2], 1),
        lambda x, y, z: torch._foreach_add([x, y[0]], [z, z[1]]),
        lambda x, y, z: torch._foreach_add([x, y], [z]),
        lambda x, y, z: torch._foreach_norm([x, y.float()], 2, torch.float64),
        lambda x, y, z: torch._foreach_add_(self=[x], other=[y]) if False else None,
        lambda x, y, z: torch._foreach_add([x, y.T], [z, z.T]),
        lambda x, y, z: torch._foreach_sum([x]) if hasattr(torch, "_foreach_sum") else None,
        lambda x, y, z: torch._foreach_rsqrt([x]),
        lambda x, y, z: torch._foreach_clone([x]) if hasattr(torch, "_foreach_clone") else None,
    ],
    *[T((5, 4), "p", grad=False)] * 3,
    loose=True,
)
each(
    "foreach_grad",
    [
        lambda x, y: torch._foreach_mul([x, y], [y, x]),
        lambda x, y: torch._foreach_add([x, y], 1.0),
        lambda x, y: torch._foreach_mul([x], y),
        lambda x, y: torch._foreach_exp([x, y]),
        lambda x, y: torch._foreach_norm([y, y * 2]),
    ],
    A,
    T((5, 4)),
    loose=True,
)

# What has no rule, on images.
each(
    "image",
    [
        lambda x, w: F.conv2d(x, w),
        lambda x, w: F.conv2d(x, w, padding=1, stride=2),
        lambda x, w: F.interpolate(x, scale_factor=2),
        lambda x, w: F.max_pool2d(x, 2),
        lambda x, w: F.avg_pool2d(x, 2),
        lambda x, w: F.adaptive_avg_pool2d(x, 1),
        lambda x, w: F.unfold(x, 2),
        lambda x, w: F.pixel_shuffle(x.repeat(1, 4, 1, 1)[:, :4], 2),
        lambda x, w: F.group_norm(x, 3),
        lambda x, w: F.batch_norm(x, None, None, training=True),
        lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w),
    ],
    T((4, 3, 6, 6)),
    T((2, 3, 3, 3)),
    loose=True,
    strides=False,
)
