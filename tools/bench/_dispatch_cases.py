"""Lists the calls that `dispatch` times, alike for every kind of tensor that `make` makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import tensor as stock

EXTENT = 8
PARAMETERS = 200

Call = Callable[[], object]
Make = Callable[..., Tensor]
"""`make(dim, ...)`: a tensor sharded on `dim` (None: replicated), one argument per mesh axis."""
Case = tuple[Callable[[Make], Call], float | None, float | None]
"""What makes the call, and the ratios aimed for: to plain torch, and to torch's DTensor."""


def _binary(func: Callable[..., Tensor], *dims: int | None) -> Callable[[Make], Call]:
    def case(make: Make) -> Call:
        x, y = make(*dims), make(*dims)
        return lambda: func(x, y)

    return case


def _unary(func: Callable[[Tensor], object], *dims: int | None) -> Callable[[Make], Call]:
    def case(make: Make) -> Call:
        x = make(*dims)
        return lambda: func(x)

    return case


def _with_weight(func: Callable[..., Tensor]) -> Callable[[Make], Call]:
    def case(make: Make) -> Call:
        x, weight = make(0), make(None)
        return lambda: func(x, weight)

    return case


def _backward(make: Make) -> Call:
    x, weight = make(0), make(None).requires_grad_()

    def step() -> None:
        weight.grad = None
        torch.mm(x, weight).sum().backward()  # type: ignore[no-untyped-call]

    return step


def _adamw(**form: Any) -> Callable[[Make], Call]:
    def case(make: Make) -> Call:
        return torch.optim.AdamW(_parameters(make), **form).step

    return case


def _clip(make: Make) -> Call:
    parameters = _parameters(make)
    return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)


def _parameters(make: Make) -> Sequence[nn.Parameter]:
    parameters = [nn.Parameter(make(0)) for _ in range(PARAMETERS)]
    for parameter in parameters:
        parameter.grad = make(0)
    return parameters


def _gradient(make: Make) -> Call:
    (parameter,) = _parameters(make)[:1]
    return lambda: parameter.grad


def _dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, training=True)


CASES: dict[str, Case] = {
    "add": (_binary(torch.add, 0), 3.2, 0.55),
    "add, 2-D mesh": (_binary(torch.add, 0, 1), 3.2, 0.55),
    "add, 3-D mesh": (_binary(torch.add, 0, None, 1), 3.2, 0.55),
    "mul": (_binary(torch.mul, 0), 3.2, 0.55),
    "relu": (_unary(torch.relu, 0), 3.2, 0.55),
    "x * 2.0": (_unary(lambda x: x * 2.0, 0), 2.0, 0.3),
    "x + 1": (_unary(lambda x: x + 1, 0), 2.0, 0.3),
    "mm": (_with_weight(torch.mm), 3.1, 0.5),
    "F.linear": (_with_weight(F.linear), 3.1, 0.5),
    "F.layer_norm": (_unary(lambda x: F.layer_norm(x, (EXTENT,)), 0), 3.1, 0.5),
    "softmax": (_unary(lambda x: torch.softmax(x, -1), 0), 3.1, 0.5),
    "view": (_unary(lambda x: x.view(-1, 2, EXTENT // 2), 0), 5, 0.4),
    "transpose": (_unary(lambda x: x.transpose(0, 1), 0), 5, 0.4),
    # The cut is along the other dim: nothing needs to move.
    "x[0:4]": (_unary(lambda x: x[0:4], 1), 5, 0.4),
    "mm + sum + backward": (_backward, 1.4, 0.3),
    "F.dropout": (_unary(_dropout, 0), 2.5, 1.0),
    "AdamW.step, 200, foreach": (_adamw(foreach=True), 1.5, 0.6),
    "AdamW.step, 200, fused": (_adamw(fused=True), 1.7, 0.6),
    "AdamW.step, 200, for-loop": (_adamw(foreach=False), 2.5, 0.5),
    "clip_grad_norm_, 200": (_clip, 2.0, 0.5),
    "x.shape": (_unary(lambda x: x.shape, 0), None, 0.2),
    "x.dtype": (_unary(lambda x: x.dtype, 0), None, 0.2),
    "parameter.grad": (_gradient, None, 0.2),
}


def _from_local(make: Make) -> Call:
    kind, x = type(make(0)), make(0)
    local = torch.ones(EXTENT, EXTENT)
    mesh, placements = x.device_mesh, x.placements  # type: ignore[attr-defined]
    return lambda: kind.from_local(local, mesh, placements)  # type: ignore[attr-defined]


def _to(placement: object) -> Callable[[Tensor], object]:
    return lambda x: x.redistribute(placements=[placement])  # type: ignore[attr-defined]


DISTRIBUTED: dict[str, Case] = {
    "from_local": (_from_local, None, 0.2),
    "to_local": (_unary(lambda x: x.to_local(), 0), None, 0.2),  # type: ignore[attr-defined]
    "redistribute, no-op": (_unary(_to(stock.Shard(0)), 0), None, 0.3),
    "redistribute S -> R": (_unary(_to(stock.Replicate()), 0), None, 0.3),
}
"""Cases that plain tensors do not have."""
