"""In which order the results of an op lie in the memory of one device.

The order of a result is part of its layout: views, strides and random draws follow it. It comes
from torch, asked once per plan, and never from local results: a rank whose part is empty or one
row cannot tell it, and kernels choose by sizes, of which a part has others than the whole. All
ranks ask the same, so they agree without communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from vescale_dtensor._layout.layout import Order, Shape
from vescale_dtensor._layout.spec import order_of, strides_of
from vescale_dtensor._planning.op_call import OpCall, expanded_dims, memory_order
from vescale_dtensor._planning.strategy import Strategy
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import fake_tensors, no_dispatch_modes, no_torch_function


def result_orders(call: OpCall, strategy: Strategy, count: int) -> tuple[Order | None, ...]:
    """The memory order of each of `count` results."""
    if strategy.output_orders is not None:
        return strategy.output_orders
    if not (strategy.probe_order or any(map(_is_reordered, call.operands))):
        return (None,) * count
    results = _asked(call, strategy)
    orders = [order_of(tuple(r.shape), r.stride()) for r in results]
    return tuple(orders[i] if i < len(orders) else None for i in range(count))


def views_on_one_device(call: OpCall) -> Sequence[Tensor] | None:
    """Tensors without data that lie as the views that one device gives; None where it has none."""
    with _alone(), torch.no_grad():
        result = _called(call, [_exact_stand_in(operand) for operand in call.operands])
    return result


def _exact_stand_in(operand: Tensor) -> Tensor:
    meta = operand._spec.tensor_meta if isinstance(operand, DTensor) else None
    stride = operand.stride() if meta is None else meta.stride
    return torch.empty_strided(operand.shape, stride, dtype=operand.dtype, device="meta")


def _is_reordered(operand: Tensor) -> bool:
    return memory_order(operand) is not None or bool(expanded_dims(operand))


def _asked(call: OpCall, strategy: Strategy) -> Sequence[Tensor]:
    """The results of the op on stand-ins; none where torch cannot answer without data.

    Fake tensors choose the kernel that the device would run, which tensors on the meta device do
    not (convolutions). Of some ops (copysign, floor_divide) the kernels lay results out otherwise
    than torch knows without data: those that take elements one by one run for real, on as few
    elements as have an order.
    """
    real = strategy.probe_order in ("real", "zeros") or (
        strategy.elementwise and strategy.local is None
    )
    with _alone(), torch.no_grad(), _no_data(call, real):
        stand_ins = _stand_ins(call, real, strategy.probe_order != "zeros")
        return _called(call, stand_ins) or ()


def _called(call: OpCall, stand_ins: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """The tensors among the results of a call on stand-ins; None where torch refuses it."""
    args, kwargs = call.replaced(stand_ins)
    try:
        result = call.func(*args, **kwargs)
    except Exception:  # what torch's Python implementations raise where it cannot be done
        return None
    results = [result] if isinstance(result, Tensor) else list(result)
    return [r for r in results if isinstance(r, Tensor)]


@contextmanager
def _alone() -> Iterator[None]:
    """Unseen by modes: those that record or count would take planning for a part of the program."""
    with no_torch_function(), no_dispatch_modes():
        yield


@contextmanager
def _no_data(call: OpCall, real: bool) -> Iterator[None]:
    if real or any(operand.device.type == "meta" for operand in call.operands):
        yield
    else:
        with fake_tensors():
            yield


def _stand_ins(call: OpCall, small: bool, value: bool) -> list[Tensor]:
    """Tensors that lie in memory as the operands do on one device, filled where they are small."""
    made = [_stand_in(operand, small) for operand in call.operands]
    for stand_in in made if small else ():
        stand_in.fill_(value)
    return [
        stand_in.expand([2 if small and n > 1 else n for n in operand.shape])
        for stand_in, operand in zip(made, call.operands, strict=True)
    ]


def _stand_in(operand: Tensor, small: bool) -> Tensor:
    expanded = expanded_dims(operand)
    shape: Shape = tuple(
        1 if dim in expanded else min(n, 2) if small else n for dim, n in enumerate(operand.shape)
    )
    strides = strides_of(shape, memory_order(operand))
    return torch.empty_strided(shape, strides, dtype=operand.dtype, device=operand.device)
