"""Notes whether an optimizer has stepped a model since the last step of its stages.

On stages of one rank parameters are plain tensors while they run, so that nothing else tells of a
rank that leaves out a step, or does one more.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from vescale_parallel._common.optimizer_hooks import Args, watch_steps


class OptimizersOf:
    """Which optimizers step parameters of a model: hooks on steps are called for all.

    Args:
        model: with distributed parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        # By optimizer: its first parameter, and whether that is one of the model's.
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[Any, bool]]
        self._known = weakref.WeakKeyDictionary()

    def has(self, optimizer: Optimizer) -> bool:
        """Whether the first parameter of an optimizer is one of the model's."""
        model, groups = self._model(), optimizer.param_groups
        first = next((one for group in groups for one in group["params"]), None)
        if model is None or first is None:
            return False
        known, found = self._known.get(optimizer, (None, False))
        if known is not first:
            found = any(one is first for one in model.parameters())
            self._known[optimizer] = first, found
        return found


class StepWatcher:
    """Is called for steps of optimizers of a model.

    Args:
        model: with distributed parameters.

    Attributes:
        lately: whether there was one since this was last set to False.
    """

    def __init__(self, model: nn.Module) -> None:
        self.lately = False
        self._optimizers = OptimizersOf(model)
        watch_steps(self)

    def before_step(self, optimizer: Optimizer, args: Args, kwargs: Any) -> None:
        """Nothing."""

    def after_step(self, optimizer: Optimizer, args: Args, kwargs: Any) -> None:
        """Note it, if it is one of the model's."""
        if not self.lately:
            self.lately = self._optimizers.has(optimizer)
