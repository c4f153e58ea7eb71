"""accelerate: accumulation, clipping, metrics, checkpoints, what single ranks do."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from ecosystem_models import classifier, points
from ecosystem_runs import Found, Run, parameters
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from vescale_parallel.integrations import accelerate as ours

PACKAGES = ("accelerate",)


def accelerator(run: Run, **options: Any) -> Accelerator:
    if run.mesh is None:
        return Accelerator(cpu=True, **options)
    return ours.Accelerator(cpu=True, mesh=run.mesh, plan=run.plan, **options)


def made(run: Run, rows: Any = None, **options: Any) -> tuple[Any, ...]:
    here, model = accelerator(run, **options), classifier()
    batches = DataLoader(rows or points(), batch_size=5, shuffle=rows is None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return here, *here.prepare(model, optimizer, batches, scheduler)


def epoch(here: Any, model: Any, optimizer: Any, batches: Any, scheduler: Any) -> list[float]:
    losses = []
    for features, classes in batches:
        with here.accumulate(model):
            loss = F.cross_entropy(model(features), classes)
            here.backward(loss)
            if here.sync_gradients:
                here.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def training(run: Run) -> Found:
    here, model, *rest = made(run, gradient_accumulation_steps=2)
    losses = epoch(here, model, *rest) + epoch(here, model, *rest)
    model.eval()
    features, classes = zip(*points(7), strict=True)
    with torch.no_grad():
        logits = model(torch.stack(features))
    logits, labels = here.gather_for_metrics((logits, torch.tensor(classes)))
    right = float((logits.argmax(-1).numpy() == labels.numpy()).mean())
    return {"losses": losses, "right": right, "logits": logits, **parameters(model)}


def resuming(run: Run) -> Found:
    """An epoch, and another one of new objects; the checkpoint is read by a plain model, too."""
    here, model, *rest = made(run)
    losses = epoch(here, model, *rest)
    here.save_state(str(run.folder / "state"))
    here.wait_for_everyone()
    here, model, *rest = made(run)
    here.load_state(str(run.folder / "state"))
    losses += epoch(here, model, *rest)
    here.save_model(model, str(run.folder / "model"))
    from safetensors.torch import load_file

    plain = classifier()
    plain.load_state_dict(load_file(run.folder / "model" / "model.safetensors"))
    read = {f"read.{name}": p for name, p in plain.named_parameters()}
    return {"losses": losses, **read, **parameters(model)}


class Stream(IterableDataset[Any]):
    """Points that cannot be asked for by index; the last batch of five is one of two."""

    def __iter__(self) -> Any:
        return iter(points(12))


def streaming(run: Run) -> Found:
    """An epoch, and the mean over the rows as an evaluation takes it: the last batch has fewer."""
    here, model, optimizer, batches, scheduler = made(run, Stream())
    losses = epoch(here, model, optimizer, batches, scheduler)
    model.eval()
    each = [
        here.gather_for_metrics(F.cross_entropy(model(features), classes).detach().repeat(5))
        for features, classes in batches
    ]
    return {"losses": losses, "mean": torch.cat(each).mean(), **parameters(model)}


def with_bf16(run: Run) -> Found:
    here, model, *rest = made(run, mixed_precision="bf16")
    return {"losses": epoch(here, model, *rest)}


def by_ranks(run: Run) -> Found:
    """What one rank does for all others, and what one rank decides for all."""
    here, *_ = made(run)
    last = run.mesh is None or dist.get_rank() == dist.get_world_size() - 1
    calls, data = run.folder / "calls", run.folder / "data"

    @here.on_main_process
    def note(word: str) -> None:
        with calls.open("a") as file:
            file.write(word)

    note("a")
    PartialState().on_main_process(note)("b")
    with here.main_process_first():
        if here.is_main_process:
            time.sleep(0.2)
            data.write_text("made")
        read = data.read_text()
    told = [here.check_trigger()]
    if last:
        here.set_trigger()
    told += [here.check_trigger(), here.check_trigger()]
    here.wait_for_everyone()
    return {"calls": calls.read_text(), "read": read, "told": told}


LIMITS = {"Accelerator, bf16": 1e-2}
CASES = {
    "Accelerator": training,
    "Accelerator, resumed": resuming,
    "Accelerator, a stream": streaming,
    "Accelerator, rank by rank": by_ranks,
    "Accelerator, bf16": with_bf16,
}
