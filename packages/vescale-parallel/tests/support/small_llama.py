"""The package's decoder, small and without dropout, and by hand the part of it that a stage has."""

from torch import Tensor, nn
from vescale_parallel.train.model import Decoder, ModelConfig

VOCABULARY, LENGTH = 16, 6


def llama(blocks: int) -> Decoder:
    """Tokens [batch, LENGTH] to logits [batch, LENGTH, VOCABULARY]."""
    sizes = ModelConfig(
        vocab=VOCABULARY,
        dim=8,
        layers=blocks,
        heads=2,
        kv_heads=2,
        hidden=20,
        context=LENGTH,
        dropout=0.0,
    )
    return Decoder(sizes)


class Part(nn.Module):
    """One stage of a decoder, of its own modules; the first embeds, the last gives logits."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Decoder, stage: int, stages: int) -> None:
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
