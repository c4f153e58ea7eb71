"""sentence-transformers: an encoder that learns from pairs, contrasted over the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from ecosystem_runs import Found, Run, parameters
from sentence_transformers import SentenceTransformer, losses, models
from torch import nn
from transformers import BertConfig, BertModel

PACKAGES = ("sentence-transformers", "transformers")


class Encoder(nn.Module):
    """A BERT with random weights, where the library expects a name of the hub."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
        rest = {"intermediate_size": 32, "vocab_size": 60, "max_position_embeddings": 32}
        self.bert = BertModel(BertConfig(**sizes, **rest), add_pooling_layer=False)

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        mask = features["attention_mask"]
        found = self.bert(input_ids=features["input_ids"], attention_mask=mask)
        return {**features, "token_embeddings": found.last_hidden_state}


def texts(seed: int) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 60, (5, 9), generator=source)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def contrasted(run: Run) -> Found:
    torch.manual_seed(1)
    parts = [Encoder(), models.Pooling(24), models.Normalize()]
    model = run.parallelize(SentenceTransformer(modules=parts, device="cpu"))
    model.train()
    loss_of = losses.MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    found = []
    for at in range(3):
        loss = loss_of([texts(at), texts(10 + at)], torch.zeros(5))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return {"losses": found, **parameters(model)}


CASES = {"MultipleNegativesRankingLoss": contrasted}
