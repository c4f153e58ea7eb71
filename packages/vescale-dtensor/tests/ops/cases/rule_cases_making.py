"""Cases: random numbers, factories, initialisers and lists of tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rule_fuzz import T
from rule_table import A, N, each

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
    lambda x: F.dropout(x.sum(0)),
    lambda x: torch.rand_like(x, memory_format=torch.contiguous_format),
    lambda x: F.dropout(input=x),
    lambda x: torch.dropout(x, p=0.3, train=True),
    lambda x: x.detach().clone().normal_(generator=torch.Generator().manual_seed(3)),
    lambda x: torch.dropout_(x * 1, 0.3, True),
]
SHAPES = {"even": (8, 4), "uneven": (5, 7), "few": (2, 3), "large": (37, 9), "empty": (0, 4)}
for tag, shape in SHAPES.items():
    each(f"random_{tag}_", RANDOM, T(shape), exact=True)
each("random_scalar", RANDOM[:25], N, exact=True)

# The rest of the random ops, and the forms of their arguments.
FURTHER = [
    lambda x: x.detach().clone().exponential_(2.5),
    lambda x: x.detach().clone().exponential_(lambd=0.5),
    lambda x: x.detach().clone().geometric_(p=0.1),
    lambda x: x.detach().clone().cauchy_(),
    lambda x: x.detach().clone().cauchy_(1.0, sigma=0.5),
    lambda x: x.detach().clone().log_normal_(0.0, std=0.25),
    lambda x: x.detach().clone().random_(9),
    lambda x: x.detach().clone().random_(to=9),
    lambda x: x.detach().clone().random_(-4, 9),
    lambda x: x.detach().clone().random_(-4, to=9),
    lambda x: x.detach().clone().random_(5, None),
    lambda x: x.detach().long().random_(-5, 2**40),
    lambda x: x.detach().long().random_(),
    lambda x: x.detach().bool().random_(),
    lambda x: x.detach().clone().random_(9, 4),
    lambda x: x.detach().clone().exponential_(-1.0),
    lambda x: x.detach().clone().exponential_(generator=torch.Generator().manual_seed(3)),
    lambda x: (x * 1).exponential_(),
    lambda x: torch.empty_like(x.detach()).bernoulli_(x.detach().sigmoid()),
    lambda x: torch.empty_like(x.detach()).bernoulli_(p=x.detach().sigmoid()),
    lambda x: torch.empty_like(x.detach()).bernoulli_(x.detach()[:1].sigmoid()),
    lambda x: torch.empty_like(x, dtype=torch.bool).bernoulli_(x.detach().sigmoid()),
    lambda x: x.sigmoid().bernoulli(),
    lambda x: x.detach().bernoulli(0.2),
    lambda x: torch.bernoulli(x.sigmoid(), generator=torch.Generator().manual_seed(3)),
    lambda x: torch.bernoulli(x.transpose(0, 1).sigmoid()),
    lambda x: torch.bernoulli(input=x.sigmoid()),
    lambda x: torch.normal(0.5, x.sigmoid()),
    lambda x: torch.normal(x, x.sigmoid()),
    lambda x: torch.normal(mean=x, std=0.5),
    lambda x: torch.normal(x[:1], x.sigmoid()),
    lambda x: torch.normal(x.transpose(0, 1), 2.0),
    lambda x: torch.normal(x, -1.0),
    lambda x: torch.multinomial(x.detach().abs() + 0.1, 1),
    lambda x: torch.multinomial(x.detach().abs() + 0.1, 3),
    lambda x: torch.multinomial(x.detach().abs() + 0.1, 5, replacement=True),
    lambda x: torch.multinomial(x.detach().abs() + 0.1, 5, True),
    lambda x: (x.detach().abs() + 0.1).multinomial(num_samples=2),
    lambda x: torch.multinomial((x.detach().abs() + 0.1).transpose(0, 1), 2),
    lambda x: torch.multinomial(x.detach().abs() + 0.1, 99),
    lambda x: torch.poisson(x.detach().abs() * 5),
    lambda x: torch.binomial(torch.full_like(x.detach(), 9.0), x.detach().sigmoid()),
    lambda x: F.rrelu(x, 0.1, 0.4, training=True),
    lambda x: F.rrelu(x, 0.1, 0.4),
    lambda x: torch.rrelu(x, 0.1, 0.4, True),
    lambda x: F.alpha_dropout(x, 0.3, training=True),
    lambda x: F.alpha_dropout(x, 0.3, training=False),
    lambda x: F.alpha_dropout(x, 0.0, True),
    lambda x: F.alpha_dropout(x, 1.0, True),
    lambda x: F.alpha_dropout(x * 1, 0.3, True, True),
    lambda x: torch.alpha_dropout(x, 0.3, True),
    lambda x: torch.nn.AlphaDropout(0.3)(x),
    lambda x: F.feature_alpha_dropout(x, 0.3, True),
    lambda x: torch.feature_alpha_dropout(x, 0.3, True),
    lambda x: torch.feature_dropout(x, 0.3, True),
    lambda x: F.dropout1d(x, 0.3),
    lambda x: F.dropout1d(x),
    lambda x: F.dropout1d(x.unsqueeze(0), 0.3),
    lambda x: F.dropout1d(x, 0.3, inplace=False, training=False),
    lambda x: F.dropout2d(x.unsqueeze(-1).unsqueeze(-1), 0.3),
    lambda x: F.dropout2d(x.reshape(1, *x.shape, 1), 0.3),
    lambda x: F.dropout3d(x.reshape(*x.shape, 1, 1, 1), 0.3),
    lambda x: F.dropout1d(x, 1.3),
    lambda x: torch.native_dropout(x, 0.3, True),
    lambda x: torch.native_dropout(x, 0.3, False),
    lambda x: torch.native_dropout(x, 0.0, True),
    lambda x: F.gumbel_softmax(x.detach(), tau=0.5),
    lambda x: F.gumbel_softmax(x.detach(), dim=0),
    lambda x: F.gumbel_softmax(x.detach(), hard=True),
    lambda x: INIT.trunc_normal_(x.detach().clone(), std=1.0),
    lambda x: INIT.xavier_normal_(x.detach().clone()),
]
INIT = torch.nn.init
for tag in ("even", "uneven", "few"):
    each(f"draws_{tag}_", FURTHER, T(SHAPES[tag]))
# Wrong on the ranks that hold what is wrong.
each(
    "draws_refused_",
    [lambda x: torch.empty_like(x).bernoulli_(x)],
    T((5, 7), grad=False),
    data=True,
    exact=True,
)

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
    exact=True,
)

# nn.init.
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
        lambda w: INIT.uniform_(w, a=-3.0),
        lambda w: INIT.normal_(w, generator=torch.Generator().manual_seed(5)),
        lambda w: INIT.uniform_(tensor=w),
        INIT.dirac_,
        lambda w: INIT.kaiming_uniform_(w, a=5**0.5),
        lambda w: INIT.constant_(tensor=w, val=2.0),
        lambda w: INIT.zeros_(tensor=w),
    ],
    T((6, 5)),
)

# Lists of tensors.
LISTS = [T((5, 4), "p", grad=False)] * 3


def foreach(names, *calls):
    """Calls of functions of lists, `f`, and of those that write to the first list, `g`."""
    for name in names.split():
        pair = getattr(torch, f"_foreach_{name}"), getattr(torch, f"_foreach_{name}_")
        bound = [lambda x, y, z, call=call, pair=pair: call(*pair, x, y, z) for call in calls]
        each(f"foreach_{name}_", bound, *LISTS)


foreach(
    "addcmul addcdiv",
    lambda f, g, x, y, z: f([x, y], [y, z], [z, x]),
    lambda f, g, x, y, z: (g([x, z], [y, y], [z, y], 0.5), x, z)[1:],
    lambda f, g, x, y, z: f([x, y], [y, z], [z, x], value=2.0),
    lambda f, g, x, y, z: f([x, y], [y, z], [z, x], scalars=[1.0, 2.0]),
)
foreach(
    "lerp",
    lambda f, g, x, y, z: f([x, y], [y, z], 0.3),
    lambda f, g, x, y, z: (g([x], [y], [z]), x)[1],
)
foreach(
    "sqrt neg abs exp reciprocal sign",
    lambda f, g, x, y, z: f([x, y, z]),
    lambda f, g, x, y, z: (g([x, y]), x, y),
    lambda f, g, x, y, z: g((x, z)),
)
foreach(
    "add sub mul div maximum minimum pow clamp_min clamp_max",
    lambda f, g, x, y, z: f([x, y], [y, z]),
    lambda f, g, x, y, z: f([x, y, z], 2.0),
    lambda f, g, x, y, z: f([x, y], [2.0, 3.0]),
    lambda f, g, x, y, z: (g([x, z], [y, y]), x, z),
    lambda f, g, x, y, z: (g([x, z], 2), x, z),
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
        lambda x, y, z: torch._foreach_add([x, y.T], [z, z.T]),
        lambda x, y, z: torch._foreach_sum([x]) if hasattr(torch, "_foreach_sum") else None,
        lambda x, y, z: torch._foreach_rsqrt([x]),
        lambda x, y, z: torch._foreach_clone([x]) if hasattr(torch, "_foreach_clone") else None,
    ],
    *[T((5, 4), "p", grad=False)] * 3,
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
    flags=False,
)
