"""Finds the memory order of an op's results: the order of their dims in one device's memory.

The order of a result is part of its layout: views, strides and random draws follow it. It is found
once per plan, by running the op on stand-ins with the operands' global shapes and orders. Local
results are no help: on a rank whose shard is empty or one row they have no order, and kernels
choose it by sizes, which differ between a shard and the global tensor. All ranks use the same
stand-ins, so they agree without communication.
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
from vescale_dtensor._torch.compat import asking_fake_tensors, no_dispatch_modes, no_torch_function


def result_orders(call: OpCall, strategy: Strategy, count: int) -> tuple[Order | None, ...]:
    """The memory order of each of `count` results; None: row-major.

    Args:
        call: the parsed call.
        strategy: what its rule returned.
        count: number of results.
    """
    if strategy.output_orders is not None:
        return strategy.output_orders
    # Most calls end here: from row-major operands torch makes row-major results, but for ops whose
    # strategy says otherwise.
    if not (strategy.probe_order or any(map(_is_reordered, call.operands))):
        return (None,) * count
    results = _asked(call, strategy)
    orders = [order_of(tuple(r.shape), r.stride()) for r in results]
    # Fewer results than outputs: torch could not answer without data. Row-major then.
    return tuple([orders[i] if i < len(orders) else None for i in range(count)])


def views_on_one_device(call: OpCall) -> Sequence[Tensor] | None:
    """The views that one device returns, as tensors without data, for their strides.

    None if torch refuses the call.
    """
    with without_modes(), torch.no_grad():
        result = _called(call, [exact_stand_in(operand) for operand in call.operands])
    return result


def views_without_data(call: OpCall, base: Tensor) -> Sequence[Tensor] | None:
    """The views that the call returns of another operand 0, one without data.

    None if torch refuses the call.
    """
    others = [exact_stand_in(operand) for operand in call.operands[1:]]
    with without_modes(), torch.no_grad():
        return _called(call, [base, *others])


def exact_stand_in(operand: Tensor) -> Tensor:
    """A tensor without data with the global shape and strides of an operand, gaps included."""
    meta = operand._spec.tensor_meta if isinstance(operand, DTensor) else None
    stride = operand.stride() if meta is None else meta.stride
    return torch.empty_strided(operand.shape, stride, dtype=operand.dtype, device="meta")


def _is_reordered(operand: Tensor) -> bool:
    """Whether the operand's memory differs from row-major, so that a result's may."""
    return memory_order(operand) is not None or bool(expanded_dims(operand))


def _asked(call: OpCall, strategy: Strategy) -> Sequence[Tensor]:
    """The results of the op on stand-ins for its operands; empty if torch cannot answer so.

    Stand-ins are fake tensors, which choose the kernel that the device would run; tensors on the
    meta device do not (convolutions). For some ops (copysign, floor_divide) the kernels give
    another order than torch predicts without data, so elementwise ops run for real, on as few
    elements as have an order.
    """
    real = strategy.probe_order in ("real", "zeros") or (
        strategy.elementwise and strategy.local is None
    )
    with without_modes(), torch.no_grad(), _no_data(call, real):
        stand_ins = _stand_ins(call, real, strategy.probe_order != "zeros")
        return _called(call, stand_ins) or ()


def _called(call: OpCall, stand_ins: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """The tensors among the results of a call on stand-ins; None if torch refuses it."""
    args, kwargs = call.replaced(stand_ins)
    try:
        result = call.func(*args, **kwargs)
    # Any exception: torch's Python implementations of ops raise all kinds where they lack data. An
    # error of the call itself is raised when it runs.
    except Exception:
        return None
    # Assignments return None.
    results = result if isinstance(result, list | tuple) else [result]
    return [r for r in results if isinstance(r, Tensor)]


@contextmanager
def without_modes() -> Iterator[None]:
    """Hide calls from modes: one that records or counts must not see planning as the program."""
    with no_torch_function(), no_dispatch_modes():
        yield


@contextmanager
def _no_data(call: OpCall, real: bool) -> Iterator[None]:
    """Make stand-ins fake, unless they are to be `real`, or the operands have no data anyway."""
    if real or any(operand.device.type == "meta" for operand in call.operands):
        yield
    else:
        with asking_fake_tensors():
            yield


def _stand_ins(call: OpCall, small: bool, value: bool) -> list[Tensor]:
    """Tensors with the operands' memory orders on one device.

    Args:
        call: the parsed call.
        small: whether every extent is at most two, and the tensors are filled.
        value: what they are filled with: ones, or zeros where numbers are indices.
    """
    made = [_stand_in(operand, small) for operand in call.operands]
    for stand_in in made if small else ():
        stand_in.fill_(value)
    # Filled before, as an expanded tensor cannot be written to.
    return [
        stand_in.expand([2 if small and n > 1 else n for n in operand.shape])
        for stand_in, operand in zip(made, call.operands, strict=True)
    ]


def _stand_in(operand: Tensor, small: bool) -> Tensor:
    """A stand-in before its expanded dims are expanded: those have one index here."""
    expanded = expanded_dims(operand)
    # Two elements are enough for a dim to have a place in memory, and one or none stay so.
    shape: Shape = tuple(
        [1 if dim in expanded else min(n, 2) if small else n for dim, n in enumerate(operand.shape)]
    )
    strides = strides_of(shape, memory_order(operand))
    return torch.empty_strided(shape, strides, dtype=operand.dtype, device=operand.device)
