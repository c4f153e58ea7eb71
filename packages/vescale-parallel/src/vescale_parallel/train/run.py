"""A training run: what it is made of, how it is built, and one step of it.

Nothing in this file knows whether the model is on one device or on a mesh.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR

from vescale_parallel._apply.parallelize import parallelize
from vescale_parallel._errors import TrainError
from vescale_parallel.train.data import Corpus, training_batch, validation_batches
from vescale_parallel.train.model import Decoder
from vescale_parallel.train.options import Options
from vescale_parallel.train.plan import PLAN


@dataclass
class Run:
    """A model in training.

    Attributes:
        options: what was asked for.
        corpus: the text.
        model: plain, or distributed over a mesh.
        optimizer: an unmodified AdamW.
        scheduler: warm-up, then a cosine.
        device: where batches go.
        step: how many updates were made.
        checkpoint: the newest one of this run, or the one that it continues.
    """

    options: Options
    corpus: Corpus
    model: nn.Module
    optimizer: torch.optim.AdamW
    scheduler: LambdaLR
    device: torch.device
    step: int = 0
    checkpoint: Path | None = None


class DivergedError(TrainError):
    """The loss, the gradients or the parameters are not finite; nothing was updated or saved."""


@dataclass(frozen=True)
class StepResult:
    """What a step reports: its loss before the update, the norm of all gradients, its rate."""

    loss: float
    grad_norm: float
    learning_rate: float


def build(options: Options, corpus: Corpus, mesh: DeviceMesh | None, device: str = "cpu") -> Run:
    """Return a run at step 0; without a mesh it is plain single-device PyTorch throughout."""
    # One seed on every rank: all build the same model, and random numbers continue from there.
    torch.manual_seed(options.seed)
    model: nn.Module = Decoder(options.model).to(device)
    if mesh is not None:
        parallelize(model, mesh, PLAN.with_(zero=options.zero))
    # After parallelize, which replaces parameters: an optimizer holds the objects it is given.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay
    )
    scheduler = LambdaLR(optimizer, _warm_up_then_cosine(options))
    return Run(options, corpus, model, optimizer, scheduler, torch.device(device))


def go_to_step(run: Run, step: int) -> None:
    """Set how many updates were made, and the learning rate to that of the options at this step."""
    # Not read from a checkpoint: the rates that it was trained with may not be those asked for now.
    factor = _warm_up_then_cosine(run.options)
    run.scheduler = LambdaLR(run.optimizer, factor, last_epoch=step - 1)
    run.step = step


def _warm_up_then_cosine(options: Options) -> Callable[[int], float]:
    """Factor of the learning rate by step: linear from 0, then half a cosine down to a tenth."""
    length = max(1, (options.decay_steps or options.steps) - options.warmup)

    # A function, not a callable object: LambdaLR would save the object's attributes in its state.
    def factor(step: int) -> float:
        if step < options.warmup:
            return (step + 1) / options.warmup
        done = min(1.0, (step - options.warmup) / length)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return factor


def train_step(run: Run) -> StepResult:
    """Return one update: forward, backward, clip, step, schedule.

    Raises:
        DivergedError: on every rank, before the update: the loss or a gradient is not finite.
    """
    tokens, targets = batch_of(run, run.step)
    run.optimizer.zero_grad()
    loss = run.model(tokens, targets)
    loss.backward()
    # Over all shards: the norm is that of the global gradients, and the first to need their sums.
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), run.options.clip)
    rate = run.scheduler.get_last_lr()[0]
    # On a mesh both are global values: `.item()` of a distributed tensor is that of one device, so
    # all ranks decide alike. Before the update: one NaN in a gradient makes all parameters NaN.
    result = StepResult(loss.item(), norm.item(), float(rate))
    require_finite(run, f"the loss of step {run.step + 1}", result.loss)
    require_finite(run, f"the norm of the gradients of step {run.step + 1}", result.grad_norm)
    run.optimizer.step()
    run.scheduler.step()
    run.step += 1
    return result


def require_finite(run: Run, what: str, value: float) -> None:
    """Stop a run that has diverged; every rank passes the same value.

    Raises:
        DivergedError: the value is infinite or NaN.
    """
    if math.isfinite(value):
        return
    kept = f"the last good checkpoint is {run.checkpoint}" if run.checkpoint else "none was saved"
    raise DivergedError(
        f"{what} is {value}: training has diverged and stops before it changes or saves anything; "
        f"{kept}. Try a smaller --lr (it is {run.options.lr:g}) or --clip, or a longer --warmup."
    )


def require_finite_parameters(run: Run) -> None:
    """What a checkpoint must not overwrite a good one with; a collective on a mesh.

    Raises:
        DivergedError: a parameter is infinite or NaN, as after an update that was too large.
    """
    values = [parameter.detach() for parameter in run.model.parameters()]
    norm = nn.utils.get_total_norm(values, foreach=None).item()
    require_finite(run, f"the norm of the parameters after step {run.step}", norm)


def batch_of(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Return the global batch of a step, on the run's device."""
    options = run.options
    # The global batch, on every rank: the plan's `batch` layout keeps each rank's shard of it.
    tokens, targets = training_batch(
        run.corpus, batch=options.batch, context=options.context, seed=options.seed, step=step
    )
    return tokens.to(run.device), targets.to(run.device)


@torch.no_grad()
def validate(run: Run) -> float:
    """Mean loss over held-out text, without dropout."""
    options = run.options
    # On every rank: the train flags of a distributed model must agree, as its random numbers do.
    run.model.eval()
    total, tokens_seen = 0.0, 0
    for tokens, targets in validation_batches(
        run.corpus,
        batch=options.batch,
        context=options.context,
        batches=options.validation_batches,
    ):
        loss = run.model(tokens.to(run.device), targets.to(run.device))
        # Weighted, because the last batch may be smaller.
        total += loss.item() * tokens.numel()
        tokens_seen += tokens.numel()
    run.model.train()
    return total / tokens_seen
