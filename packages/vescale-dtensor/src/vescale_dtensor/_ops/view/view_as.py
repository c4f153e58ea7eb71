"""`x.view_as(y)`, `reshape_as`, `expand_as`: the second tensor lends its shape, and is not read.

So its layout does not matter, and nothing of it is sent, whatever it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch.dispatch import by_rule
from vescale_dtensor._ops.view.reshape import RESHAPE, VIEW
from vescale_dtensor._ops.view.transpose import EXPAND
from vescale_dtensor._planning.plan import Rule
from vescale_dtensor._tensor.dtensor import DTensor


def _of_shape(func: Callable[..., Any], view: Callable[..., Any], rule: Rule) -> Any:
    def run(self: Tensor, other: Tensor) -> Any:
        if isinstance(self, DTensor) and isinstance(other, Tensor):
            return view(self, tuple(other.shape))
        # A plain tensor, which is replicated first.
        return by_rule(rule, func, (self, other), {})

    return run


HANDLERS: dict[Any, Callable[..., Any]] = {
    func: _of_shape(func, view, rule)
    for func, view, rule in (
        (torch.Tensor.view_as, torch.Tensor.view, VIEW),
        (torch.Tensor.reshape_as, torch.Tensor.reshape, RESHAPE),
        (torch.Tensor.expand_as, torch.Tensor.expand, EXPAND),
    )
}
"""Functions this module answers for."""
