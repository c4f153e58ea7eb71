"""Lets the attention of a model run in the way that a plan asks for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn
from vescale_dtensor import AttentionWay, sequence_attention

from vescale_parallel._common.pickle_refusal import NotPickled


def install_attention(model: nn.Module, way: AttentionWay) -> ForwardHooks | None:
    """Let every module that has others inside, and the model, run in `sequence_attention(way)`.

    Not the model alone: what a module computes again in backward is not called by it.

    Returns:
        The hooks; None where there are none.
    """
    if way == "auto":
        return None
    within = ForwardHooks(way)
    for module in _surrounded(model).values():
        module.register_forward_pre_hook(within.enter)
        # Also where forward raises, or what follows would run in this way.
        module.register_forward_hook(within.leave, always_call=True)
    return within


def _surrounded(model: nn.Module) -> dict[str, nn.Module]:
    named = model.named_modules()
    return {n: m for n, m in named if m is model or next(m.children(), None) is not None}


class ForwardHooks(NotPickled):
    """Hooks around forwards of a model's modules; of calls within calls, the inner ends first."""

    def __init__(self, way: AttentionWay) -> None:
        self._way = way
        self._open: list[tuple[nn.Module, ExitStack]] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        """Before forward."""
        stack = ExitStack()
        stack.enter_context(sequence_attention(self._way))
        self._open.append((module, stack))

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        """Behind forward; where another hook raised before `enter`, there is nothing to leave."""
        if any(one is module for one, _ in self._open):
            # Those that were interrupted within it, too.
            while self._leave_last() is not module:
                pass

    def ends(self, model: nn.Module) -> dict[str, Callable[[], Any]]:
        """For modules, by name, what is to be called where their forward is interrupted."""
        return {n: partial(self.leave, m, (), None) for n, m in _surrounded(model).items()}

    def _leave_last(self) -> nn.Module:
        module, stack = self._open.pop()
        stack.close()
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardHooks:
        """That of a copied model."""
        return ForwardHooks(self._way)
