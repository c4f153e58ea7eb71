"""A model and batches of the tests of graphs of training steps."""

import torch
import torch.nn.functional as F
from torch import nn

WORDS = 24

# Rules of `Net` over `tp`.
TENSOR = {
    "blocks.*.up.{weight,bias}": "tp:0",
    "blocks.*.down.weight": "tp:1",
    "{embed,head}.weight": "tp:0",
    "*": "replicate",
}


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(size), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """A loss over words: units and the root."""

    def __init__(self, blocks, size=12):
        super().__init__()
        self.embed = nn.Embedding(WORDS, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, WORDS, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def batch(at):
    return torch.randint(WORDS, (4, 5), generator=torch.Generator().manual_seed(at))
