"""The end of a step: what all ranks hear of it, and gradients of all stages put together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from vescale_comm.agreement import gather_texts
from vescale_dtensor import DTensor, local_leaf, reduce_gradients

from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.messages import Lines
from vescale_parallel._pipeline.stage import Kind, Repeated, Scene


def require_success(failure: Exception | None, where: str) -> None:
    """Raise on every rank where one has failed. Collective over all processes.

    Args:
        failure: what this rank could not do, if anything.
        where: this rank's place, for the others.

    Raises:
        Exception: that of this rank, on it.
        PipelineError: on the others, naming the first that failed, and what it said.
    """
    repeats = isinstance(failure, Repeated)
    said = [repeats, f"{where}: {type(failure).__name__}: {failure}"]
    told = gather_texts("" if failure is None else json.dumps(said))
    if not any(told):
        return
    # The first rank that has words of its own, and does not only repeat those of another.
    heard = [(*json.loads(one), rank) for rank, one in enumerate(told) if one]
    _, words, first = min(heard, key=lambda one: (one[0], one[2]))
    if failure is not None and not repeats:
        raise failure
    raise PipelineError(f"forward_backward failed on rank {first}, {words}")


def finish_step(
    loss: Tensor | None,
    kind: Kind,
    scene: Scene,
    lines: Lines,
    parameters: Sequence[nn.Parameter],
) -> Tensor:
    """The loss of the last stage, on every stage, without a history; gradients summed. Collective.

    Every rank is left with the gradients that optimizers and norms ask for. A parameter of another
    stage has a gradient of no elements, if it has one there: whoever goes through the gradients
    goes through the same ones on every rank. One that all stages hold has its gradient from all.

    Args:
        loss: that of this rank's microbatches, on the last stage.
        kind: of one of them.
        scene: this rank's part.
        lines: its connections.
        parameters: those that are trained, in the order of the model; none after an evaluation.
    """
    assert kind.loss is not None
    mine = [local_leaf(p).grad is not None for p in parameters]
    # One message for both: all numbers of float32 and below are numbers of float64.
    row = torch.tensor([0.0, *map(float, mine)], dtype=torch.float64, device=lines.device)
    if loss is not None:
        whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
        row[0] = whole.detach().reshape(()).double()
    rows = lines.gather(row)
    anywhere = rows[:, 1:].any(0).tolist()
    for there, one, parameter in zip(anywhere, mine, parameters, strict=True):
        local = local_leaf(parameter)
        if there and not one:
            local.grad = torch.zeros_like(local)
    reduce_gradients(p for p, there in zip(parameters, anywhere, strict=True) if there)
    # A copy: the message goes.
    return rows[scene.split.ranks[-1], 0].to(kind.loss.dtype, copy=True)


class NewGradients:
    """Gradients that a step makes: dropped if it fails, or the next one would be added to a part.

    Which microbatches have left something, of which stages and on which ranks, depends on what
    failed, where. Gradients that were there before the step are added to as it goes, as in torch,
    and keep what came until it failed.

    Args:
        parameters: those that are trained.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._without = [one for one in parameters if one.grad is None]

    def drop(self) -> None:
        """The step has failed."""
        for one in self._without:
            if one.grad is not None:
                one.grad = None


class EarlierGradients:
    """Gradients of parameters of several stages that were there before a step: put aside meanwhile.

    Each stage adds its contributions to `.grad`, which are summed at the end. Where a total or
    memory of the user's is in it, that would take a collective in the backward of some stages, or
    count on some of them only.

    Args:
        parameters: those that several stages hold.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._before = [(one, one.grad) for one in parameters if one.grad is not None]
        for one, _ in self._before:
            one.grad = None

    def add(self) -> None:
        """The step has ended: what was there before, and what has come, in the same memory."""
        with torch.no_grad():
            for one, before in self._before:
                found = one.grad
                if found is not None and before is not None:
                    before.add_(found)
        self.restore()

    def restore(self) -> None:
        """Let the gradients be what they were."""
        for one, before in self._before:
            one.grad = before
        self._before = []
