"""Describes any kind of tensor by the boxes of the global tensor that a rank holds."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from vescale_ckpt._errors import StateError
from vescale_ckpt._tensors.boxes import Box, TensorBoxes
from vescale_ckpt._tensors.checkpointable import is_checkpointable
from vescale_ckpt._tensors.checkpointable import local_and_boxes as of_attributes
from vescale_ckpt._tensors.dtypes import dtype_name, require_storable


class _ForeignBox(Protocol):
    global_offset: Sequence[int]
    shape: Sequence[int]
    local_offset: int
    local_strides: Sequence[int]


class _ForeignLayout(Protocol):
    global_shape: Sequence[int]
    boxes: Sequence[_ForeignBox]


@runtime_checkable
class ShardProtocol(Protocol):
    """A shard of a global tensor: the structural protocol between packages."""

    def __vescale_layout__(self) -> _ForeignLayout:
        """Return which boxes of the global tensor the local one holds."""

    def to_local(self) -> torch.Tensor:
        """Return this rank's tensor, sharing memory with the shard."""


def is_tensor_like(value: object) -> bool:
    """Return whether `value` is a tensor leaf of a state: plain, sharded, or torch's DTensor."""
    return isinstance(value, torch.Tensor) or _is_sharded(value)


def local_and_boxes(value: object) -> tuple[torch.Tensor, TensorBoxes]:
    """Return this rank's memory of a tensor leaf and its boxes; `StateError` with a reason."""
    # Without grad, to_local() is the memory itself and no node of an autograd graph.
    with torch.no_grad():
        if _is_sharded(value):
            local, layout = _of_protocol(value)
        elif _is_torch_dtensor(value):
            from vescale_ckpt._tensors.torch_dtensor import local_and_boxes as of_dtensor

            local, layout = of_dtensor(value)
        else:
            assert isinstance(value, torch.Tensor)
            told = is_checkpointable(value)
            local, layout = of_attributes(value) if told else (value, _whole(value))
        _refuse_unreadable(local)
        local = local.detach()
    require_storable(dtype_name(local.dtype), layout.global_shape)
    _check_fits(local, layout)
    # A box without elements has nothing to save or to fill, and no part of a plan is in it.
    held = tuple(box for box in layout.boxes if math.prod(box.shape))
    return local, replace(layout, boxes=held)


def _is_sharded(value: object) -> bool:
    # Asked of the class: a proxy that answers every attribute must not pass for a tensor.
    return hasattr(type(value), "__vescale_layout__")


def _is_torch_dtensor(value: object) -> bool:
    # Importing torch's DTensor is slow. If it was not imported, there is no instance of it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _of_protocol(value: object) -> tuple[torch.Tensor, TensorBoxes]:
    if not isinstance(value, ShardProtocol):
        raise StateError(f"{type(value).__name__} has __vescale_layout__ but no to_local()")
    foreign = value.__vescale_layout__()
    boxes = tuple(
        Box(tuple(b.global_offset), tuple(b.shape), int(b.local_offset), tuple(b.local_strides))
        for b in foreign.boxes
    )
    return value.to_local(), TensorBoxes(tuple(foreign.global_shape), boxes)


def _whole(tensor: torch.Tensor) -> TensorBoxes:
    # An expanded tensor may be saved. Filling one is refused when it is matched.
    shape = tuple(tensor.shape)
    strides = tuple(tensor.stride()) if tensor.layout is torch.strided else (0,) * len(shape)
    boxes = (Box((0,) * len(shape), shape, 0, strides),) if tensor.numel() else ()
    return TensorBoxes(shape, boxes, declared=False)


def _refuse_unreadable(local: torch.Tensor) -> None:
    """Refuse tensors without plain strided memory: they have no bytes to save or to fill."""
    if local.layout is not torch.strided:
        raise StateError(f"a tensor of layout {local.layout} cannot be saved: call .to_dense()")
    if local.is_quantized:
        raise StateError("a quantized tensor cannot be saved: save its int_repr() and scales")
    if local.device.type == "meta":
        raise StateError("a tensor on the meta device has no data: materialise it first")
    # A subclass with its own dispatch keeps its data elsewhere: its own storage may be fake.
    if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise StateError(
            f"tensor subclass {type(local).__name__} is not known here: save its plain tensors, "
            "or give it __vescale_layout__() and to_local()"
        )


def _check_fits(local: torch.Tensor, layout: TensorBoxes) -> None:
    """Check that every box is inside the global shape and the local tensor's storage."""
    # A layout comes from outside, and as_strided would believe it.
    ndim = len(layout.global_shape)
    room = local.untyped_storage().nbytes() // local.element_size() - local.storage_offset()
    for box in layout.boxes:
        ranks = (len(box.global_offset), len(box.shape), len(box.local_strides))
        if ranks != (ndim, ndim, ndim):
            raise StateError(f"{box} does not have the {ndim} dims of {layout.global_shape}")
        ends = zip(box.global_offset, box.shape, layout.global_shape, strict=True)
        if any(o < 0 or n < 0 or o + n > g for o, n, g in ends):
            raise StateError(f"{box} lies outside the global shape {layout.global_shape}")
        reach = sum((n - 1) * s for n, s in zip(box.shape, box.local_strides, strict=True))
        if math.prod(box.shape) and box.local_offset + reach >= room:
            raise StateError(f"{box} reaches past the end of the local tensor ({room} elements)")
