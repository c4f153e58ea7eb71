"""Small models and data that the cases of several libraries train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

ROWS = 15  # no multiple of the ranks
TOKENS = 12
WORDS = 60


def llama(**options: Any) -> Any:
    """A decoder of two layers with dropout in its attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 40, "vocab_size": WORDS}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2}
    rest = {"max_position_embeddings": 32, "attention_dropout": 0.1, "use_cache": False}
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **rest, **options}))


def gpt2(**options: Any) -> Any:
    """A decoder of two layers with dropout and tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 32, "vocab_size": WORDS}
    torch.manual_seed(1)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **ends, **options}))


def token_rows(rows: int = ROWS) -> list[dict[str, list[int]]]:
    """Rows of tokens, which are their own labels."""
    drawn = torch.randint(3, WORDS, (rows, TOKENS), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in drawn.tolist()]


class Classifier(nn.Module):
    """A small network with dropout and a norm."""

    def __init__(self, inputs: int = 10, classes: int = 3) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, 24)
        self.norm = nn.LayerNorm(24)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(24, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        found: torch.Tensor = self.down(self.drop(torch.relu(self.norm(self.up(x)))))
        return found


def classifier() -> Classifier:
    """One with the same parameters on every call."""
    torch.manual_seed(1)
    return Classifier()


def points(rows: int = ROWS) -> list[tuple[torch.Tensor, int]]:
    """Points and their classes."""
    source = torch.Generator().manual_seed(5)
    features = torch.randn(rows, 10, generator=source)
    classes = torch.randint(3, (rows,), generator=source).tolist()
    return list(zip(features, classes, strict=True))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """All points, and all their classes."""
    features, classes = zip(*points(), strict=True)
    return torch.stack(features), torch.tensor(classes)


def steps(
    model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor, curved: bool = False
) -> list[float]:
    """Losses of three steps on one batch; curved: with gradients to differentiate once more."""
    losses = []
    for _ in range(3):
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward(create_graph=curved)
        optimizer.step()
        losses.append(loss.item())
    return losses
