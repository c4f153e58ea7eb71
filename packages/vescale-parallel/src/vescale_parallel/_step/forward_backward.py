"""`forward_backward(model, ...)`: a training step in one call, computed as its plan says."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vescale_parallel._step.distribute_batch import distribute_targets
from vescale_parallel._step.parts import Part, loss_of

_STEP: Final = "_vescale_step"
"""The attribute of a model that holds its `Step`: deep copies and compiled models lead to it."""

_AS_IT_IS: Final = (
    "forward_backward in stages or microbatches runs the model within torch.compile as it is: its "
    "backend is given nothing to compile."
)


@runtime_checkable
class Step(Protocol):
    """Computes the parts of a step.

    One of `_pipeline.step.StagedStep` (pipeline stages), `_pipeline.microbatches.MicrobatchStep`
    and `_invariant.step.InvariantStep` (logical shards), as `parallelize` chooses by the plan.
    """

    def forward_backward(self, part: Part) -> Tensor:
        """Return the loss of the whole batch; gradients are left complete. Collective.

        Args:
            part: all arguments of the step, not cut yet.
        """


def step_of(model: nn.Module) -> Step | None:
    """Return what computes the steps of a model; None: it runs once, on the whole batch."""
    step = getattr(model, _STEP, None)
    return step if isinstance(step, Step) else None


def install_step(model: nn.Module, step: Step) -> None:
    """Let `forward_backward` compute the steps of a model by this."""
    setattr(model, _STEP, step)


def forward_backward(model: nn.Module, *args: Any, loss: Any = None, **kwargs: Any) -> Tensor:
    """Run forward and backward on a batch, in the parts that the model's plan asks for.

    The loss of the batch is the mean of the losses of its parts, weighted by their rows: what one
    device gets that accumulates over the same parts. Gradients are added to `.grad`, reduced once;
    the optimizer's step is the caller's. Under `torch.no_grad()` only the forward runs.

    A step in parts that raises drops the gradients that it made. Those that were there before keep
    what was added until it failed, as in torch: `zero_grad()` them.

    Parts count by rows. The mean over tokens that are not ignored (-100) is taken within each part,
    so where parts have unequal numbers of them it is not the mean of the whole batch, as it is not
    on one device that accumulates. With `num_items_in_batch`, by which models of Hugging Face
    divide the sum over the tokens, the losses of the parts are added up: the mean over all tokens.

    Args:
        model: what `parallelize` returned; any other model runs once, on the whole batch.
        *args: of the model: the whole batch, on every rank; with `batch_is="local"` its rows.
        loss: what makes a scalar of the model's output. None: the output is the loss, or has it as
            `.loss` or `["loss"]`, as models of Hugging Face have. A function: `loss(output)`. A
            tuple of a function and more arguments, cut as the batch is: `(function, targets)` is
            `function(output, targets)`. It is a mean over rows or tokens, not a sum (but with
            `num_items_in_batch`, a sum divided by that). With stages it is called on the last one
            only: what it changes outside, other ranks do not see; a `GradScaler` is started on
            every rank by `scaler.scale(torch.zeros(()))`.
        **kwargs: of the model.

    Returns:
        The loss of the whole batch, without a history, on every rank.

    Raises:
        ParallelError: there is no loss to be had, or arguments have different numbers of rows.
    """
    part = Part.of(args, kwargs, loss)
    step = step_of(model)
    if step is not None:
        # What torch.compile returns has the model inside, to which all attributes lead.
        if "_orig_mod" in model._modules:
            warnings.warn(_AS_IT_IS, stacklevel=2)
        return step.forward_backward(part)
    # As the model's own hooks do with its arguments: a loss outside of it compares distributed
    # outputs with them.
    targets = distribute_targets(model, part)
    found = loss_of(replace(part, targets=targets), model(*part.args, **part.kwargs))
    if torch.is_grad_enabled():
        found.backward()  # type: ignore[no-untyped-call]
    return found.detach()
