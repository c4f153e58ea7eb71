"""torchmetrics: metrics of distributed predictions, updated by batch, and combined."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from ecosystem_models import batch, classifier
from ecosystem_runs import Found, Run, parameters
from torch.nn import functional as F
from torchmetrics import classification, regression
from vescale_parallel.integrations.torchmetrics import of_whole_batches

PACKAGES = ("torchmetrics",)


def metrics() -> dict[str, Any]:
    of_classes = {"num_classes": 3, "average": "macro"}
    return {
        "accuracy": classification.MulticlassAccuracy(**of_classes),
        "F1": classification.MulticlassF1Score(**of_classes),
        "AUROC": classification.MulticlassAUROC(3),
        "confusion": classification.MulticlassConfusionMatrix(3),
        "calibration": classification.MulticlassCalibrationError(3),
    }


def stepped(run: Run) -> Found:
    """Each as a batch is trained, and over the epoch."""
    model = run.parallelize(classifier())
    collected = of_whole_batches(torchmetrics.MetricCollection(metrics()))
    both = [regression.MeanSquaredError(), regression.R2Score()]
    errors = of_whole_batches(torchmetrics.MetricCollection(both))
    mean = of_whole_batches(torchmetrics.MeanMetric())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    x, y = batch()
    losses, accuracies = [], []
    for at in range(3):
        rows = slice(5 * at, 5 * at + 5)
        logits = model(x[rows])
        loss = F.cross_entropy(logits, y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        mean.update(loss.detach())
        accuracies.append(float(collected(logits.detach(), y[rows])["accuracy"]))
        errors.update(logits.detach()[:, 0], x[rows, 0])
    told = {**collected.compute(), **errors.compute(), "mean": mean.compute()}
    return {"losses": losses, "accuracies": accuracies, **told, **parameters(model)}


CASES = {"metrics": stepped}
