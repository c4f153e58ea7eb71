"""A small Llama-style decoder as one writes it for one device, and by hand the part of a stage."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, INNER, VOCABULARY, LENGTH = 8, 2, 20, 16, 6


def rotary_table() -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [LENGTH, channels of a head]."""
    head = WIDTH // HEADS
    frequencies = 10000.0 ** (-torch.arange(0, head, 2) / head)
    angles = torch.outer(torch.arange(LENGTH), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [batch, heads, length, channels]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    """Causal attention and a gated feed-forward layer, each after a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (one(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        result: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return result


class Llama(nn.Module):
    """Tokens [batch, LENGTH] to logits [batch, LENGTH, VOCABULARY]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, table in zip(("cos", "sin"), rotary_table(), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Part(nn.Module):
    """One stage of it, with the model's own modules; the first embeds, the last gives logits."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Llama, stage: int, stages: int) -> None:
        super().__init__()
        share, last = len(model.blocks) // stages, stage + 1 == stages
        self.before = model.embed if stage == 0 else nn.Identity()
        self.blocks = model.blocks[stage * share : (stage + 1) * share]
        self.after = nn.Sequential(model.norm, model.head) if last else nn.Identity()
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        result: Tensor = self.after(x)
        return result
