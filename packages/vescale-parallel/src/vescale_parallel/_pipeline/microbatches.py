"""A batch in microbatches: how it is divided, and a step over them where a model has no stages."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from vescale_dtensor import DTensor

from vescale_parallel._pipeline.finish.step_end import NewGradients
from vescale_parallel._step.parts import Part, loss_of
from vescale_parallel._zero.schedule import zero_schedule_of


def divided(part: Part, count: int, dim: int) -> list[tuple[Part, float]]:
    """Return microbatches and their shares of the rows: fewer than `count` of fewer rows.

    Raises:
        ParallelError: tensors of different numbers of rows, or none.
    """

    def dim_of(tensor: Tensor) -> int | None:
        return dim if tensor.ndim > dim else None

    if count == 1:
        return [(part, 1.0)]
    rows = part.rows(dim_of)
    sizes = sizes_of(rows, count)
    parts = part.cut(dim_of, sizes)
    return [(one, length / rows) for one, length in zip(parts, sizes, strict=True)]


def sizes_of(rows: int, count: int) -> list[int]:
    """Return the rows of each microbatch; none is empty, so that fewer rows make as many parts."""
    # As `torch.chunk` divides, all but the last equal, where that makes so many.
    size = -(-rows // count)
    if -(-rows // size) == count:
        return [min(size, rows - start) for start in range(0, rows, size)]
    # Else as `torch.tensor_split`: the first ones have a row more.
    size, more = divmod(rows, count)
    return [size + (at < more) for at in range(min(rows, count))]


def drop_kept(model: nn.Module) -> None:
    """Gradients of microbatches before one that failed: nobody will ask for their sum."""
    zero = zero_schedule_of(model)
    if zero is not None:
        zero.drop_kept()


class MicrobatchStep:
    """Accumulates over microbatches, and reduces gradients once.

    Args:
        model: the parallelised model.
        microbatches: how many a batch is divided into.
        dim: the dim of rows.
    """

    def __init__(self, model: nn.Module, microbatches: int, dim: int) -> None:
        self._model, self.microbatches, self._dim = model, microbatches, dim

    def forward_backward(self, part: Part) -> Tensor:
        """Return the loss of the whole batch; gradients are left complete."""
        total: Tensor | None = None
        parts = divided(part, self.microbatches, self._dim)
        zero = zero_schedule_of(self._model)
        trained = [p for p in self._model.parameters() if p.requires_grad]
        new = NewGradients([p for p in trained if p.grad is None])
        for at, (one, weight) in enumerate(parts):
            # The last microbatch reduces what all of them have left: one collective for each unit
            # and step.
            keeps = zero is not None and at + 1 < len(parts)
            try:
                with zero.no_sync() if keeps else nullcontext():  # type: ignore[union-attr]
                    found = loss_of(one, self._model(*one.args, **one.kwargs)) * weight
                    # A loss without a history is torch's error, as on one device.
                    if torch.is_grad_enabled():
                        found.backward()  # type: ignore[no-untyped-call]
            except BaseException:
                drop_kept(self._model)
                new.drop()
                raise
            # The history of a microbatch ends with its backward: held, it would keep its
            # activations.
            value = found.detach()
            total = value if total is None else total + value
        assert total is not None
        whole: Tensor = total.full_tensor() if isinstance(total, DTensor) else total
        return whole
