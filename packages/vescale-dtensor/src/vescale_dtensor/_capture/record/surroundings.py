"""The modes, hooks, generators and kernels around the steps of a recording.

A program changes grad mode and autocast where its steps would notice; what else changes between two
steps, a replay would leave out: refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from vescale_dtensor._capture.guard.global_state import (
    GlobalState,
    backend_flags,
    global_state,
    is_off,
    leave_autocast,
    set_autocast,
)
from vescale_dtensor._capture.record.unsupported import refusal
from vescale_dtensor._torch.compat import generator_states, saved_tensor_hooks, set_grad_mode

# Fields of the global state that a program does not change on its way. The way of attention it may:
# it decides which calls are recorded, and nothing afterwards.
_fixed = operator.attrgetter("inference", "policy", "dtype", "half_sums")
_RAW = "torch.distributed.distributed_c10d"
HOOKS_OF_SAVED_TENSORS = (
    "saved-tensor hooks are active (torch's activation checkpointing, offloading), which a replay "
    "would leave out. Checkpoint by a plan, or by vescale_dtensor.checkpoint(f, x); or capture the "
    "function inside: torch's checkpoint(capture(f), x)"
)


class Surroundings:
    """Hooks of saved tensors, random generators, modes and choices of kernels.

    Args:
        start: the modes in which the recording begins.
    """

    def __init__(self, start: GlobalState) -> None:
        self._start = start
        self._backends = backend_flags()
        self._saved_hooks = saved_tensor_hooks()
        # After each step these must be what the step left.
        self._generators = generator_states()

    def check(self, func: Callable[..., Any] | None, name: str) -> None:
        """Refuse state that has changed around a step and that a replay would leave out.

        Args:
            func: the function of the step; None at the end.
            name: of it.

        Raises:
            CaptureError: with the line of user code.
        """
        if getattr(func, "__module__", None) == _RAW:
            raise refusal(
                f"torch.distributed.{name}: raw collectives write where they like. Use "
                "vescale_comm's, or DTensor.redistribute"
            )
        # Those that were active before are at a replay, too: around checkpoint(capture(f), x).
        if saved_tensor_hooks() != self._saved_hooks:
            raise refusal(HOOKS_OF_SAVED_TENSORS)
        # Each step notes the states that it left, so only something else can have moved them.
        if generator_states() != self._generators:
            raise refusal(
                "a random generator was moved by something other than a torch function "
                "(manual_seed, set_state, fork_rng), which a replay would leave out. Change it "
                "outside"
            )
        now = GlobalState(*global_state())
        if _fixed(now) != _fixed(self._start):
            raise refusal(
                "inference mode, the default dtype, the way of half_sums or the policy of random "
                "numbers changes inside. Change it outside"
            )
        if backend_flags() != self._backends:
            raise refusal(
                "what chooses between kernels (sdpa_kernel, use_deterministic_algorithms, "
                "set_num_threads, torch.backends) changes inside, which a replay would leave out. "
                "Change it outside"
            )

    @contextmanager
    def in_region(self) -> Iterator[None]:
        """The block of a region that backward computes again: its hooks are a part of it."""
        before, self._saved_hooks = self._saved_hooks, saved_tensor_hooks()
        try:
            yield
        finally:
            self._saved_hooks = before

    def drew(self) -> bool:
        """Whether the step that just ran moved a random generator; notes where they stand."""
        states = generator_states()
        drew, self._generators = states != self._generators, states
        return drew


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
