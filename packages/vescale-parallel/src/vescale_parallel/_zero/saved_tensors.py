"""Saves for autograd, of gathered parameters, a note where to find the values again.

A saved tensor would keep all of a gathered buffer alive from forward to backward. So while a unit
runs, views of gathered buffers are saved as offsets, and backward gathers when it asks for one that
is gone. Nothing else decides whether a use is right: a use of a weight that no hook foresaw costs
a late gather, and no wrong memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._common.torch_compat import saved_tensors_hooks_now
from vescale_parallel._zero.addresses import Addresses
from vescale_parallel._zero.end_of_backward import EndOfBackward
from vescale_parallel._zero.flat_buffer import FlatBuffer
from vescale_parallel._zero.parameter_writes import take_slot

_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: {what} is at version {now}; expected version {then} instead. It was written to "
    "between forward and backward; on one device torch raises alike."
)


class _GatheredView(tuple[FlatBuffer, int, int, tuple[int, ...], tuple[int, ...], int]):
    """A view of a gathered buffer: the values are those of its owner at that version.

    That buffer, the slot in it, the version (of writes and of moves); size, strides and offset of
    the view. A tuple: each saved weight makes one, and a class of ours would make that a call.
    """

    __slots__ = ()


# Not frozen: that would make each field a call.
@dataclass(slots=True)
class _Outer:
    """What the hooks around ours made of a tensor, and how they undo it."""

    packed: Any
    unpack: Callable[[Any], Any]


class SavedTensors:
    """A pair of hooks on saved tensors, composed with the pair that was there before.

    torch applies the innermost pair only. Without passing on what is not ours, a checkpoint or an
    offload around a unit would see none of its tensors, and save no memory.

    Args:
        owners: where gathered buffers are.
        backward: tells whether the backward that runs is watched, so that its end is noticed.
        find: gathers a buffer, if it is not, and watches the backward, if it is not; returns the
            gathered values.
    """

    def __init__(
        self,
        owners: Addresses,
        backward: EndOfBackward,
        find: Callable[[FlatBuffer], Tensor],
    ) -> None:
        self._owners, self._backward, self._find = owners, backward, find
        self._outer = saved_tensors_hooks_now()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @property
    def outer(self) -> tuple[Any, Any] | None:
        """The pair that was there before."""
        return self._outer

    @property
    def is_needed(self) -> bool:
        """Whether what is saved now does not come to hooks of this schedule anyway."""
        # A unit within another: nothing is gained by packing twice what is not ours.
        now = getattr(self._outer[0], "__self__", None) if self._outer is not None else None
        return not (isinstance(now, SavedTensors) and now._owners is self._owners)

    def push(self) -> None:
        """Be the innermost pair from now on."""
        self._hooks.__enter__()

    def pop(self) -> None:
        """Be it no longer."""
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Any:
        # This and `_unpack` run for each tensor that autograd saves: no call that is not needed.
        kind = type(tensor)
        # By type: a DTensor (an argument that a checkpoint keeps) has no memory of its own.
        plain = (kind is Tensor or kind is nn.Parameter) and tensor.layout is torch.strided
        if plain:
            owners = self._owners
            # An empty view has no address; its storage has, which it would keep.
            address = tensor.data_ptr() or tensor.untyped_storage().data_ptr()
            at = bisect_right(owners.starts, address) - 1
            if at >= 0 and address < owners.ends[at]:
                buffer = owners.buffers[at]
                full = buffer.full
                # An address is used again when its memory is free: only that of the present values
                # tells. A view as another dtype, or a lazy conjugate, would be found again as
                # something else.
                if (
                    full is not None
                    and full.data_ptr() == owners.starts[at]
                    and tensor.dtype is full.dtype
                    and not (tensor.is_conj() or tensor.is_neg())
                ):
                    offset: int = tensor.storage_offset()  # type: ignore[assignment]
                    slot = bisect_right(buffer.starts, offset) - 1
                    slot = slot if slot > 0 else 0
                    handed = buffer.handed
                    if handed and handed[slot]._version != buffer.counted[slot]:
                        # Written to before this use, for which it is the version that counts.
                        take_slot(buffer, slot)
                    version = buffer.leaves[slot]._version + buffer.moves[slot]
                    return _GatheredView(
                        (buffer, slot, version, tensor.shape, tensor.stride(), offset)
                    )
        if self._outer is not None:
            pack, unpack = self._outer
            return _Outer(pack(tensor), unpack)
        if not plain:
            return tensor
        # Detached: an output that its own node saved would hold the node, and be never freed. With
        # its version: torch checks none of what passes through hooks.
        try:
            kept = tensor.detach() if tensor.requires_grad else tensor
            return kept, tensor._version
        except RuntimeError:  # tensors of inference mode count no versions
            return tensor

    def _unpack(self, packed: Any) -> Any:
        kind = type(packed)
        if kind is tuple:
            tensor, version = packed
            if tensor._version != version:
                _require_version(tensor._version, version, "a saved tensor")
            return tensor
        if kind is _GatheredView:
            buffer, slot, version, size, stride, offset = packed
            # Before anything is gathered: all ranks wrote to it, or none did.
            handed = buffer.handed
            if handed and handed[slot]._version != buffer.counted[slot]:
                take_slot(buffer, slot)  # since that use, within this very forward or backward
            if buffer.leaves[slot]._version + buffer.moves[slot] != version:
                _require_slot(buffer, slot, version)
            full = buffer.full
            if full is None or self._backward.token is None:
                full = self._find(buffer)
                # The gather has found that `.data =` gave it other memory since.
                _require_slot(buffer, slot, version)
            return full.as_strided(size, stride, offset)
        if kind is _Outer:
            return packed.unpack(packed.packed)
        return packed


def is_checkpointed_now() -> bool:
    """Whether backward computes what autograd saves here again, by torch's checkpoint."""
    pair = saved_tensors_hooks_now()
    while pair is not None:
        owner = getattr(pair[0], "__self__", None)
        if not isinstance(owner, SavedTensors):
            return getattr(pair[0], "__module__", None) == "torch.utils.checkpoint"
        pair = owner.outer
    return False


def _require_slot(buffer: FlatBuffer, slot: int, version: int) -> None:
    name = buffer.row.plan.slots[slot].names[0]
    now = buffer.leaves[slot]._version + buffer.moves[slot]
    _require_version(now, version, f"parameter '{name}'")


def _require_version(now: int, then: int, what: str) -> None:
    if now != then:
        raise RuntimeError(_CHANGED.format(what=what, now=now, then=then))
