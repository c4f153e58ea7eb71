"""Runs kernels that refuse empty tensors on shards that may be empty.

A rank whose shard of a dim is empty computes on one slice of zeros, which is removed from the
results. They still depend on the operands, so that backward runs on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch.execute import LocalContext
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._ops.common.sharded_dim import pad_dim
from vescale_dtensor._planning import Dims, Signature
from vescale_dtensor._planning.op_call import substitute
from vescale_dtensor._torch.pytree import tensors_within

Kernel = Callable[..., Any]


def pad_empty_shards(
    inputs: Sequence[Dims],
    outputs: Sequence[Dims],
    kernel: Kernel | None = None,
    slices: Mapping[tuple[int, int], int] | None = None,
    *,
    varied: bool = False,
) -> Callable[[LocalContext, Any, Any], Any]:
    """The local call of a rule with such letters: `kernel(context, args, kwargs)` on padded locals.

    Without a kernel, the function that was called. `slices` says of which (operand, dim) more than
    one slice has to stand in. `varied` lets numbers that differ stand in for those of operand 0:
    of equal ones a norm may be infinite, and what infinity times a gradient of zero is reaches
    weights.
    """

    def local(context: LocalContext, args: Any, kwargs: Any) -> Any:
        found = list(tensors_within((args, kwargs)))
        empty = _empty_letters(context, inputs, [tuple(x.shape) for x in found])
        if not empty:
            return _call_kernel(kernel, context, args, kwargs)
        pairs = enumerate(zip(found, inputs, strict=True))
        filled = [_pad(x, dims, empty, number, slices or {}) for number, (x, dims) in pairs]
        feed = iter([_distinct_values(filled[0]), *filled[1:]] if varied else filled)
        args = substitute(list(args), feed)
        kwargs = {name: substitute(value, feed) for name, value in kwargs.items()}
        result = _call_kernel(kernel, context, args, kwargs)
        if isinstance(result, Tensor):
            return _unpad(result, outputs[0], empty)
        each = zip(result, outputs, strict=True)
        return tuple(_unpad(item, dims, empty) for item, dims in each)

    return local


def pads_empty(signature: Signature, *, varied: bool = False) -> Signature:
    """A signature whose function runs on padded shards where a rank's are empty."""
    inputs, outputs = signature.inputs, signature.outputs
    local = pad_empty_shards(inputs, outputs, varied=varied)
    return replace(signature, local=local, specialize=_unless_empty(inputs))


def _unless_empty(inputs: Sequence[Dims]) -> Callable[[LocalContext], Kernel | None]:
    """For `Signature.specialize`: torch's own function, where no local shard is empty."""

    def bind(context: LocalContext) -> Kernel | None:
        shapes = [
            local_shape(context.input_layout(i), tuple(operand.shape))
            for i, operand in enumerate(context.call.operands)
        ]
        return None if _empty_letters(context, inputs, shapes) else context.call.func

    return bind


def _call_kernel(kernel: Kernel | None, context: LocalContext, args: Any, kwargs: Any) -> Any:
    return context.call.func(*args, **kwargs) if kernel is None else kernel(context, args, kwargs)


def _empty_letters(
    context: LocalContext, inputs: Sequence[Dims], shapes: Sequence[tuple[int, ...]]
) -> frozenset[Hashable]:
    """Letters of which this rank has nothing, though there is something."""
    if all(prod(shape) for shape in shapes):
        return frozenset()
    global_shapes = [tuple(operand.shape) for operand in context.call.operands]
    letters = {
        letter
        for dims, shape, whole in zip(inputs, shapes, global_shapes, strict=True)
        for letter, extent, total in zip(dims, shape, whole, strict=True)
        if extent == 0 != total
    }
    return frozenset(letters)


def _pad(
    x: Tensor,
    dims: Dims,
    empty: frozenset[Hashable],
    number: int,
    slices: Mapping[tuple[int, int], int],
) -> Tensor:
    for dim, letter in enumerate(dims):
        if letter in empty:
            x = pad_dim(x, dim, slices.get((number, dim), 1))
    return x


def _distinct_values(x: Tensor) -> Tensor:
    """The same and numbers far apart, which no norm takes for equal."""
    apart = torch.arange(x.numel(), device=x.device, dtype=x.dtype) % 64
    return x + 4 * apart.view(x.shape)


def _unpad(x: Tensor, dims: Dims, empty: frozenset[Hashable]) -> Tensor:
    for dim, letter in enumerate(dims):
        if letter in empty:
            x = x.narrow(dim, 0, 0)
    return x
