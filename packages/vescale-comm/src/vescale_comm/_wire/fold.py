"""Fold the members' tensors in a stated order (`order=`), with the functions of each reduction."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Literal, get_args

import torch
from torch import Tensor

from vescale_comm._errors import CommArgumentError

Order = Literal["native", "rank", "tree"]
"""In which order members are reduced: see `all_reduce`."""

Combine = Callable[[Tensor, Tensor], Tensor]

FOLDS: dict[str, Combine] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
"""The native reductions by the names that torch gives them, over the members first to last."""


def check_order(order: str) -> None:
    """Check that there is such an order.

    Raises:
        CommArgumentError: there is not.
    """
    if order not in get_args(Order):
        raise CommArgumentError(
            f"unknown order {order!r}; there are {', '.join(map(repr, get_args(Order)))}"
        )


def fold(rows: Sequence[Tensor], combine: Combine, order: str) -> Tensor:
    """Fold the members' tensors in a stated order.

    - `"rank"`: from the first to the last, `((x0 + x1) + x2) + x3`.
    - `"tree"`: neighbours first, then neighbours of those, `(x0 + x1) + (x2 + x3)`; where a level
      has an odd number, its last one goes up as it is: `((x0 + x1) + (x2 + x3)) + x4`.
    """
    if order != "tree":
        return reduce(combine, rows)
    level = list(rows)
    while len(level) > 1:
        pairs = [combine(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        # The slice is the odd last one, or empty. By member and not by size: the same for every
        # tensor.
        level = pairs + level[len(pairs) * 2 :]
    return level[0]
