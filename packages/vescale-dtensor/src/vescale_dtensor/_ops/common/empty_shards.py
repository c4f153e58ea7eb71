"""Runs kernels that refuse empty tensors on shards that may be empty.

A rank whose shard of a dim is empty computes on one slice of zeros, which is removed from the
results. The results still depend on the operands, so that backward runs on every rank: a collective
there would otherwise wait for a rank that has no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from vescale_comm.nested import tensors_within

from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._ops.common.sharded_dim import pad_dim
from vescale_dtensor._planning import Dims, LocalContext, Signature
from vescale_dtensor._planning.op_call import substitute

Kernel = Callable[..., Any]


def pad_empty_shards(
    inputs: Sequence[Dims],
    outputs: Sequence[Dims],
    kernel: Kernel | None = None,
    slices: Mapping[tuple[int, int], int] | None = None,
    *,
    varied: bool = False,
) -> Callable[[LocalContext, Any, Any], Any]:
    """The local call of a rule with these letters, on local tensors padded where they are empty.

    Args:
        inputs: letters of the operands.
        outputs: letters of the results.
        kernel: called as `kernel(context, args, kwargs)`; without one, torch's function is.
        slices: how many slices stand in along (operand, dim), where one is not enough.
        varied: whether operand 0 is padded with different numbers. Equal ones have no variance, so
            that a norm of them may be infinite, and infinity times a gradient of zero is a NaN in
            the gradient of the weights.
    """

    def local(context: LocalContext, args: Any, kwargs: Any) -> Any:
        # Which shards are empty depends on the rank: only local work may depend on that.
        found = tensors_within((args, kwargs))
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
        # By this rank's own shapes: neither form communicates, so ranks may differ in it.
        return None if _empty_letters(context, inputs, shapes) else context.call.func

    return bind


def _call_kernel(kernel: Kernel | None, context: LocalContext, args: Any, kwargs: Any) -> Any:
    return context.call.func(*args, **kwargs) if kernel is None else kernel(context, args, kwargs)


def _empty_letters(
    context: LocalContext, inputs: Sequence[Dims], shapes: Sequence[tuple[int, ...]]
) -> frozenset[Hashable]:
    """Letters of dims that are empty on this rank and not in the global tensor."""
    if all(prod(shape) for shape in shapes):
        return frozenset()  # the common case costs one pass over the shapes
    global_shapes = [tuple(operand.shape) for operand in context.call.operands]
    letters = {
        letter
        for dims, shape, global_shape in zip(inputs, shapes, global_shapes, strict=True)
        for letter, extent, total in zip(dims, shape, global_shape, strict=True)
        # A dim that is empty globally stays so: torch decides there, alike on all ranks.
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
    # Zeros add nothing where the dim is summed over; where a result has it, `_unpad` removes them.
    for dim, letter in enumerate(dims):
        if letter in empty:
            x = pad_dim(x, dim, slices.get((number, dim), 1))
    return x


def _distinct_values(x: Tensor) -> Tensor:
    """`x` plus numbers so far apart that no norm takes them for equal."""
    apart = torch.arange(x.numel(), device=x.device, dtype=x.dtype) % 64
    return x + 4 * apart.view(x.shape)


def _unpad(x: Tensor, dims: Dims, empty: frozenset[Hashable]) -> Tensor:
    for dim, letter in enumerate(dims):
        if letter in empty:
            # It depends on the operands, and is no view, as little as on other ranks.
            x = x.narrow(dim, 0, 0).clone()
    return x
