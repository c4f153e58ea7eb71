"""Layouts of tensors that know their own: ours by protocol, torch's DTensor, plain tensors."""

import sys
from functools import lru_cache
from typing import Any

import numpy
import torch
import torch.utils.dlpack

from vescale_rng._errors import LayoutError
from vescale_rng._layout.layout import Ints, ShardLayout, as_layout, whole
from vescale_rng._layout.placements import layout_of


def layout_of_tensor(tensor: torch.Tensor) -> ShardLayout:
    """Return the layout that a tensor says it has.

    Args:
        tensor: an object with `__vescale_layout__`, torch's own `DTensor` (`Shard`, nested and
            uneven, `_StridedShard`, `Replicate`, `Partial`), or a plain tensor, which is global.

    Raises:
        LayoutError: a plain tensor with gaps or overlaps in its memory.
    """
    if hasattr(tensor, "__vescale_layout__"):
        return as_layout(tensor.__vescale_layout__())
    tensor = as_tensor(tensor)
    if (dtensor := _as_dtensor(tensor)) is not None:
        return _layout_of_dtensor(dtensor)
    layout = whole(tensor.shape, _memory_order(tensor))
    for box in layout.boxes:
        sides = zip(tensor.shape, tensor.stride(), box.local_strides, strict=True)
        if any(stride != dense for size, stride, dense in sides if size > 1):
            raise LayoutError(
                f"a plain tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} "
                "does not fill its memory: give its layout, or fill a contiguous tensor"
            )
    return layout


def _layout_of_dtensor(dtensor: Any) -> ShardLayout:
    mesh = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    order = _memory_order(dtensor)
    if coordinate is None:
        # A rank outside of the mesh holds nothing, and its generator moves as far as the others'.
        return ShardLayout(tuple(dtensor.shape), (), memory_order=order)
    # Its strides are asked of it, as the spec of a DTensor tells those of the global tensor only.
    local = dtensor.to_local()
    return _placed(
        tuple(dtensor.shape),
        tuple(dtensor.placements),
        tuple(mesh.shape),
        tuple(coordinate),
        order,
        local.stride(),
    )


@lru_cache(maxsize=1024)
def _placed(
    shape: Ints,
    placements: tuple[Any, ...],
    mesh: Ints,
    coordinate: Ints,
    order: Ints | None,
    strides: Ints,
) -> ShardLayout:
    """Return one object for equal arguments: what is cached on it serves all such tensors."""
    return layout_of(shape, placements, mesh, coordinate, memory_order=order, local_strides=strides)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rank's own tensor behind a wrapper; a plain tensor is its own."""
    if hasattr(tensor, "__vescale_layout__") or _as_dtensor(tensor) is not None:
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return local
    return as_tensor(tensor)


def as_tensor(buffer: Any) -> torch.Tensor:
    """Return a tensor on the memory of a buffer: a tensor, a numpy array, or what speaks DLPack.

    Raises:
        LayoutError: it is none of them, or its memory cannot be written.
    """
    if isinstance(buffer, torch.Tensor):
        return buffer
    kind = type(buffer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.partition(".")[0] in ("jax", "jaxlib"):
        raise LayoutError(
            f"`local`: a {name} cannot be written: fill a numpy array, and give it to "
            "jax.numpy.asarray (or to jax.make_array_from_callback, shard by shard)"
        )
    if not hasattr(buffer, "__dlpack__"):
        raise LayoutError(
            f"`local`: a tensor, a numpy array, or an object with __dlpack__: got a {name}"
        )
    # torch warns of such an array, and would write to it all the same.
    if not getattr(getattr(buffer, "flags", None), "writeable", True):
        raise LayoutError(f"`local`: this {name} is read-only")
    try:
        if isinstance(buffer, numpy.ndarray):
            return torch.from_numpy(buffer)
        return torch.utils.dlpack.from_dlpack(buffer)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise LayoutError(f"`local`: torch cannot share the memory of a {name}: {error}") from None


def _as_dtensor(tensor: torch.Tensor) -> Any:
    # If DTensor was not imported, there is none: importing it here would cost every user.
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dims from slow to fast; None when that is row-major."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    return None if tensor.is_contiguous() else order
