"""Four kinds of transformers as one writes them for one device, and how each is laid out over `tp`.

Llama-style (RMSNorm, rotary positions, grouped queries, SwiGLU), GPT-2 (LayerNorm, learned
positions, GELU), BERT-like (norm after the residual, padding, masked tokens), ViT (patches by a
convolution, a class token, an odd number of tokens). They know nothing of meshes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from vescale_parallel import Plan

KINDS = ("Llama-style", "GPT-2", "BERT-like", "ViT")
WIDTH, HEADS, INNER, BLOCKS = 32, 8, 44, 2
VOCABULARY, TOKENS, CLASSES, SIDE = 64, 9, 12, 16
PADDING = 0


@dataclass(frozen=True)
class Options:
    """What a model has of that which tends to go wrong on a mesh.

    Attributes:
        dropout: probability, on the residual.
        attention_dropout: probability, on the weights of attention, which are written out then.
        recomputed: whether blocks are computed again in backward.
        tied: whether the head is the embedding; of the ViT, two matrices of two blocks are one.
        spare: whether it has a module that is never called, and a block that may be skipped.
    """

    dropout: float = 0.0
    attention_dropout: float = 0.0
    recomputed: bool = False
    tied: bool = False
    spare: bool = False


class Attention(nn.Module):
    """Self-attention; keys and values have fewer heads where the model has rotary positions."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.rotary = kind == "Llama-style"
        self.causal = kind in ("Llama-style", "GPT-2")
        shared = WIDTH // 2 if self.rotary else WIDTH
        self.q = nn.Linear(WIDTH, WIDTH, bias=not self.rotary)
        self.k = nn.Linear(WIDTH, shared, bias=False)
        self.v = nn.Linear(WIDTH, shared, bias=not self.rotary)
        self.out = nn.Linear(WIDTH, WIDTH, bias=not self.rotary)
        self.dropout = nn.Dropout(dropout)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        if self.rotary:
            q, k = turned(q), turned(k)
            # By the shapes of these tensors: on a mesh that shards heads by hand, by local ones.
            k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for one in (k, v))
        if self.dropout.p:
            mixed = self.written_out(q, k, v, mask)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result

    def written_out(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        # The fused kernels show nobody which weights they drop.
        scores = q @ k.transpose(-2, -1) * (WIDTH // HEADS) ** -0.5
        if self.causal:
            length = scores.shape[-1]
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        result: Tensor = self.dropout(scores.softmax(-1)) @ v
        return result


def turned(x: Tensor) -> Tensor:
    """Rotary positions on [rows, heads, tokens, channels]."""
    channels = x.shape[-1]
    frequencies = 1e4 ** (-torch.arange(0, channels, 2) / channels)
    angles = torch.outer(torch.arange(x.shape[-2]), frequencies).repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class Mlp(nn.Module):
    """Up and down, gated where the model is Llama-style."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        gated = kind == "Llama-style"
        self.up = nn.Linear(WIDTH, INNER, bias=not gated)
        self.gate = nn.Linear(WIDTH, INNER, bias=False) if gated else None
        self.down = nn.Linear(INNER, WIDTH, bias=not gated)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        wide = F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up
        result: Tensor = self.down(wide)
        return result


def norm_of(kind: str) -> nn.Module:
    return nn.RMSNorm(WIDTH) if kind == "Llama-style" else nn.LayerNorm(WIDTH)


class Block(nn.Module):
    """Attention and feed-forward, each normed before it, or after the residual as in BERT."""

    def __init__(self, kind: str, options: Options) -> None:
        super().__init__()
        self.after = kind == "BERT-like"
        self.attention_norm, self.mlp_norm = norm_of(kind), norm_of(kind)
        self.attention, self.mlp = Attention(kind, options.attention_dropout), Mlp(kind)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.after:
            x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
            result: Tensor = self.mlp_norm(x + self.dropout(self.mlp(x)))
            return result
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Patches(nn.Module):
    """Images [rows, 3, side, side] to a class token and patches, [rows, tokens, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))

    def forward(self, images: Tensor) -> Tensor:
        found = self.convolution(images).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(found.shape[0], -1, -1), found], 1)


