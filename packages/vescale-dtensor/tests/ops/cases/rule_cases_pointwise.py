"""Cases: pointwise ops, in place and with `out=`; shapes that do not fit; casts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rule_fuzz import T
from rule_table import BOOL, ROW, WHOLE, A, B, C, E, N, P, add, each

# Pointwise: one operand, two, broadcasting, numbers, in place, out=.
UNARY = """abs ceil cos cosh erf exp expm1 floor neg positive relu round sigmoid sign sin sinh
square tan tanh frac trunc isfinite isnan signbit reciprocal rad2deg deg2rad sgn nan_to_num
atan asinh erfc exp2 sinc logical_not asin clone detach"""
for name in UNARY.split():
    add(f"unary_{name}", getattr(torch, name), A if name != "asin" else T((5, 4), "f"))
for name in ["log", "sqrt", "rsqrt", "log2", "log10", "log1p", "lgamma", "digamma"]:
    add(f"positive_{name}", getattr(torch, name), P)
ACTIVATIONS = """gelu silu mish softplus elu celu selu leaky_relu relu6 hardtanh hardswish
hardsigmoid logsigmoid softsign tanhshrink softshrink hardshrink"""
for name in ACTIVATIONS.split():
    add(f"activation_{name}", getattr(F, name), A)
BINARY = "add sub mul maximum minimum atan2 hypot eq ne lt le gt ge fmod remainder copysign"
for name in BINARY.split():
    func = getattr(torch, name)
    add(f"binary_{name}", func, A, T((5, 4), "p"))
    add(f"broadcast_{name}", func, E, T((4,), "p"))
    add(f"outer_{name}", func, C, T((1, 4), "p"))
    add(f"scalar_{name}", func, A, T((), "p"))
    add(f"scalar_first_{name}", func, N, T((3, 4), "p"))
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
)
INTEGERS = [
    torch.bitwise_and,
    torch.bitwise_or,
    torch.bitwise_xor,
    torch.logical_and,
    torch.logical_or,
    torch.logical_xor,
    torch.gcd,
    torch.lcm,
    torch.add,
    torch.mul,
    torch.sub,
    lambda x, y: x // y,
    lambda x, y: x % y,
    lambda x, y: x / y,
    lambda x, y: x & y,
    lambda x, y: x | y,
    lambda x, y: x ^ y,
    lambda x, y: x << 1,
    lambda x, y: x >> y,
    lambda x, y: ~x,
    lambda x, y: -x,
    lambda x, y: x == y,
    lambda x, y: x * 2,
    lambda x, y: x + 0.5,
    lambda x, y: x * 1.5,
    lambda x, y: x**2,
    lambda x, y: x.div(2),
    lambda x, y: x.long(),
    lambda x, y: torch.where(x, y, x),
]
each("integer", INTEGERS, WHOLE, ROW)
each("bool", INTEGERS, BOOL, T((4,), "b"))
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
    exact=True,
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
            refuses=index in (31, 32),
        )
    add(
        f"inplace_after{index}",
        lambda x, y, call=call: call(x * 1, y),
        P,
        T((4,), "p"),
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
    exact=True,
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
    exact=True,
)
each("out_grad", [lambda x, o: torch.add(x, 1, out=o)], A, T((5, 4)), exact=True)

# Shapes that do not fit: every rank raises.
each(
    "misfit",
    [torch.add, torch.mul, torch.where if False else torch.maximum],
    T((3, 5)),
    T((4,)),
    exact=True,
)
each(
    "misfit_two",
    [torch.add, lambda x, y: x.add_(y), lambda x, y: x.copy_(y)],
    T((5, 4), grad=False),
    T((5, 3), grad=False),
    exact=True,
)
each("misfit_few", [torch.add, torch.mul, torch.minimum], T((5, 8)), T((2,)), exact=True)
each("misfit_matmul", [torch.matmul, torch.mm, F.linear], T((5, 4)), T((8, 6)), exact=True)
each("misfit_linear", [F.linear], T((5, 8)), T((3, 4)), T((3,)), exact=True)
each("misfit_bias", [F.linear], T((5, 4)), T((6, 4)), T((3,)), exact=True)
each("misfit_bmm", [torch.bmm, torch.matmul], T((2, 5, 4)), T((4, 4, 3)), exact=True)
each(
    "misfit_cat",
    [lambda x, y: torch.cat([x, y], 0), lambda x, y: torch.stack([x, y], 0)],
    T((5, 4)),
    T((5, 8)),
    exact=True,
)
each(
    "misfit_norm",
    [lambda x, w: F.layer_norm(x, (8,), w), lambda x, w: F.rms_norm(x, (4,), w)],
    T((5, 8)),
    T((4,)),
    exact=True,
)
each("misfit_loss", [F.cross_entropy], T((4, 6)), T((8,), "i", partial=False), exact=True)

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
each("cast", CASTS, A, exact=True)
each("cast_integer", CASTS, WHOLE, exact=True)
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
    exact=True,
)
