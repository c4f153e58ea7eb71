"""Gives `torch.compile` of a parallelised model, or of a block, captured forwards to run.

A compiler that looks into operations on DTensors breaks its graph at each of them. So it is shown
one call, which it makes as it is; from then on the forward is captured and replayed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import update_wrapper
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_dtensor import ReplayCheck, untraced

from vescale_parallel._common.pickle_refusal import NotPickled
from vescale_parallel._static.forward import StaticForward, static_forward
from vescale_parallel._zero.unit import Unit

_CAPTURED: Final = (
    "torch.compile of a parallelised model, or of a block of it, captures forwards and replays "
    "them: results are those of eager mode, and the backend is given nothing to compile, whatever "
    "it and its options are. For compiled code between collectives, make a graph of the step: "
    "vescale_parallel.graph.train_step, schedule, compile_regions."
)
_AS_IT_IS: Final = (
    "torch.compile runs this parallelised model, or this part of it, as it is: its backend is "
    "given nothing to compile."
)
_is_compiling = torch.compiler.is_dynamo_compiling


class CompileEntry(NotPickled):
    """Takes the place of a module's `forward`, as an attribute of the module.

    In eager mode it calls the forward that was there. The first call out of a compiled region
    captures the forward, as `static=True` does, for that call and all later ones.

    Attributes:
        name: of the module in the model.
        module: it.
        forward: what it computes by: the module's own, or a `StaticForward`.
        captures: whether this module's forward may be captured; else it just runs.
        check: which replays are compared with the forward, once it is captured; None: none.
        together: entries that are captured when this one is: those of the model's blocks.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        units: Sequence[Unit],
        mesh: DeviceMesh | None,
        *,
        captures: bool,
        check: ReplayCheck | None,
    ) -> None:
        # First, as it brings attributes along. So that who looks at its signature sees the model's.
        update_wrapper(self, forward)
        self.name, self.module, self.forward = name, module, forward
        self.captures, self.together = captures, tuple[CompileEntry, ...]()
        self.check = check
        self._units, self._mesh, self._told = tuple(units), mesh, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute."""
        if _is_compiling():
            return self._compiled(*args, **kwargs)
        return self.forward(*args, **kwargs)

    @untraced
    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        entries = (self, *self.together)
        if not self._told:
            self._told = True
            captured = any(one.captures for one in entries)
            warnings.warn(_CAPTURED if captured else _AS_IT_IS, stacklevel=2)
        for one in entries:
            one.capture()
        return self.forward(*args, **kwargs)

    def capture(self) -> None:
        """Capture the forward, if it may be and has not been yet."""
        if not self.captures or isinstance(self.forward, StaticForward):
            return
        self.forward = static_forward(
            self.name, self.module, self.forward, self._units, self._mesh, check=self.check
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompileEntry:
        """That of a copied module."""
        made = CompileEntry.__new__(CompileEntry)
        memo[id(self)] = made  # first: its module and its units lead back here
        module, units = deepcopy(self.module, memo), deepcopy(self._units, memo)
        forward = deepcopy(self.forward, memo)  # a method is bound to the copy
        how: Any = {"captures": self.captures, "check": self.check}
        CompileEntry.__init__(made, self.name, module, forward, units, self._mesh, **how)
        made.together = deepcopy(self.together, memo)
        return made
