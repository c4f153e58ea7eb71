"""Reference semantics of the collectives, over the tensors of all members in one process.

`Emulator` and `simulate` both call these, so that there is one definition of each movement.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vescale_comm._wire.fold import FOLDS


def reduced(inputs: Sequence[Tensor], op: str) -> Tensor:
    """Fold the members' tensors, first to last; AVG divides the sum at the end."""
    fold = FOLDS["SUM" if op == "AVG" else op]
    # First to last, with one rounding for each step: a native reduction may have any order, and
    # this one is the same for every world size and run.
    total = inputs[0].clone()
    for each in inputs[1:]:
        total = fold(total, each)
    return total / len(inputs) if op == "AVG" else total


def concatenate(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Fill every output with all inputs, one after the other."""
    whole = torch.cat([each.reshape(-1) for each in inputs])
    for out in outputs:
        out.copy_(whole.view(out.shape))


def exchange(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    send: Sequence[Sequence[int]],
) -> None:
    """Give member j its part of every input; `send[i][j]` is the extent of what i sends to j."""
    parts = [torch.split(x, list(sizes)) for x, sizes in zip(inputs, send, strict=True)]
    for j, out in enumerate(outputs):
        out.copy_(torch.cat([part[j] for part in parts]))
