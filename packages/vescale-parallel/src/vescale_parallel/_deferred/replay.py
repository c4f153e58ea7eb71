"""Run the steps that make a value, on real memory, as one device ran them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from vescale_rng.streams import at

from vescale_parallel._deferred.tape import Constant, Step, Value, ValueSteps, making_of
from vescale_parallel._errors import DeferredError

replaying: ContextVar[bool] = ContextVar("replaying", default=False)
"""Whether ops run on real memory: `deferred()` then looks away."""


def replay(value: Value) -> Tensor:
    """Return a real tensor with what a value holds, bitwise what one device computed.

    Memory: that of the value, and of what its steps hold at a time.

    Raises:
        DeferredError: a real tensor that a step read was written to since.
    """
    # A context variable: other threads go on building deferred tensors meanwhile.
    token = replaying.set(True)
    try:
        return _replay(value, making_of(value))
    finally:
        replaying.reset(token)


def _replay(value: Value, making: ValueSteps) -> Tensor:
    last = _last_uses(making)
    real: dict[Value, Tensor] = {}
    for step in making.steps:
        if step in making.hollow:
            made: Any = [allocated(one) for one in step.made]
        else:
            made = run(step, real)
        keep(step, made, real)
        for one in [*step.values, *step.made]:
            # What no later step needs is freed: only so is the memory bounded.
            if last.get(one, -1) <= step.number and one is not value:
                real.pop(one, None)
    return real[value]


def _last_uses(making: ValueSteps) -> dict[Value, int]:
    return {one: step.number for step in making.steps for one in step.values if step.reads}


def allocated(value: Value) -> Tensor:
    """Memory for a value, with arbitrary contents."""
    meta = value.meta
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=value.device)


def keep(step: Step, made: Any, real: dict[Value, Tensor]) -> None:
    """Note the tensors that a step returned."""
    tensors = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
    for value in step.made:
        real[value] = tensors[value.place]


def run(step: Step, real: dict[Value, Tensor]) -> Any:
    """Run one step on the tensors in place of its values."""

    def given(one: Any) -> Any:
        if isinstance(one, Value):
            # Where only shapes are read, a tensor without memory tells them.
            return real[one] if step.reads else one.meta
        return constant(one, step) if isinstance(one, Constant) else one

    args, kwargs = tree_map(given, (step.args, step.kwargs))
    drawing = at(step.draw.place, step.draw.generator) if step.draw else nullcontext()
    # Ops that are told no dtype ask for the default while they run, which is that of the recording.
    with torch.no_grad(), default_dtype(step.default_dtype), drawing:
        return step.func(*args, **kwargs)


def constant(one: Constant, step: Step) -> Tensor:
    """The tensor of a constant.

    Raises:
        DeferredError: it was written to.
    """
    if one.tensor._version != one.version:
        raise DeferredError(
            f"a real tensor of shape {tuple(one.tensor.shape)} was read by {step.name} while a "
            "model was built under deferred(), and has been written to since: what it held is "
            "lost. Write to a copy of it, or leave it alone until the model is materialised."
        )
    return one.tensor


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let torch's default dtype be another one."""
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
