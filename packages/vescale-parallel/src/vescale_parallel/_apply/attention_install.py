"""Lets the attention of a model run in the way that a plan asks for."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn
from vescale_dtensor import AttentionWay, sequence_attention


def install_attention(model: nn.Module, way: AttentionWay) -> None:
    """Let every module that has others inside, and the model, run in `sequence_attention(way)`.

    Not the model alone: what a module computes again in backward is not called by it.
    """
    if way == "auto":
        return
    for module in model.modules():
        if module is model or next(module.children(), None) is not None:
            within = _Within(way)
            module.register_forward_pre_hook(within.enter)
            # Also where forward raises, or what follows would run in this way.
            module.register_forward_hook(within.leave, always_call=True)


class _Within:
    """A module's hooks around its forward; of calls inside of calls, the inner ends first."""

    def __init__(self, way: AttentionWay) -> None:
        self._way = way
        self._open: list[ExitStack] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        """Before forward."""
        stack = ExitStack()
        stack.enter_context(sequence_attention(self._way))
        self._open.append(stack)

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        """Behind forward; where another hook raised before `enter`, there is nothing to leave."""
        if self._open:
            self._open.pop().close()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Within:
        """That of a copied module."""
        return _Within(self._way)
