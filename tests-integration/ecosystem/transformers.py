"""transformers' Trainer: accumulation, clipping, evaluation, logging, saving, resuming."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from ecosystem_models import gpt2, llama, token_rows
from ecosystem_runs import Found, Run, parameters
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from vescale_parallel.integrations.transformers import parallel

PACKAGES = ("transformers", "accelerate")


def arguments(run: Run, **options: Any) -> TrainingArguments:
    usual = {"per_device_train_batch_size": 5, "max_steps": 4, "logging_steps": 1, "use_cpu": True}
    rest = {"report_to": [], "save_strategy": "no", "learning_rate": 1e-2, "adam_epsilon": 1e-4}
    rest |= {"disable_tqdm": True}
    return TrainingArguments(str(run.folder / "out"), **{**usual, **rest, **options})


def trainer(run: Run, model: Any, args: TrainingArguments, **options: Any) -> Trainer:
    given = {"train_dataset": token_rows(), "data_collator": default_data_collator, **options}
    if run.mesh is None:
        return Trainer(model, args, **given)
    return parallel(Trainer)(model, args, mesh=run.mesh, plan=run.plan, **given)


def logged(found: Trainer) -> dict[str, Any]:
    history = found.state.log_history
    keys = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "train_loss")
    return {key: [one[key] for one in history if key in one] for key in keys}


def training(run: Run) -> Found:
    args = arguments(run, gradient_accumulation_steps=2, max_grad_norm=0.5)
    made = trainer(run, llama(), args)
    made.train()
    return {**logged(made), **parameters(made.model)}


def accuracy(predicted: Any) -> dict[str, float]:
    right = predicted.predictions.argmax(-1)[:, :-1] == predicted.label_ids[:, 1:]
    return {"accuracy": float(right.mean())}


class Stream(IterableDataset[Any]):
    """Rows that cannot be counted before; the last batch of five is one of two."""

    def __iter__(self) -> Any:
        return iter(token_rows(7))


def evaluating(run: Run) -> Found:
    """At each step, with the best model loaded in the end, and early stopping; and of a stream."""
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    args = arguments(run, **steps, **best, save_total_limit=1, per_device_eval_batch_size=5)
    options = {"eval_dataset": token_rows(7), "compute_metrics": accuracy}
    made = trainer(run, gpt2(), args, **options, callbacks=[EarlyStoppingCallback(3)])
    made.train()
    predictions = made.predict(token_rows(3)).predictions
    best_at = str(made.state.best_global_step)
    found = {"best": best_at, "predictions": torch.tensor(predictions)}
    found["stream"] = made.evaluate(Stream())["eval_loss"]
    return {**logged(made), **found, **parameters(made.model)}


def resuming(run: Run) -> Found:
    """Two steps, and two more of a new trainer; the checkpoint is read by a plain model, too."""
    args = arguments(run, save_strategy="steps", save_steps=2, warmup_steps=2)
    trainer(run, gpt2(), args).train()
    made = trainer(run, gpt2(resid_pdrop=0.1, summary_first_dropout=0.3), args)
    made.train(resume_from_checkpoint=str(run.folder / "out" / "checkpoint-2"))
    plain = type(made.model).from_pretrained(run.folder / "out" / "checkpoint-2")
    state = json.loads((run.folder / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    read = {f"read.{name}": p for name, p in plain.named_parameters()}
    return {**logged(made), "steps": state["global_step"], **read, **parameters(made.model)}


def with_bf16(run: Run) -> Found:
    """Autocast: results are those of bfloat16, so differences are rounded."""
    made = trainer(run, llama(), arguments(run, bf16=True, max_steps=2))
    made.train()
    return {"loss": logged(made)["loss"]}


def in_parts(run: Run) -> Run:
    """Microbatches, and stages where the mesh has them."""
    if run.mesh is None or run.plan is None:
        return run
    plan, staged = run.plan, "pp" in (run.mesh.mesh_dim_names or ())
    words: dict[str, Any] = {"microbatches": 2}
    if staged:
        words["pipeline"] = "1f1b"
    return replace(run, plan=lambda model: plan(model).with_(**words))


def ignoring() -> list[dict[str, list[int]]]:
    """Rows of which more and more tokens do not count."""
    rows = token_rows()
    return [
        row | {"labels": [-100] * (at % 5) + row["labels"][at % 5 :]} for at, row in enumerate(rows)
    ]


def training_in_parts(run: Run) -> Found:
    """Without dropout, whose masks are other ones in parts."""
    steps = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}
    saved = {"save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5}
    args = arguments(run, **steps, **saved)
    rows = {"train_dataset": ignoring(), "eval_dataset": token_rows(7)}
    trainer(in_parts(run), llama(attention_dropout=0.0), args, **rows).train()
    made = trainer(in_parts(run), llama(attention_dropout=0.0), args, **rows)
    made.train(resume_from_checkpoint=str(run.folder / "out" / "checkpoint-2"))
    return {**logged(made), **parameters(made.model)}


def smoothed_in_parts(run: Run) -> Found:
    args = arguments(run, label_smoothing_factor=0.1, gradient_accumulation_steps=2)
    model = llama(attention_dropout=0.0)
    made = trainer(in_parts(run), model, args, train_dataset=ignoring())
    made.train()
    return {**logged(made), **parameters(made.model)}


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    rows, targets = outputs.logits[:, :-1], labels[:, 1:]
    total = cross_entropy(rows.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / num_items_in_batch


def own_loss_in_parts(run: Run) -> Found:
    options = {"train_dataset": ignoring(), "compute_loss_func": own_loss}
    made = trainer(in_parts(run), llama(attention_dropout=0.0), arguments(run), **options)
    made.train()
    return {**logged(made), **parameters(made.model)}


# In parts: one device is 2e-5 from itself if its gradients are moved by their rounding.
LIMITS = {"Trainer, bf16": 1e-2, "Trainer, microbatches": 5e-5}
CASES = {
    "Trainer": training,
    "Trainer, evaluation": evaluating,
    "Trainer, resumed": resuming,
    "Trainer, bf16": with_bf16,
    "Trainer, microbatches": training_in_parts,
    "Trainer, microbatches, smoothed labels": smoothed_in_parts,
    "Trainer, microbatches, own loss": own_loss_in_parts,
}
