"""MONAI: segmentation of volumes by a UNet, with its losses, metrics and sliding windows."""

from __future__ import annotations

import torch
from ecosystem_runs import Found, Run, parameters
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import compute_dice
from monai.networks.nets import UNet

PACKAGES = ("monai",)


def segmented(run: Run) -> Found:
    torch.manual_seed(1)
    sizes = {"channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 1}
    model = run.parallelize(UNet(3, 1, 2, **sizes, dropout=0.1))
    source = torch.Generator().manual_seed(5)
    x = torch.randn(5, 1, 8, 8, 8, generator=source)
    y = (torch.rand(5, 1, 8, 8, 8, generator=source) > 0.5).float()
    loss_of = DiceCELoss(to_onehot_y=True, softmax=True)
    # Gradients of biases in front of norms are nothing but rounding.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    losses = []
    for _ in range(3):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        whole = sliding_window_inference(x, (8, 8, 8), 2, model)
        dice = compute_dice(whole.argmax(1, keepdim=True), y, num_classes=2)
    return {"losses": losses, "whole": whole, "dice": dice, **parameters(model)}


NOTES = ("DiceMetric adds up over all ranks by itself: use compute_dice, of whole batches",)
CASES = {"UNet": segmented}
