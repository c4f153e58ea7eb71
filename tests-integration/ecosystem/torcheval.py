"""torcheval: metrics of distributed predictions."""

from __future__ import annotations

import torch
from ecosystem_models import batch, classifier
from ecosystem_runs import Found, Run, parameters, whole
from torch.nn import functional as F
from torcheval import metrics

PACKAGES = ("torcheval",)


def stepped(run: Run) -> Found:
    model = run.parallelize(classifier())
    accuracy, mean = metrics.MulticlassAccuracy(num_classes=3), metrics.Mean()
    errors = metrics.MeanSquaredError()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    x, y = batch()
    for at in range(3):
        rows = slice(5 * at, 5 * at + 5)
        logits = model(x[rows])
        loss = F.cross_entropy(logits, y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = whole(logits)  # x.full_tensor(): TorchScript sees no DTensor
        accuracy.update(seen, y[rows])
        mean.update(whole(loss))
        errors.update(seen[:, 0], x[rows, 0])
    told = {"accuracy": accuracy.compute(), "mean": mean.compute(), "errors": errors.compute()}
    return {**told, **parameters(model)}


NOTES = ("metrics are TorchScript, which sees no DTensor: they are given x.full_tensor()",)
CASES = {"metrics": stepped}
