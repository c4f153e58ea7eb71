"""A Llama-style decoder as one writes it for one device, and the sizes of a case."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEED = 0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the model and of a global batch.

    Attributes:
        hidden: width of the residual stream; the feed-forward layers are 2.75 times as wide.
        batch, length: sequences of a global batch, and tokens of each.
    """

    hidden: int = 64
    layers: int = 4
    heads: int = 8
    vocab: int = 256
    batch: int = 8
    length: int = 32

    @property
    def inner(self) -> int:
        """Width inside of the feed-forward layers."""
        return self.hidden * 11 // 4

    @property
    def head(self) -> int:
        """Channels of one attention head."""
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """Tokens of a global batch."""
        return self.batch * self.length


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [batch, heads, length, head]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotary_table(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [length, head]."""
    frequencies = 10000.0 ** (-torch.arange(0, sizes.head, 2) / sizes.head)
    angles = torch.outer(torch.arange(sizes.length), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.head
        self.q = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.k = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.v = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        # -1: torch's tensor parallelism hands over the heads of one rank only.
        return x.view(*x.shape[:-1], -1, self.head).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (self.heads(part(x)) for part in (self.q, self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class SwiGLU(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.attention, self.mlp = Attention(sizes), SwiGLU(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Llama(nn.Module):
    """Tokens and targets [batch, length] to their mean cross entropy."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        for name, table in zip(("cos", "sin"), rotary_table(sizes), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def seeded(sizes: Sizes) -> Llama:
    """The model with the values that every variant starts from."""
    torch.manual_seed(SEED)
    return Llama(sizes)


def batch_of(sizes: Sizes, step: int) -> tuple[Tensor, Tensor]:
    """The global tokens and targets of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(SEED + step)
    text = torch.randint(sizes.vocab, (sizes.batch, sizes.length + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
