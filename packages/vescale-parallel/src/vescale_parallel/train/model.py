"""A byte-level, Llama-style decoder: plain PyTorch for one device.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, dropout in attention and residual, an
untied head. It knows nothing of meshes; `train/plan.py` distributes it from outside.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the decoder; the defaults train on two CPU cores.

    Attributes:
        vocab: number of token values; 256 for bytes.
        dim: width of the residual stream.
        layers: number of blocks.
        heads: query heads; each has `dim // heads` channels.
        kv_heads: key and value heads, each shared by `heads // kv_heads` query heads.
        hidden: width inside the SwiGLU.
        context: longest sequence, in tokens.
        dropout: probability of zeroing, in attention weights and on the residual stream.
    """

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 352
    context: int = 128
    dropout: float = 0.1


def rotary_table(config: ModelConfig, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position and channel, each [context, head_dim]."""
    head_dim = config.dim // config.heads
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(config.context, dtype=torch.float32)[:, None] * frequencies[None, :]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs of [batch, heads, sequence, head_dim] by their position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention, written out so that its dropout mask can be observed."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.queries_per_kv = config.heads // config.kv_heads
        self.q = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.k = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, sequence, dim] to the same shape."""
        q, k, v = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(self.v(x))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k = k.repeat_interleave(self.queries_per_kv, dim=1)
        v = v.repeat_interleave(self.queries_per_kv, dim=1)
        # Not `scaled_dot_product_attention`: its fused kernels show nobody which weights they drop.
        scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
        length = x.shape[1]
        # Made in forward, not a buffer of [context, context]: sequences may be shorter.
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        mixed = self.dropout(weights) @ v
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, sequence, heads * head_dim] to [batch, heads, sequence, head_dim]."""
        batch, length, _ = x.shape
        # -1 and not the number of heads: the same line serves queries and the fewer keys.
        return x.view(batch, length, -1, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    """The gated feed-forward layer of Llama."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, dim] to the same shape."""
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each normed before and dropped out after."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, sequence, dim] to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out, or their loss when targets are given."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        cos, sin = rotary_table(config)
        # Computed from the sizes alone, so a checkpoint need not hold them.
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        """Small normal weights; those that write into the residual stream smaller with depth."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Attention):
            # As GPT-2 does: the stream is a sum of 2 x layers such outputs.
            # Drawn a second time: children are initialised before the module that holds them, by
            # the first rule.
            nn.init.normal_(module.out.weight, std=0.02 / (2 * self.config.layers) ** 0.5)
        if isinstance(module, SwiGLU):
            nn.init.normal_(module.down.weight, std=0.02 / (2 * self.config.layers) ** 0.5)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, sequence, vocab], or their mean cross entropy with `targets`.

        Args:
            tokens: int64 [batch, sequence], sequence at most `context`.
            targets: int64 of the same shape, the byte that follows each token.
        """
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
