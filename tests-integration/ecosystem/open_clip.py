"""open_clip: texts and images, contrasted over the whole batch."""

from __future__ import annotations

import torch
from ecosystem_runs import Found, Run, parameters
from open_clip import CLIP, ClipLoss
from torch import nn

PACKAGES = ("open_clip_torch",)


def contrasted(run: Run) -> Found:
    torch.manual_seed(1)
    vision = {"layers": 2, "width": 24, "head_width": 8, "patch_size": 8, "image_size": 16}
    text = {"context_length": 9, "vocab_size": 60, "width": 24, "heads": 3, "layers": 2}
    model: nn.Module = run.parallelize(CLIP(16, vision, text))
    # Gradients of biases of keys are nothing but rounding.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-2)
    source = torch.Generator().manual_seed(5)
    images = torch.randn(5, 3, 16, 16, generator=source)
    tokens = torch.randint(1, 60, (5, 9), generator=source)
    losses = []
    for _ in range(3):
        found = model(images, tokens)
        loss = ClipLoss()(*found)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, **parameters(model)}


CASES = {"CLIP": contrasted}
