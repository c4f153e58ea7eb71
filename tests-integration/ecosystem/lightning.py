"""Lightning: Fabric and the Trainer, with accumulation, clipping, validation and checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ecosystem_models import classifier, points
from ecosystem_runs import Found, Run, parameters
from lightning import Fabric, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from vescale_parallel.integrations.lightning import FabricStrategy, TrainerStrategy

PACKAGES = ("lightning",)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def batches() -> DataLoader[Any]:
    return DataLoader(points(), batch_size=5, shuffle=True)


def fabric(run: Run, **options: Any) -> Fabric:
    if run.mesh is None:
        return Fabric(accelerator="cpu", devices=1, **options)
    return Fabric(strategy=FabricStrategy(run.mesh, run.plan), **options)


def with_fabric(run: Run) -> Found:
    """Two epochs, a checkpoint after the first, and the second again from there."""
    here = fabric(run)
    model = here.setup_module(classifier())
    optimizer = here.setup_optimizers(optimizer_of(model))
    found: dict[str, Any] = {"losses": []}

    def epoch() -> None:
        for at, (features, classes) in enumerate(here.setup_dataloaders(batches())):
            with here.no_backward_sync(model, enabled=False):
                loss = F.cross_entropy(model(features), classes)
                here.backward(loss / 2)
            if at % 2:
                here.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
            found["losses"].append(loss.item())

    epoch()
    path = run.folder / "state.ckpt"
    here.save(path, {"model": model, "optimizer": optimizer, "epoch": 1})
    epoch()
    found["logits"] = here.all_gather(model(points()[0][0][None])).reshape(-1).detach()
    here.load(path, {"model": model, "optimizer": optimizer, "epoch": 0})
    torch.manual_seed(4)
    epoch()
    # As early stopping asks: what one rank finds counts for all.
    first = run.mesh is None or dist.get_rank() == 0
    found["stop"] = here.strategy.reduce_boolean_decision(first, all=False)
    return {**found, **parameters(model)}


class Module(LightningModule):
    """A classifier and what to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()
        self.losses: list[float] = []

    def training_step(self, batch: Any, at: int) -> Tensor:
        features, classes = batch
        loss = F.cross_entropy(self.net(features), classes)
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, at: int) -> None:
        features, classes = batch
        self.log("valid", F.cross_entropy(self.net(features), classes), on_epoch=True)

    def predict_step(self, batch: Any, at: int) -> Tensor:
        found: Tensor = self.net(batch[0])
        return found

    def configure_optimizers(self) -> Any:
        made = optimizer_of(self)
        return [made], [torch.optim.lr_scheduler.StepLR(made, 1)]


def trainer(run: Run, epochs: int, **options: Any) -> Trainer:
    saver = ModelCheckpoint(run.folder, monitor="valid", save_last=True)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    quiet["logger"] = CSVLogger(run.folder, name=f"to-{epochs}")
    usual = {"max_epochs": epochs, "gradient_clip_val": 0.5, "callbacks": [saver], **quiet}
    if run.mesh is None:
        return Trainer(accelerator="cpu", devices=1, **usual, **options)
    return Trainer(strategy=TrainerStrategy(run.mesh, run.plan), **usual, **options)


def with_trainer(run: Run) -> Found:
    """Two epochs with validation, and a third of a new trainer from its checkpoint."""
    module = Module()
    valid = DataLoader(points(7), batch_size=3)
    options = {"accumulate_grad_batches": 2}
    first = trainer(run, 2, **options)
    first.fit(module, batches(), valid)
    found = {"valid": float(first.callback_metrics["valid"]), "losses": module.losses}
    again, then = Module(), trainer(run, 3, **options)
    torch.manual_seed(4)
    then.fit(again, batches(), valid, ckpt_path=str(run.folder / "last.ckpt"))
    predicted = torch.cat(then.predict(again, valid))  # type: ignore[arg-type]
    read = torch.load(run.folder / "last.ckpt", weights_only=True)["state_dict"]  # noqa: TID251
    logs = (run.folder / "to-3" / "version_0" / "metrics.csv").read_text().splitlines()
    told = {"again": again.losses, "predicted": predicted, "log": len(logs)}
    return {**found, **told, **{f"read.{k}": v for k, v in read.items()}, **parameters(again)}


CASES = {"Fabric": with_fabric, "Trainer": with_trainer}
