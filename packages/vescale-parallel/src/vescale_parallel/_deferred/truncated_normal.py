"""`torch.nn.init.trunc_normal_`, which draws again what is out of bounds, until nothing is.

It looks at the numbers, so recording its ops would draw them all for each look. It is recorded as
one step instead: vescale-rng knows which numbers it leaves, and where the generator is then. torch
(since 2.13) asks a tensor first whether it is on the meta device, and leaves those alone; who asks
is told by the calling frame. Where torch does not ask, its ops are recorded one by one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import init
from vescale_rng import RngError, ShardLayout, trunc_normal_, use
from vescale_rng.cuda import CudaPosition
from vescale_rng.streams import Position, position

from vescale_parallel._deferred.tape import Fill

_FRAMES: Final = 8
"""How far up the caller is looked for: torch calls through a few functions of its own."""


@dataclass(frozen=True)
class TruncatedNormal(Fill):
    """`trunc_normal_` of these parameters, as a function of a tensor."""

    mean: float
    std: float
    a: float
    b: float
    generator: torch.Generator

    def fill(self, local: Tensor, layout: ShardLayout) -> None:
        """See `Fill.fill`."""
        bounds = (self.mean, self.std, self.a, self.b)
        with use("native"), warnings.catch_warnings():
            # torch has said it already.
            warnings.simplefilter("ignore")
            trunc_normal_(local, *bounds, generator=self.generator, layout=layout)

    @property
    def summary(self) -> str:
        """See `Fill.summary`."""
        return f"{self.mean} {self.std} {self.a} {self.b}"

    def skipped(
        self, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator
    ) -> Position | CudaPosition | None:
        """Move the generator past it, and return where it was; None where that is not known."""
        place = position(generator)
        try:
            # As on a rank without elements: nothing is drawn, and the generator ends where all of
            # it would leave it.
            self.fill(torch.empty(0, dtype=dtype, device="cpu"), ShardLayout(tuple(shape), ()))
        except RngError:
            return None
        return place


def asked_for() -> tuple[TruncatedNormal, torch.Generator] | None:
    """The call of `trunc_normal_` that this function was called from, if it was."""
    filling = getattr(init, "_no_grad_trunc_normal_", None)
    code = getattr(filling, "__code__", None)
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        # By the code object: nothing else tells which of torch's functions is asking.
        if frame.f_code is code:
            return _read(frame.f_locals)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _read(names: Any) -> tuple[TruncatedNormal, torch.Generator] | None:
    tensor = names.get("tensor")
    if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
        return None
    generator = names.get("generator") or torch.default_generator
    values = [names.get(key) for key in ("mean", "std", "a", "b")]
    if not all(isinstance(one, int | float) for one in values):
        return None
    mean, std, a, b = (float(one) for one in values if one is not None)
    return TruncatedNormal(mean, std, a, b, generator), generator
