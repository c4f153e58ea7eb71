"""Ends a step: reports failures on all ranks, and completes gradients of all stages."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from vescale_comm import Group, as_group
from vescale_comm.agreement import gather_bytes, several_ranks
from vescale_dtensor import DTensor, Replicate
from vescale_dtensor.storage import local_leaf, reduce_gradients

from vescale_parallel._common.gradient_dtypes import gradient_dtype
from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.plan.model_walk import TrainedParameters
from vescale_parallel._pipeline.run.messages import Lines
from vescale_parallel._pipeline.run.rank_stages import RankStages
from vescale_parallel._pipeline.trace.microbatch_kinds import Kind, RepeatedError
from vescale_parallel._pipeline.trace.tensor_specs import local_of

_NOTE: Final = b"\0"
"""How what is no failure begins: no compressed text does."""

_LOSS_BYTES: Final = 8


def require_success(
    failure: BaseException | None, where: str, note: bytes = b"", group: Group | None = None
) -> dict[int, bytes]:
    """Raise on every rank where one has failed. Collective.

    Args:
        failure: what this rank could not do, if anything.
        where: this rank's place, for the others.
        note: what this rank tells if it has not failed: it goes along.
        group: the ranks of the mesh; None: all processes. Others may run another model.

    Returns:
        The notes of all, by rank.

    Raises:
        BaseException: that of this rank, on it.
        PipelineError: on the others, naming the first that failed, and what it said.
    """
    repeats = isinstance(failure, RepeatedError)
    said = json.dumps([repeats, f"{where}: {type(failure).__name__}: {failure}"])
    own = _NOTE + note if failure is None else zlib.compress(said.encode())
    ranks = as_group(group).ranks if several_ranks(group) else (0,)
    told = dict(zip(ranks, gather_bytes(own, group), strict=True))
    if all([one.startswith(_NOTE) for one in told.values()]):
        return {rank: one[len(_NOTE) :] for rank, one in told.items()}
    # The first rank that has words of its own, and does not only repeat those of another.
    failed = [(one, rank) for rank, one in told.items() if not one.startswith(_NOTE)]
    heard = [(*json.loads(zlib.decompress(one)), rank) for one, rank in failed]
    _, words, first = min(heard, key=lambda one: (one[0], one[2]))
    if failure is not None and not repeats:
        raise failure
    raise PipelineError(f"forward_backward failed on rank {first}, {words}")


def note_of(loss: Tensor | None, trained: TrainedParameters, *, whole: bool) -> bytes:
    """What a rank tells the others of its stages at the end of a step, see `finish_step`.

    Args:
        loss: that of this rank's microbatches, on the last stage.
        trained: the parameters that are trained.
        whole: whether each rank of the last stage has the value of the loss: see `is_whole`.
    """
    bits = 0
    # A bit for each parameter: all ranks have the same ones, in one order.
    for leaf in reversed(trained.leaves):
        bits = bits << 1 | (leaf.grad is not None)
    value = float("nan")
    if loss is not None and whole:
        if isinstance(loss, DTensor) and not is_whole(loss.placements):
            raise PipelineError(
                f"the loss is {loss.placements}, and was whole on each rank for a batch of this "
                "shape before. The model has to compute alike for batches of one shape."
            )
        local = local_of(loss.detach())
        if _tells_loss(local.device.type):
            # All numbers of float32 and below are numbers of float64.
            value = float(local)
    return struct.pack("<d", value) + bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _tells_loss(device: str) -> bool:
    """Whether notes have the value of the loss."""
    # Read from a GPU it would wait for all of the step, and every rank with it, before the next
    # one can be queued.
    return device == "cpu"


def is_whole(placements: Sequence[object] | None) -> bool:
    """Whether each rank of a stage has the values of a tensor of these placements."""
    return placements is None or all(isinstance(one, Replicate) for one in placements)


def finish_step(
    loss: Tensor | None,
    notes: Mapping[int, bytes],
    kind: Kind,
    scene: RankStages,
    lines: Lines,
    trained: TrainedParameters,
    *,
    whole: bool,
) -> Tensor:
    """The loss of the last stage, on every stage, without a history; gradients summed. Collective.

    Every rank is left with the gradients that optimizers and norms ask for. A parameter of another
    stage has a gradient of no elements, if it has one there: whoever goes through the gradients
    goes through the same ones on every rank. One that all stages hold has its gradient from all.

    Args:
        loss: that of this rank's microbatches, on the last stage.
        notes: by rank, what `note_of` gives on each.
        kind: of one of the microbatches.
        scene: this rank's part.
        lines: its connections.
        trained: the parameters that are trained, in the order of the model; none after an
            evaluation.
        whole: as in `note_of`.
    """
    assert kind.loss is not None
    # Of one process where there is nobody to talk to, as with the backend `fake`.
    told = [notes[rank] for rank in lines.ranks] if len(notes) > 1 else [*notes.values()]
    anywhere = 0
    for one in told:
        anywhere |= int.from_bytes(one[_LOSS_BYTES:], "little")
    there, leaves = trained
    if anywhere + 1 != 1 << len(leaves):  # not of all, as mostly
        there = [one for at, one in enumerate(there) if anywhere >> at & 1]
        leaves = [one for at, one in enumerate(leaves) if anywhere >> at & 1]
    for leaf in [one for one in leaves if one.grad is None]:
        leaf.grad = scene.nothing_like(leaf)
    reduce_gradients(there)
    last = scene.split.ranks[-1]
    if whole and _tells_loss(lines.device):
        (value,) = struct.unpack("<d", told[last if len(told) > 1 else 0][:_LOSS_BYTES])
        return torch.tensor(value, dtype=kind.loss.dtype, device=lines.device)
    # Perhaps a sum over the ranks of the last stage. All of them have succeeded, so all come to it.
    # On every rank, and of one form: all of the axis take part in the broadcast below, also those
    # that have no loss.
    row = torch.zeros(1, dtype=torch.float64, device=lines.device)
    if loss is not None:
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        row[0] = value.detach().reshape(()).double()
    return lines.broadcast(row, last)[0].to(kind.loss.dtype, copy=True)


class NewGradients:
    """Gradients that a step makes: dropped if it fails, or the next one would be added to a part.

    Which microbatches have left something, of which stages and on which ranks, depends on what
    failed, where. Gradients that were there before the step are added to as it goes, as in torch,
    and keep what came until it failed.

    Args:
        without: the parameters that are trained, and have no gradient before the step.
    """

    def __init__(self, without: Sequence[nn.Parameter]) -> None:
        self._without = without

    def drop(self) -> None:
        """The step has failed."""
        # What a rank drops is compared with what the others drop, and which of them have gradients
        # by now differs: so each has one of everything, of no memory.
        for one in self._without:
            # Of plain ones, which came to the model later, nobody notes anything.
            if one.grad is None and isinstance(one, DTensor):
                leaf = local_leaf(one)
                leaf.grad = leaf.new_zeros((), dtype=gradient_dtype(leaf)).expand(leaf.shape)
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
                    # Not the other way round: a user may hold this memory.
                    before.add_(found)
        self.restore()

    def restore(self) -> None:
        """Let the gradients be what they were."""
        for one, before in self._before:
            one.grad = before
        self._before = []
