"""Views that had to be copies, where one device would share memory with the base.

Where the layout of a view requires communication, its result is a copy. Reading it is right as long
as neither side is written to, so writing to either is refused: the copy knows what it is a copy of,
and the storage of its base is listed here as long as the copy lives.

When a copy dies that is part of a cycle is chance, on each rank another. So garbage is collected
before one that seems to live decides anything: all ranks refuse, or none.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.spec import TensorMeta
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.rare_state import rare_state
from vescale_dtensor._torch.compat import storage_identity

Scatter = Callable[[DTensor], Any]
"""Makes a base with these values of a view in it."""

# Base storage -> live copies. The identity of a storage exists also where the shard is empty, so
# all ranks refuse alike. A copy keeps its base alive (`_view_copy_of`), so the address is not
# reused while the entry counts.
live_copies: dict[int, weakref.WeakSet[DTensor]] = {}

# Base storage -> the memory, and what to raise for a write by a DTensor to a local tensor there.
unwritable: dict[int, tuple[weakref.ref[Tensor], Callable[[Tensor], Exception]]] = {}


def refuse_writes(memory: Tensor, error: Callable[[Tensor], Exception]) -> None:
    """Refuse writes by DTensors to the memory of a plain tensor, at their line.

    For whoever hands out copies of what is stored, to which writes could not be brought back. What
    is written to a local tensor that was handed out is not seen here.

    Args:
        memory: a tensor; all of its storage is meant, until this tensor dies.
        error: given the local tensor that was to be written to, returns what is raised.
    """
    address = _address(memory)

    def forget(dead: weakref.ref[Tensor]) -> None:
        # A model that is dropped amid a forward permits nothing: others may get its memory.
        if address in unwritable and unwritable[address][0] is dead:
            del unwritable[address]

    unwritable[address] = weakref.ref(memory, forget), error


def permit_writes(memory: Tensor) -> None:
    """Undo `refuse_writes`."""
    unwritable.pop(_address(memory), None)


def mark_copy(copy: DTensor, base: DTensor) -> None:
    """Record that `copy` stands for a view of `base`."""
    # A view of a copied view is a view of the first base: that is where writes would be missed.
    source = base._local_tensor if base._view_copy_of is None else base._view_copy_of
    copy._view_copy_of = source
    address = _address(source)
    if not address:
        return
    known = live_copies.setdefault(address, weakref.WeakSet())
    # A set would ask tensors whether they are equal.
    if all(other is not copy for other in known):
        known.add(copy)


class WayBack(NamedTuple):
    """Where values that are written to a copied view go.

    Attributes:
        base: what it is a view of.
        was: what the base was then: one that has since become its own view is not put back into.
        find: returns what makes the base with other values of the view in it; None if nothing does.
    """

    base: DTensor
    was: TensorMeta
    find: Callable[[], Scatter | None]

    def scatter(self) -> Scatter | None:
        """What `find` returns, for as long as the base is what it was. All ranks answer alike."""
        now = self.base._spec.tensor_meta
        same = (now.shape, now.stride) == (self.was.shape, self.was.stride)
        return self.find() if same else None


def way_back(base: DTensor, find: Callable[[], Scatter | None]) -> WayBack:
    """The way back into a base as it is now."""
    return WayBack(base, base._spec.tensor_meta, find)


def way_back_through(copy: DTensor, view: DTensor) -> WayBack | None:
    """The way back of a copied view that becomes its own view; None if it has none."""
    way, own = copy._rare.way_back, view._rare.way_back
    back = None if own is None else own.scatter()
    if way is None or back is None:
        return None

    def find() -> Scatter | None:
        first = way.find()
        return None if first is None else lambda values: first(back(values))

    return WayBack(way.base, way.was, find)


def mark_alias(alias: DTensor, copy: DTensor) -> None:
    """Record that `alias` shares all of the memory of a copied view: its `.data`."""
    mark_copy(alias, copy)
    rare_state(alias).way_back = way_back(copy, lambda: lambda values: values)


def check_writable(target: Tensor, what: str) -> None:
    """Refuse a write that a view or its base should see but would not.

    Raises:
        UnsupportedError: `target` is a copied view, or is the base of one that is still alive.
    """
    if not isinstance(target, DTensor):
        return
    if target._view_copy_of is not None:
        address = _address(target._view_copy_of)
        others = _still(lambda: len(live_copies.get(address, ())) > 1)
        cure = ", or every other view of it that lives" if others else ""
        raise UnsupportedError(
            f"{what}: in place on {target!r}, a view whose layout forced a copy: the original "
            f"would not change. Write to the original, or clone() the view first{cure}."
        )
    check_unshared(target._local_tensor, lambda: f"{what}: in place on {target!r}")


def check_unshared(local: Tensor, what: Callable[[], str]) -> None:
    """Refuse a write to the memory of a local tensor that a copied view stands for.

    Raises:
        UnsupportedError: such a view is still alive.
        Exception: what `refuse_writes` was told for this memory.
    """
    if unwritable and (found := unwritable.get(_address(local))) is not None:
        raise found[1](local)
    if live_copies and _live_copy(local):
        raise UnsupportedError(
            f"{what()}, of which a view lives whose layout forced a copy: the view would not "
            "change. clone() the view, or drop it before writing."
        )


def is_copied_only_as(copies: Sequence[DTensor], base: DTensor) -> bool:
    """Whether no other copied view of this base's memory lives than these."""
    address = _address(base._local_tensor)

    def others() -> bool:
        known = live_copies.get(address, ())
        return any(all(other is not copy for copy in copies) for other in known)

    return not _still(others)


def any_copies() -> bool:
    """Whether some memory may not be written to; otherwise every tensor may be."""
    # A quick test for the fast path: entries of dead copies are only removed when they are found.
    return bool(live_copies or unwritable)


def _live_copy(local: Tensor) -> bool:
    """Whether a copied view of a local tensor's memory is alive."""
    address = _address(local)
    known = live_copies.get(address)
    if known is None:
        return False
    if _still(lambda: len(known) > 0):
        return True
    # All copies are gone, and the storage may be another tensor's by now.
    live_copies.pop(address, None)
    return False


def _still(found: Callable[[], bool]) -> bool:
    """Whether something is found that no collection of garbage frees."""
    if not found():
        return False
    gc.collect()
    return found()


def _address(local: Tensor) -> int:
    """Return the identity of a tensor's storage; 0 where it has none."""
    try:
        return storage_identity(local)
    except (NotImplementedError, RuntimeError):  # a tensor without storage, inside a transform
        return 0


def same_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two plain tensors share a storage."""
    address = _address(first)
    return address != 0 and address == _address(second)
