"""A small model of words, with dropout in its blocks, and its loss."""

import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 16


class WordModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
            for _ in range(4)
        )
        self.head = nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def loss_of(made: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(made.flatten(0, 1), x.flatten())
