"""`context_parallel`: plain tensors are parts of sequences, and attention sees whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from vescale_dtensor._errors import LayoutError, MeshError, UnsupportedError
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.local_shards import local_interval
from vescale_dtensor._layout.mesh import describe
from vescale_dtensor._layout.placements import Shard
from vescale_dtensor._tensor.dtensor import DTensor

_NAMES = ("query", "key", "value", "attn_mask")
# Of query, key and value: (batch, heads, rows, features).
_ROWS = 2


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: list[Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """Train a model of plain tensors on parts of its sequences, with attention over whole ones.

    The signature is that of `torch.distributed.tensor.experimental.context_parallel`. Within the
    block each rank's buffers are its part of the sequence, consecutive tokens of any number, and
    `scaled_dot_product_attention` of plain tensors takes them as parts of one sequence: it
    exchanges rows for heads, or gathers keys and values, whichever costs less, forward and
    backward. Losses and gradients are each rank's own, as with torch's; add them up over the mesh.

    A plan does the same for models that are not written for it, losses and gradients included:
    `vescale_parallel.Plan(batch="cp:1")`.

    Args:
        mesh: of one dim.
        buffers: tensors that follow the sequence: inputs, labels, position ids or rotary tables.
            They are the global ones, the same on every rank, and no parameters.
        buffer_seq_dims: the dim of each that is the sequence.
        no_restore_buffers: those among them that stay parts behind the block; others are the global
            ones again, with what they were.

    Raises:
        MeshError: the mesh has several dims.
        LayoutError: dims are not as many as buffers, or no dims of theirs; a buffer that is to
            stay is none of the buffers.
        UnsupportedError: a buffer is a parameter or a DTensor; attention gets a mask, or tensors
            of other than four dims.
    """
    if mesh.ndim != 1:
        raise MeshError(f"context_parallel takes a mesh of one dim, not {describe(mesh)}")
    given, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept = _checked(given, dims, no_restore_buffers or set())
    lengths = {one.shape[dim] for one, dim in zip(given, dims, strict=True)}
    before = [
        (one, one.untyped_storage(), one.storage_offset(), one.size(), one.stride())
        for one in given
        if not any(one is other for other in kept)
    ]
    try:
        for one, dim in zip(given, dims, strict=True):
            _shard(one, dim, mesh)
        with _Attention(mesh, lengths):
            yield
    finally:
        with torch.no_grad():
            for one, storage, offset, size, stride in before:
                one.set_(storage, offset, size, stride)


def _checked(given: list[Tensor], dims: list[int], kept: set[Tensor]) -> list[Tensor]:
    """Return the buffers that stay parts, after checks of all of them."""
    if len(given) != len(dims):
        raise LayoutError(
            f"context_parallel: {len(given)} buffers and {len(dims)} buffer_seq_dims; give one each"
        )
    for one, dim in zip(given, dims, strict=True):
        if isinstance(one, nn.Parameter | DTensor):
            raise UnsupportedError(
                f"context_parallel: a buffer is a {type(one).__name__}; buffers are plain tensors"
            )
        if not -one.ndim <= dim < one.ndim:
            raise LayoutError(f"context_parallel: a buffer {list(one.shape)} has no dim {dim}")
    stays = list(kept)
    if not all(any(one is other for other in given) for one in stays):
        raise LayoutError("context_parallel: no_restore_buffers has a tensor that is no buffer")
    return stays


def _shard(buffer: Tensor, dim: int, mesh: DeviceMesh) -> None:
    """Make a buffer this rank's part of it, in place."""
    dim %= buffer.ndim
    layout = Layout.of(mesh, [Shard(dim)])
    low, high = local_interval(layout, tuple(buffer.shape), dim)
    with torch.no_grad():
        # Other memory: what is written to the part leaves the whole as it is.
        buffer.set_(buffer.narrow(dim, low, high - low).clone())  # type: ignore[call-overload]


class _Attention(TorchFunctionMode):
    """Attention of plain tensors, each a part of a sequence.

    Args:
        mesh: whose ranks share sequences.
        lengths: how long sequences are: of the global buffers, so equal on every rank.
    """

    def __init__(self, mesh: DeviceMesh, lengths: set[int]) -> None:
        super().__init__()
        self._mesh = mesh
        uneven = any(length % mesh.size() for length in lengths)
        # By what it has of several lengths, a rank cannot tell them apart, and another one might.
        self._asks = uneven and len(lengths) > 1
        self._known: dict[int, int] = {}
        if uneven and not self._asks:
            (length,) = lengths
            low, high = local_interval(Layout.of(mesh, [Shard(0)]), (length,), 0)
            self._known[high - low] = length

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer attention; everything else is left alone."""
        named = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **named)
        given = dict(zip(_NAMES, args, strict=False)) | named
        if any(isinstance(one, DTensor) for one in given.values()):
            return func(*args, **named)
        if given.get("attn_mask") is not None or given["query"].ndim != 4:
            raise UnsupportedError(
                "context_parallel: attention of parts takes no attn_mask, of which each part would "
                "be another one, and tensors (batch, heads, tokens, features). Use is_causal, or "
                'vescale_parallel.Plan(batch="cp:1"), which takes any mask'
            )
        parts = [self._part(given[name]) for name in _NAMES[:3]]
        rest = {name: one for name, one in named.items() if name not in _NAMES}
        found: DTensor = func(*parts, None, *args[4:], **rest)
        return found.redistribute(placements=[Shard(_ROWS)]).to_local()

    def _part(self, local: Tensor) -> DTensor:
        """A part as the distributed tensor of the whole sequence."""
        rows = local.shape[_ROWS]
        shape: list[int] | None = None
        if not self._asks:
            shape = list(local.shape)
            # Of lengths that follow none of the buffers all ranks have as many.
            shape[_ROWS] = self._known.get(rows, rows * self._mesh.size())
        found: DTensor = DTensor.from_local(local, self._mesh, [Shard(_ROWS)], shape=shape)
        return found
