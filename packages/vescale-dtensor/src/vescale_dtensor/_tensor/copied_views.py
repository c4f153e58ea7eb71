"""Views that had to be copies: on one device they would share memory with their base.

Where the layout of a view forces data to be sent, the result is a copy. Reading it is right as long
as nobody writes to either side, so writing to one is refused: the copy knows that it is one, and
the storage of its base is listed here for as long as the copy lives.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import storage_identity

# Storage → live copies, on every rank, also where it holds nothing. A copy keeps its base alive,
# so an address is not used again.
_copies: dict[int, weakref.WeakSet[DTensor]] = {}


def mark_copy(copy: DTensor, base: DTensor) -> None:
    """Remember that `copy` stands for a view of `base`."""
    source = base._local_tensor if base._view_copy_of is None else base._view_copy_of
    copy._view_copy_of = source
    address = _address(source)
    if address:
        _copies.setdefault(address, weakref.WeakSet()).add(copy)


def check_writable(target: Tensor, what: str) -> None:
    """Refuse a write that a view on the other side should see.

    Raises:
        UnsupportedError: `target` is a copied view, or has one that still lives.
    """
    if not isinstance(target, DTensor):
        return
    if target._view_copy_of is not None:
        raise UnsupportedError(
            f"{what}: in place on {target!r}, a view whose layout forced a copy: the original "
            "would not change. Write to the original, or clone() the view first."
        )
    if _copies and _live_copy(target):
        raise UnsupportedError(
            f"{what}: in place on {target!r}, of which a view lives whose layout forced a copy: "
            "the view would not change. clone() the view, or drop it before writing."
        )


def any_copies() -> bool:
    """Whether some copied view may still be alive: else every tensor may be written."""
    return bool(_copies)


def _live_copy(target: DTensor) -> bool:
    address = _address(target._local_tensor)
    known = _copies.get(address)
    if known is None:
        return False
    if len(known) == 0:
        del _copies[address]
        return False
    return True


def _address(local: Tensor) -> int:
    try:
        return storage_identity(local)
    except (NotImplementedError, RuntimeError):  # a tensor without storage, inside a transform
        return 0


def same_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two plain tensors share storage."""
    address = _address(first)
    return address != 0 and address == _address(second)
