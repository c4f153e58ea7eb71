"""Every random op inside of `consistent`, sent to the rule of the block.

A `TorchDispatchMode` sees each op of ATen below autograd, whatever called it: `F.dropout`, an LSTM
in C++, attention. It belongs to the thread that entered it, and autograd takes it along into the
threads of a backward that is started inside: recomputed forwards are drawn alike. A
`TorchFunctionMode` sees the few functions that draw nothing where a rank has no rows.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_rng._draw.native_ops import is_random
from vescale_rng._torch_dtensor.current_rule import (
    batch_dim_inside,
    batch_dim_is,
    decide,
    deciding,
    in_force,
)
from vescale_rng._torch_dtensor.empty_rows import Cannot, draw_of_empty
from vescale_rng._torch_dtensor.local_shards import follow
from vescale_rng._torch_dtensor.parameters import MAKES_ALIKE, marked
from vescale_rng._torch_dtensor.rules import BlockRule, UnsaidRule


@contextmanager
def ruled(rule: BlockRule) -> Iterator[None]:
    """Send the random ops of this thread to `rule` inside the `with` block."""
    with in_force(rule), _FunctionMode(rule), _DispatchMode(rule):
        yield


@contextmanager
def watched_for_data(rule: UnsaidRule) -> Iterator[None]:
    """Tell `rule` when this thread runs a module whose ranks each have a part of the batch."""
    owner = threading.get_ident()

    def look(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == owner and isinstance(module, _data_parallel_kinds()):
            rule.data_seen = True

    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


def _data_parallel_kinds() -> tuple[type, ...]:
    # If FSDP was not imported, there is none: importing it here would cost every user.
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    ddp = nn.parallel.DistributedDataParallel
    return (ddp,) if fsdp is None else (ddp, fsdp)


class _DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Send random ops to a rule; all other ops pass."""

    def __init__(self, rule: BlockRule) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rule = rule
        # A worker of a DataLoader is a fork that inherits this mode, and is no rank of anything.
        self._process = os.getpid()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = self._run(func, types, args, kwargs or {})
        if self._rule.shards_met:
            follow(func, args, kwargs or {}, result)
        return result

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if not is_random(func):
            if any(issubclass(kind, DTensor) for kind in types):
                # DTensor may decompose a composition by itself, where no mode is asked.
                with in_force(self._rule):
                    return func(*args, **kwargs)
            return func(*args, **kwargs)
        if deciding() or os.getpid() != self._process:
            return func(*args, **kwargs)
        with in_force(self._rule), decide():
            return self._rule.draw(func, args, kwargs)


# Functions in Python whose inside this mode has to see: what checkpointing recomputes, and the
# dropout of attention. torch takes a mode away while it handles an overridable function.
_SEEN_INSIDE = frozenset(
    (
        torch.Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
        F.multi_head_attention_forward,
    )
)

# Where the batch is in what these draw, whatever dim it is in what they are given: heads are
# split off a batch that comes first, and recurrent layers go through time.
_BATCH_INSIDE = {
    F.multi_head_attention_forward: 0,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), 1),
}
_PLAIN = frozenset((torch.Tensor, nn.Parameter))


@cache
def _implementation_of(func: Any) -> Any:
    """Return an overridable function of torch without the lines that hand it to a mode."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    asked_nothing = dict.fromkeys(names, lambda *_: False)
    scope = {**func.__globals__, **asked_nothing}
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


class _FunctionMode(TorchFunctionMode):
    """Draw for functions that return early on an empty tensor, and mark what parameters are."""

    def __init__(self, rule: BlockRule) -> None:
        super().__init__()
        self._rule = rule
        self._process = os.getpid()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in MAKES_ALIKE:
            return marked(func(*args, **kwargs), args[0] if args else None)
        if func in _BATCH_INSIDE and batch_dim_inside() is None:
            with batch_dim_is(_BATCH_INSIDE[func]):
                return self._handled(func, types, args, kwargs)
        return self._handled(func, types, args, kwargs)

    def _handled(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if func in _SEEN_INSIDE and _PLAIN.issuperset(types):
            # Not where a subclass of tensors has its own way with them.
            with self:
                return _implementation_of(func)(*args, **kwargs)
        draw = draw_of_empty(func, args, kwargs)
        if draw is None or deciding() or os.getpid() != self._process:
            return func(*args, **kwargs)
        with in_force(self._rule), decide():
            # Nothing else is drawn of what is empty; modes of outer blocks need not look again.
            return self._drawn_of_empty(draw, func, args, kwargs)

    def _drawn_of_empty(self, draw: Any, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if self._rule.asks_nobody:
            return func(*args, **kwargs)
        if isinstance(draw, Cannot):
            self._rule.refuse_empty(draw)
            return func(*args, **kwargs)
        drawn = self._rule.draw(draw.func, draw.args, {})
        return func(*args, **kwargs) if draw.scaled is None else draw.result(drawn)
