"""Five small models, and a training step of each as one torch.fx graph: no values are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

_WIDTH, _HEADS, _LAYERS, _LENGTH, _VOCABULARY = 64, 4, 4, 64, 512


class Block(nn.Module):
    """A transformer block whose attention weights are written out."""

    def __init__(self, width: int = _WIDTH, heads: int = _HEADS, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix and transform."""
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if self.causal:
            past = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(past.logical_not(), float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(attended)
        made: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return made


class _Text(nn.Module):
    """GPT-2-like where causal, else BERT-like."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.places = nn.Embedding(_LENGTH, _WIDTH)
        self.blocks = nn.Sequential(*(Block(causal=causal) for _ in range(_LAYERS)))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.places.weight)))
        return made


class _Pictures(nn.Module):
    """ViT-like."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, _WIDTH, 4, 4)
        self.places = nn.Parameter(torch.zeros(1, 64, _WIDTH))
        self.blocks = nn.Sequential(*(Block(causal=False) for _ in range(_LAYERS)))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        made: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return made


def _convnet() -> nn.Module:
    layers: list[nn.Module] = []
    before = 3
    for width in (32, 64, 64, 128):
        stride = 1 if width == 32 else 2
        layers += [
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        before = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)]
    return nn.Sequential(*layers, *head)


def _mlp() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(256 * (1 + (at > 0)), 512), nn.ReLU()) for at in range(3)]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def _words() -> tuple[Tensor, Tensor]:
    return torch.randint(_VOCABULARY, (4, _LENGTH)), torch.randint(_VOCABULARY, (4, _LENGTH))


def _images() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "GPT-2-like": (lambda: _Text(causal=True), _words),
    "BERT-like": (lambda: _Text(causal=False), _words),
    "ViT": (_Pictures, _images),
    "convnet": (_convnet, _images),
    "MLP": (_mlp, lambda: (torch.randn(32, 256), torch.randint(10, (32,)))),
}


def update(parameters: Any, gradients: Any, moments: Any) -> None:
    """Adam, in place."""
    with torch.no_grad():
        for one, gradient, (m, v) in zip(parameters, gradients, moments, strict=True):
            m.mul_(0.9).add_(gradient, alpha=0.1)
            v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            one.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)


def train_step(name: str) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """Forward, loss, backward and Adam in place, as a graph, and its inputs.

    Inputs are parameters, both moments of each, buffers, and a batch.
    """
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make()
    names = [one for one, _ in model.named_parameters()]
    buffers = {one: value.detach().clone() for one, value in model.named_buffers()}

    def step(parameters: Any, moments: Any, state: Any, x: Tensor, y: Tensor) -> Tensor:
        leaves = [one.detach().requires_grad_() for one in parameters]
        given = dict(zip(names, leaves, strict=True)) | dict(zip(buffers, state, strict=True))
        out = torch.func.functional_call(model, given, (x,))
        loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
        gradients = torch.autograd.grad(loss, leaves)
        update(parameters, gradients, moments)
        return loss.detach()

    parameters = [one.detach().clone() for one in model.parameters()]
    moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in parameters]
    inputs = (parameters, moments, list(buffers.values()), *batch())
    return make_fx(step, tracing_mode="fake")(*inputs), inputs
