"""Modules that make their parameters and buffers in many ways, for models without storage."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn import init
from torch.nn.utils import parametrizations


class Rotary(nn.Module):
    """Buffers that are computed, an attribute that shares one, a list, numbers read of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2, dtype=torch.int64).float() / 8))
        self.register_buffer("inverse", inverse, persistent=False)
        self.original = self.inverse
        self.kept = [torch.outer(torch.arange(5).float(), inverse)]
        mask = torch.tril(torch.ones(5, 5, dtype=torch.bool)).view(1, 1, 5, 5)
        self.register_buffer("mask", mask)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.scaled = nn.Parameter(torch.randn(5, 3) * 0.02)
        self.shifted = nn.Parameter(torch.rand(7) - self.scaled.detach().mean())


class Written(nn.Module):
    """Parameters that are written to by parts, through `.data`, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.linear.weight.data = torch.randn(7, 5).t().contiguous().t()
        self.rows = nn.Linear(6, 8)
        self.rows.weight.data.mul_(0.5).clamp_(-0.1, 0.1)
        with torch.no_grad():
            self.linear.weight[2:4].normal_()
            self.linear.bias[1] = 3
            self.rows.weight[1:3, 2:5].fill_(2.0)
            self.rows.weight[:, 0] = -1.0
        if (self.rows.weight > 10).any():
            raise AssertionError("a wrong number was read")


class Tied(nn.Module):
    """An embedding with padding, tied to a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 6, padding_idx=3), nn.Linear(6, 20, bias=False)
        self.head.weight = self.embed.weight


def _filled(fill: Callable[..., Any], shape: tuple[int, ...] = (6, 5), **how: Any) -> Any:
    def build() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(shape))
        fill(module.weight, **how)
        # What follows has to find the generator where one device leaves it.
        module.next = nn.Parameter(torch.randn(3, 4))
        return module

    return build


def _of(*make: Callable[[], torch.Tensor]) -> Any:
    return lambda: nn.ParameterList([nn.Parameter(one()) for one in make])


def _drawn(method: str, *args: Any, dtype: torch.dtype = torch.float32) -> Any:
    return lambda: getattr(torch.empty(5, 7, dtype=dtype), method)(*args).float()


ZOO: dict[str, Callable[[], nn.Module]] = {
    "rotary": Rotary,
    "written": Written,
    "tied": Tied,
    "linear": lambda: nn.Linear(40, 30),
    "lstm": lambda: nn.LSTM(3, 4, 2),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False
    ),
    "convolution": lambda: nn.Conv2d(3, 4, 3),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "prelu": nn.PReLU,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
    "orthogonal parametrization": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "copied": lambda: nn.ModuleList([copy.deepcopy(nn.Linear(3, 5)), nn.Linear(2, 2)]),
    "half": lambda: nn.Linear(9, 5).half(),
    "bfloat16": lambda: nn.Linear(9, 5, dtype=torch.bfloat16),
    "double": lambda: nn.Linear(9, 5).double(),
    "truncated": _filled(init.trunc_normal_, (20, 10), std=0.02, a=-0.03, b=0.03),
    "truncated, far": _filled(init.trunc_normal_, a=1.0, b=2.0),
    "orthogonal": _filled(init.orthogonal_),
    "orthogonal, wide": _filled(init.orthogonal_, (4, 9)),
    "orthogonal, kernels": _filled(init.orthogonal_, (3, 4, 5), gain=2.0),
    "turned in place": _of(
        lambda: torch.randn(3, 5).t_(),
        lambda: torch.randn(3, 1, 4).squeeze_(1).unsqueeze_(0).mul_(2),
        lambda: torch.randn(4, 3, 2).transpose_(0, 2),
        lambda: torch.randn(4, 6).as_strided_((3, 2), (6, 2), 1),
    ),
    "sparse": _filled(init.sparse_, sparsity=0.3),
    "eye": _filled(init.eye_),
    "dirac": _filled(init.dirac_, (4, 3, 5)),
    "constant": _filled(init.constant_, val=0.1),
    "xavier": _filled(init.xavier_normal_),
    "kaiming": _filled(init.kaiming_uniform_, (50, 40)),
    "rand, randn": _of(lambda: torch.rand(4, 6) * 2 - 1, lambda: 3 * torch.randn(9, 5).neg()),
    "like": _of(lambda: torch.randn_like(torch.zeros(4, 6)), lambda: torch.ones(3, 8).mul(0.1)),
    "integers": _of(lambda: torch.randint(9, (4, 5)).float(), lambda: torch.randperm(9).float()),
    "fills": _of(
        _drawn("bernoulli_", 0.3),
        _drawn("exponential_", 2.0),
        _drawn("log_normal_"),
        _drawn("geometric_", 0.4),
        _drawn("cauchy_"),
        _drawn("random_", dtype=torch.int64),
        _drawn("random_", 3, 99, dtype=torch.int32),
        _drawn("random_", 77, dtype=torch.int64),
    ),
    "drawn by tensors": _of(
        lambda: torch.normal(torch.zeros(4), 1.0),
        lambda: torch.bernoulli(torch.full((9,), 0.3)),
        lambda: F.dropout(torch.ones(9)),
        lambda: torch.empty(4, 5).t().normal_(),
    ),
    # Of these torch cannot tell shapes without running them, which must draw nothing.
    "drawn twice": _of(
        lambda: torch.binomial(torch.full((4, 3), 9.0), torch.full((4, 3), 0.3)),
        lambda: torch.distributions.Dirichlet(torch.ones(2, 5)).sample(),
        lambda: torch.distributions.Beta(torch.ones(6), torch.ones(6)).sample(),
        lambda: torch.binomial(
            *(torch.full((5,), 0.5),) * 2, generator=torch.Generator().manual_seed(3)
        ),
        lambda: torch.randn(4),
    ),
    "into given memory": _of(lambda: torch.randn(5, 3, out=torch.empty(5, 3))),
    "own generator": _of(lambda: torch.randn(5, 4, generator=torch.Generator().manual_seed(3))),
    "numpy": _of(lambda: torch.from_numpy(torch.randn(4).numpy() * 2)),
    "small normals": _of(lambda: torch.randn(3), lambda: torch.randn(3, 3), lambda: torch.randn(5)),
    "legacy": _of(lambda: torch.FloatTensor(3).uniform_(), lambda: torch.Tensor(3, 4).normal_()),
    "one by the other": _of(lambda: torch.exp(torch.randn(6, 5)).cumsum(0).softmax(1)),
}
