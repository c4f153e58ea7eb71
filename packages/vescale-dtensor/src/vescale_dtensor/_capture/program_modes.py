"""The modes in which a program is at its last step, which lag behind those of the function."""

from __future__ import annotations

from typing import Any

from torch import fx

from vescale_dtensor._capture.global_state import GlobalState, is_off, leave_autocast, set_autocast
from vescale_dtensor._torch.compat import set_grad_mode

Modes = tuple[bool, Any]
"""Grad mode, and autocast."""


class ProgramModes:
    """Grad mode and autocast of a program, changed only where a step would notice.

    Args:
        graph: the program as it grows.
        start: the modes in which it begins.

    Attributes:
        now: the modes at its last step.
    """

    def __init__(self, graph: fx.Graph, start: GlobalState) -> None:
        self._graph, self._start = graph, start
        self.now: Modes = start.grad, start.autocast

    def follow(self, state: GlobalState, sensitive: bool) -> None:
        """Let the program change modes as the function has, where the next step would notice.

        Args:
            state: of the function.
            sensitive: whether grad mode makes a difference to the step.
        """
        grad, autocast = self.now
        # Put off until a step is sensitive: code under `no_grad` that needs none gets no steps.
        if sensitive and state.grad != grad:
            self._graph.call_function(set_grad_mode, (state.grad,)).meta["effect"] = True
            grad = state.grad
        if state.autocast != autocast:
            # torch drops its cached casts where the outermost region ends, and only there.
            leaving = is_off(state.autocast) and is_off(self._start.autocast)
            change = leave_autocast if leaving else set_autocast
            self._graph.call_function(change, state.autocast or ()).meta["effect"] = True
        self.now = grad, state.autocast
