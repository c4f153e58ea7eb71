"""Tensors one after the other in a flat buffer, and back, in ways that autograd follows."""

from collections.abc import Sequence
from math import prod
from typing import cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from vescale_comm._torch.compat import being_traced


def nbytes(x: Tensor) -> int:
    """Return bytes of the elements; torch's own `nbytes` cannot be asked of a symbolic shape."""
    return x.numel() * x.element_size()


def copy(x: Tensor) -> Tensor:
    """Return what a collective of one member returns: a new tensor, as from a larger group."""
    return x.clone(memory_format=torch.contiguous_format)


def plain(x: Tensor) -> Tensor:
    """Return a tensor whose memory is its values; what torch negates or conjugates lazily is not.

    Such are `x.conj()`, its imaginary part, and gradients of both.
    """
    lazily = is_compiling() or x.is_conj() or x.is_neg()  # a compiler cannot ask either
    return x.resolve_conj().resolve_neg() if lazily else x


def flattened(x: Tensor) -> Tensor:
    """Return the elements as one contiguous row; copies only where they are not contiguous."""
    flat = x.reshape(-1).contiguous()
    # One element is contiguous for torch whatever its stride, and yet cannot be viewed as bytes.
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def flat_concat(tensors: Sequence[Tensor]) -> Tensor:
    """Copy the elements of tensors into one flat buffer."""
    # As columns: torch.cat takes an empty 1-D tensor for nothing at all and gives it a gradient
    # without a history, so that a rank with nothing to send would miss a collective of the second
    # backward.
    return torch.cat([x.reshape(-1, 1) for x in tensors]).view(-1)


def depending_on(zeros: Tensor, arrived: Sequence[Tensor]) -> Tensor:
    """Return `zeros`, for a tracer as something that depends on what arrived.

    A compiler drops a collective of which the result is not used. A member to which the result
    means nothing has to use it all the same, or it does not come, and the others wait for ever.
    """
    if not any(map(being_traced, arrived)):
        return zeros
    nothing = sum((x.reshape(-1).view(torch.uint8) & 0).sum() for x in arrived)
    data = zeros.reshape(-1).view(torch.uint8) + cast(Tensor, nothing).to(torch.uint8)
    return data.view(zeros.dtype).view(zeros.shape)


def views(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Split a flat buffer into the tensors that it holds one after the other."""
    # One narrow each: autograd forbids in-place ops on the outputs of a split.
    result, offset = [], 0
    for shape in shapes:
        numel = prod(shape)
        result.append(flat.narrow(0, offset, numel).view(tuple(shape)))
        offset += numel
    return result