class Model(nn.Module):
    """A transformer of a kind, that returns its loss."""

    def __init__(self, kind: str, options: Options) -> None:
        super().__init__()
        self.kind, self.options = kind, options
        self.embed = Patches() if kind == "ViT" else nn.Embedding(VOCABULARY, WIDTH)
        length = (SIDE // 4) ** 2 + 1 if kind == "ViT" else TOKENS
        if kind != "Llama-style":
            self.positions = nn.Parameter(torch.empty(length, WIDTH))
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(kind, options) for _ in range(BLOCKS))
        self.norm = norm_of(kind)
        self.head = nn.Linear(WIDTH, CLASSES if kind == "ViT" else VOCABULARY, bias=False)
        if options.spare:
            self.spare = nn.Linear(WIDTH, 5)
        if options.tied and kind == "ViT":
            first, second = (block.get_submodule("mlp.up") for block in self.blocks)
            second.weight = first.weight
        elif options.tied:
            self.head.weight = self.embed.weight
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw all parameters, where they are: matrices and tables normal, norms 1, biases 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            elif parameter.ndim == 3:
                nn.init.trunc_normal_(parameter, std=0.02)
            elif ".down." in name or ".out." in name:
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * BLOCKS))
            elif name.startswith("head"):
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            else:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor, skip: bool = False) -> Tensor:
        """The loss of a batch; with `skip` the last block is left out."""
        mask = (inputs != PADDING)[:, None, None, :] if self.kind == "BERT-like" else None
        x = self.embed(inputs)
        if self.kind != "Llama-style":
            x = x + self.positions
        x = self.dropout(x)
        for block in list(self.blocks)[: BLOCKS - skip]:
            if self.options.recomputed:
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        x = self.norm(x)
        if self.kind == "ViT":
            return F.cross_entropy(self.head(x[:, 0]), targets)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch_of(kind: str, step: int, rows: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step, the same in every process."""
    generator = torch.Generator().manual_seed(1000 + step)
    if kind == "ViT":
        images = torch.randn(rows, 3, SIDE, SIDE, generator=generator)
        return images, torch.randint(CLASSES, (rows,), generator=generator)
    ids = torch.randint(1, VOCABULARY, (rows, TOKENS + 1), generator=generator)
    if kind != "BERT-like":
        return ids[:, :-1], ids[:, 1:]
    # Padded to unequal lengths, and one token in three is to be told: ranks have unequal numbers.
    lengths = torch.randint(3, TOKENS + 1, (rows, 1), generator=generator)
    inputs = ids[:, :-1].where(torch.arange(TOKENS) < lengths, PADDING)
    told = torch.rand(rows, TOKENS, generator=generator) < 0.3
    told[:, 0] = True
    return inputs.where(~told, 1), inputs.where(told & (inputs != PADDING), -100)


def plan_of(kind: str, **words: object) -> Plan:
    """Tensor and sequence parallel over `tp`, data parallel over the axes of the batch."""
    vocabulary = {} if kind == "ViT" else {"embed.weight": "tp:0"}
    rules = {
        **vocabulary,
        "*.{q,k,v,up,gate}.*" if kind == "Llama-style" else "*.{q,k,v,up}.*": "tp:0",
        "*.{out,down}.weight": "tp:1",
        "head.weight": "tp:0",
        "*": "replicate",
    }
    between = {
        "embed": "-> tp:1",
        "blocks.*.{attention,mlp}": "tp:full -> tp:1",
        "norm": "-> tp:full" if kind == "ViT" else "-> tp:1",
    }
    heads = {} if kind == "ViT" else {"head": "tp:full ->"}
    return Plan(parameters=rules, activations={**between, **heads}, **words)  # type: ignore[arg-type]
