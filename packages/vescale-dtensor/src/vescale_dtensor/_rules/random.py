"""Random ops: the numbers that one device would have drawn, through vescale_rng."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import vescale_rng
from torch import Tensor

from vescale_dtensor._call import Call, Reads
from vescale_dtensor._convert import used
from vescale_dtensor._dispatch import plan_for
from vescale_dtensor._drawing import random_layout
from vescale_dtensor._execute import Run, execute
from vescale_dtensor._fallback import run_replicated
from vescale_dtensor._plan import Rule
from vescale_dtensor._strategy import Signature, Strategy
from vescale_dtensor._tensor import DTensor, wrap
from vescale_dtensor._watch import watchers


def _held(run: Run, local: Tensor) -> vescale_rng.Layout:
    return random_layout(run.input_layout(0), tuple(run.call.operands[0].shape), local)


def _dropped(run: Run, args: Any, kwargs: Any) -> Tensor:
    local: Tensor = args[0]
    return vescale_rng.dropout(local, run.call.argument(1, "p", 0.5), _held(run, local))


def _dropout_strategy(call: Call) -> Strategy | None:
    dims = tuple(range(call.operands[0].ndim))
    return Signature((dims,), (dims,), elementwise=True, local=_dropped).strategy()


_DROPOUT = Rule("dropout", _dropout_strategy, Reads.NOTHING)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout` with the mask of one device."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0 or input.numel() == 0 or not isinstance(input, DTensor):
        return input
    if not (inplace or watchers or input._spec.layout.partial or input._suspect):
        return _dropped_as_it_lies(input, p)
    call = Call(F.dropout, (input, p, True, False), {}, Reads.NOTHING)
    plan = plan_for(call, _DROPOUT)
    result: Tensor = run_replicated(call) if plan is None else execute(plan, call)
    return input.copy_(result) if inplace else result


def _dropped_as_it_lies(input: DTensor, p: float) -> DTensor:
    """The short road: nothing moves, as every element is dropped or kept where it is."""
    spec = input._spec
    local = used(input, 0) if torch.is_grad_enabled() else input._local_tensor
    held = random_layout(spec.layout, tuple(spec.shape), local)
    return wrap(vescale_rng.dropout(local, p, held), spec)


def _torch_dropout(input: Tensor, p: float, train: bool) -> Tensor:
    return dropout(input, p, train)


def _torch_dropout_(input: Tensor, p: float, train: bool) -> Tensor:
    return dropout(input, p, train, inplace=True)


def _filler(distribution: Any) -> Any:
    """An in-place op that fills with draws of `distribution(*args, **kwargs)`."""

    def local(run: Run, args: Any, kwargs: Any) -> Tensor:
        own = dict(kwargs)
        generator = own.pop("generator", None)
        if args[0].requires_grad:
            args[0].zero_()  # what was there before gets no gradient; a leaf is refused
        with torch.no_grad():
            filled: Tensor = vescale_rng.fill_(
                args[0], distribution(*args[1:], **own), _held(run, args[0]), generator=generator
            )
        return filled

    def strategy(call: Call) -> Strategy | None:
        if len(call.operands) != 1:
            return None  # a tensor of probabilities, say
        dims = tuple(range(call.operands[0].ndim))
        return Signature((dims,), (dims,), elementwise=True, local=local).strategy()

    return Rule("random in place", strategy, Reads.NOTHING, writes=0)


def _uniform(from_: float = 0.0, to: float = 1.0, **named: float) -> Any:
    return vescale_rng.Uniform(named.get("from", from_), to)


def _normal(mean: float = 0.0, std: float = 1.0) -> Any:
    return vescale_rng.Normal(mean, std)


def _bernoulli(p: float = 0.5) -> Any:
    return vescale_rng.Bernoulli(p)


RULES = {
    torch.Tensor.uniform_: _filler(_uniform),
    torch.Tensor.normal_: _filler(_normal),
    torch.Tensor.bernoulli_: _filler(_bernoulli),
}

HANDLERS = {
    F.dropout: dropout,
    torch.dropout: _torch_dropout,
    torch.dropout_: _torch_dropout_,
}
