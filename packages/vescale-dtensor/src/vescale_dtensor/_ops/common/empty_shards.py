"""Kernels that refuse empty tensors, run on pieces that may be empty.

Where a rank holds nothing along a dim that is cut, one slice of zeros stands in for it, and is cut
off from the results. They still hang on the operands, so that backward runs on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch.execute import Run
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._planning.op_call import substitute
from vescale_dtensor._planning.strategy import Dims
from vescale_dtensor._torch.pytree import tensors_within

Kernel = Callable[..., Any]


def on_filled(
    inputs: Sequence[Dims],
    outputs: Sequence[Dims],
    kernel: Kernel | None = None,
    slices: Mapping[tuple[int, int], int] | None = None,
    *,
    varied: bool = False,
) -> Callable[[Run, Any, Any], Any]:
    """The local call of a rule with these letters: `kernel(run, args, kwargs)` on what is filled.

    Without a kernel, the function that was called. `slices` says of which (operand, dim) more than
    one slice has to stand in. `varied` lets numbers that differ stand in for those of operand 0:
    of equal ones a norm may be infinite, and what infinity times a gradient of zero is reaches
    weights.
    """

    def local(run: Run, args: Any, kwargs: Any) -> Any:
        found = list(tensors_within((args, kwargs)))
        gone = _gone(run, inputs, [tuple(x.shape) for x in found])
        if not gone:
            return _called(kernel, run, args, kwargs)
        pairs = enumerate(zip(found, inputs, strict=True))
        filled = [_filled(x, dims, gone, number, slices or {}) for number, (x, dims) in pairs]
        feed = iter([_spread(filled[0]), *filled[1:]] if varied else filled)
        args = substitute(list(args), feed)
        kwargs = {name: substitute(value, feed) for name, value in kwargs.items()}
        result = _called(kernel, run, args, kwargs)
        if isinstance(result, Tensor):
            return _emptied(result, outputs[0], gone)
        each = zip(result, outputs, strict=True)
        return tuple(_emptied(item, dims, gone) for item, dims in each)

    return local


def where_full(inputs: Sequence[Dims]) -> Callable[[Run], Kernel | None]:
    """For `Signature.bind`: torch's own function, where this rank has something of everything."""

    def bind(run: Run) -> Kernel | None:
        shapes = [
            local_shape(run.input_layout(i), tuple(operand.shape))
            for i, operand in enumerate(run.call.operands)
        ]
        return None if _gone(run, inputs, shapes) else run.call.func

    return bind


def _called(kernel: Kernel | None, run: Run, args: Any, kwargs: Any) -> Any:
    return run.call.func(*args, **kwargs) if kernel is None else kernel(run, args, kwargs)


def _gone(
    run: Run, inputs: Sequence[Dims], shapes: Sequence[tuple[int, ...]]
) -> frozenset[Hashable]:
    """Letters of which this rank has nothing, though there is something."""
    if all(prod(shape) for shape in shapes):
        return frozenset()
    wholes = [tuple(operand.shape) for operand in run.call.operands]
    letters = {
        letter
        for dims, shape, whole in zip(inputs, shapes, wholes, strict=True)
        for letter, extent, total in zip(dims, shape, whole, strict=True)
        if extent == 0 != total
    }
    return frozenset(letters)


def _filled(
    x: Tensor,
    dims: Dims,
    gone: frozenset[Hashable],
    number: int,
    slices: Mapping[tuple[int, int], int],
) -> Tensor:
    for dim, letter in enumerate(dims):
        if letter in gone:
            count = slices.get((number, dim), 1)
            x = torch.constant_pad_nd(x, [0, 0] * (x.ndim - 1 - dim) + [0, count])
    return x


def _spread(x: Tensor) -> Tensor:
    """The same and numbers far apart, which no norm takes for equal."""
    apart = torch.arange(x.numel(), device=x.device, dtype=x.dtype) % 64
    return x + 4 * apart.view(x.shape)


def _emptied(x: Tensor, dims: Dims, gone: frozenset[Hashable]) -> Tensor:
    for dim, letter in enumerate(dims):
        if letter in gone:
            x = x.narrow(dim, 0, 0)
    return x
