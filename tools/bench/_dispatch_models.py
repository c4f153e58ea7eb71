"""Whole models for `dispatch`: a Llama-style block, and an unmodified Hugging Face Llama.

Plain torch runs what one of eight tensor-parallel ranks computes, without any communication: one
head and an eighth of the hidden units. torch's DTensor is used as its tensor-parallel tutorial
says: only the projections are DTensors, what is between them is plain, and what several of them
read becomes a DTensor once, so that its gradient is summed once and not for each.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
import vescale_dtensor
from torch import Tensor, nn
from torch.distributed import tensor as stock
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

HIDDEN, WIDE, HEADS, LAYERS, VOCABULARY = 64, 128, 8, 4, 256
BATCH, LENGTH = 2, 16
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")

Call = Callable[[], object]


class Attention(nn.Module):
    """With rotary positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        head = HIDDEN // HEADS
        self.q_proj = nn.Linear(HIDDEN, heads * head, bias=False)
        self.k_proj = nn.Linear(HIDDEN, heads * head, bias=False)
        self.v_proj = nn.Linear(HIDDEN, heads * head, bias=False)
        self.o_proj = nn.Linear(heads * head, HIDDEN, bias=False)
        angle = torch.arange(LENGTH).unsqueeze(1) / 100.0 ** (torch.arange(head) / head)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(BATCH, LENGTH, -1, HIDDEN // HEADS).transpose(1, 2)

    def _turned(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * self.cos + rotated * self.sin

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[batch, length, hidden] to the same."""
        h = hidden_states
        q, k = (self._turned(self._heads(p(h))) for p in (self.q_proj, self.k_proj))
        mixed = F.scaled_dot_product_attention(q, k, self._heads(self.v_proj(h)), is_causal=True)
        result: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(BATCH, LENGTH, -1))
        return result


class Mlp(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, wide, bias=False)
        self.up_proj = nn.Linear(HIDDEN, wide, bias=False)
        self.down_proj = nn.Linear(wide, HIDDEN, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """[batch, length, hidden] to the same."""
        result: Tensor = self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        return result


class Block(nn.Module):
    """Attention and a feed-forward layer; norms are written out."""

    def __init__(self, heads: int, wide: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(heads), Mlp(wide)
        self.norms = nn.ParameterList([torch.ones(HIDDEN), torch.ones(HIDDEN)])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, hidden] to the same."""
        x = x + self.self_attn(hidden_states=self._norm(x, self.norms[0]))
        result: Tensor = x + self.mlp(self._norm(x, self.norms[1]))
        return result


def block(kind: str, mesh: DeviceMesh) -> Call:
    """Forward and backward of one block; `kind` is plain, stock or ours."""
    whole = kind != "plain"
    model: nn.Module = Block(HEADS, WIDE) if whole else Block(1, WIDE // HEADS)
    model = _laid_out(model, kind, mesh)
    x = torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True)
    given = _input(x.detach(), kind, mesh).requires_grad_()

    def step() -> None:
        model(given).sum().backward()

    return step


def _laid_out(model: nn.Module, kind: str, mesh: DeviceMesh) -> nn.Module:
    if kind == "plain":
        return model
    names = [name for name, _ in model.named_modules()]
    if kind == "stock":
        plan: dict[str, Any] = {n: ColwiseParallel() for n in names if n.endswith(COLUMNS)}
        plan |= {n: RowwiseParallel() for n in names if n.endswith(ROWS)}
        for end, style in _once_for_all().items():
            plan |= {n: style for n in names if n.endswith(end)}
        return parallelize_module(model, mesh, plan)
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            split = 0 if prefix.endswith(COLUMNS) else 1 if prefix.endswith(ROWS) else None
            made = _input(parameter.detach(), kind, mesh, split)
            module.register_parameter(name, nn.Parameter(made))
    return model


def _once_for_all() -> dict[str, PrepareModuleInput]:
    """What attention gets by keyword, as Hugging Face calls it, and the other by position."""
    whole: Any = stock.Replicate()
    named, first = {"hidden_states": whole}, (whole,)
    return {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts=named, desired_input_kwarg_layouts=named
        ),
        "mlp": PrepareModuleInput(input_layouts=first, desired_input_layouts=first),
    }


def _input(x: Tensor, kind: str, mesh: DeviceMesh, split: int | None = None) -> Tensor:
    if kind != "ours":
        return x
    placement = vescale_dtensor.Replicate() if split is None else vescale_dtensor.Shard(split)
    made: Tensor = vescale_dtensor.distribute_tensor(x, mesh, [placement], src_data_rank=None)
    return made


def has_hugging_face() -> bool:
    """Whether `hugging_face` can be called."""
    return find_spec("transformers") is not None


def hugging_face(kind: str, mesh: DeviceMesh) -> Call:
    """One training step, AdamW included, of Hugging Face's Llama as it is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    share = 1 if kind != "plain" else HEADS
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE // share,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS // share,
        "num_key_value_heads": HEADS // share,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCABULARY,
        "attn_implementation": "sdpa",
        "use_cache": False,
        "tie_word_embeddings": False,
    }
    config = LlamaConfig(**settings)
    model = _laid_out(LlamaForCausalLM(config), kind, mesh)
    ids = _input(torch.randint(0, VOCABULARY, (BATCH, LENGTH)), kind, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
