"""torcheval: metrics of distributed predictions."""

from __future__ import annotations

import torch
from ecosystem_models import classifier, points
from ecosystem_runs import Found, Run, parameters
from torch.nn import functional as F
from torcheval import metrics

PACKAGES = ("torcheval",)


def stepped(run: Run) -> Found:
    model = run.parallelize(classifier())
    accuracy, mean = metrics.MulticlassAccuracy(num_classes=3), metrics.Mean()
    errors = metrics.MeanSquaredError()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    features, classes = zip(*points(), strict=True)
    x, y = torch.stack(features), torch.tensor(classes)
    for at in range(3):
        rows = slice(5 * at, 5 * at + 5)
        logits = model(x[rows])
        loss = F.cross_entropy(logits, y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        accuracy.update(logits.detach(), y[rows])
        mean.update(loss.detach())
        errors.update(logits.detach()[:, 0], x[rows, 0])
    told = {"accuracy": accuracy.compute(), "mean": mean.compute(), "errors": errors.compute()}
    return {**told, **parameters(model)}


NOTES = ("what is TorchScript (confusion matrix, AUROC) sees no DTensor: pass x.full_tensor()",)
CASES = {"metrics": stepped}
