"""diffusers: a UNet and a diffusion transformer on noised images, with an average of weights."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel, UNet2DModel
from diffusers.training_utils import EMAModel
from ecosystem_runs import Found, Run, parameters
from torch.nn import functional as F

PACKAGES = ("diffusers",)


def noised(model: Any, run: Run, **options: Any) -> Found:
    model = run.parallelize(model)
    scheduler = DDPMScheduler(num_train_timesteps=50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    average = EMAModel(model.parameters(), decay=0.7)
    source = torch.Generator().manual_seed(5)
    clean = torch.randn(5, 3, 16, 16, generator=source)
    losses = []
    for _ in range(3):
        noise = torch.randn(clean.shape, generator=source)
        times = torch.randint(50, (5,), generator=source)
        found = model(scheduler.add_noise(clean, noise, times), times, **options).sample
        loss = F.mse_loss(found, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        losses.append(loss.item())
    names = [name for name, _ in model.named_parameters()]
    kept = zip(names, average.shadow_params, strict=True)
    return {"losses": losses, **{f"average.{n}": p for n, p in kept}, **parameters(model)}


def unet(run: Run) -> Found:
    torch.manual_seed(1)
    kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
    kinds |= {"up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    sizes |= {"attention_head_dim": 4, "dropout": 0.1}
    return noised(UNet2DModel(sample_size=16, **kinds, **sizes), run)


def transformer(run: Run) -> Found:
    torch.manual_seed(1)
    sizes = {"num_attention_heads": 4, "attention_head_dim": 6, "num_layers": 2, "in_channels": 3}
    rest = {"sample_size": 16, "patch_size": 4, "norm_num_groups": 1, "num_embeds_ada_norm": 50}
    model = DiTTransformer2DModel(**sizes, **rest, out_channels=3)
    return noised(model, run, class_labels=torch.arange(5))


CASES = {"UNet2DModel": unet, "DiTTransformer2DModel": transformer}
