"""Which tensors existed before a recording, and which new ones outlive it.

A tensor used in a recording was made by one of its steps or existed before. Any other was made
where the recorder could not see it, and a replay would silently use its old values: refused.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch import Tensor

from vescale_dtensor._autograd.leaf_gradient import LeafGradient
from vescale_dtensor._tensor.dtensor import DTensor


def _tensors() -> list[Tensor]:
    # By type: asking isinstance of every object would run the code of proxies.
    return [o for o in gc.get_objects() if issubclass(type(o), Tensor)]


class PreexistingTensors:
    """The tensors of this process at one moment."""

    def __init__(self) -> None:
        present = _tensors()
        self._known = {id(t): weakref.ref(t) for t in present}
        self._wrappers = {
            id(t._local_tensor): weakref.ref(t) for t in present if isinstance(t, DTensor)
        }

    def __contains__(self, tensor: Tensor) -> bool:
        found = self._known.get(id(tensor))
        return found is not None and found() is tensor

    def prefer(self, wrapper: DTensor) -> None:
        """Take this wrapper for its local tensor, where there are several."""
        if wrapper in self:
            self._wrappers[id(wrapper._local_tensor)] = weakref.ref(wrapper)

    def wrapper_of(self, local: Tensor) -> DTensor | None:
        """The DTensor that had this local tensor."""
        found = self._wrappers.get(id(local))
        wrapper = found() if found is not None else None
        return wrapper if wrapper is not None and wrapper._local_tensor is local else None


def leaked_tensor(
    preexisting: PreexistingTensors, made: Callable[[Tensor], bool], returned: Iterable[Tensor]
) -> Tensor | None:
    """A tensor that was made since, is not returned, and is held by Python code.

    Args:
        preexisting: what there was.
        made: whether a plain tensor was made by a recorded step.
        returned: what may live on.
    """
    kept: set[int] = set()
    for tensor in returned:
        kept.add(id(tensor))
        if isinstance(tensor, DTensor):
            kept.add(id(tensor._local_tensor))
    alive = [t for t in _tensors() if t not in preexisting and id(t) not in kept]
    alive = [t for t in alive if isinstance(t, DTensor) or made(t)]
    if alive:
        gc.collect()  # only now: most recordings leave nothing, also no cycles
        seen = {id(t) for t in alive}
        del alive[:]
        alive += [t for t in _tensors() if id(t) in seen and t not in preexisting]
        alive = [t for t in alive if isinstance(t, DTensor) or made(t)]
    wrapped = {id(t._local_tensor) for t in alive if isinstance(t, DTensor)}
    for tensor in alive:  # no comprehension, which would hold it too
        if id(tensor) not in wrapped and _is_referenced(tensor, alive):
            return tensor
    return None


def _is_referenced(tensor: Tensor, ours: list[Tensor]) -> bool:
    """Whether any Python object holds it, besides frames, this module and a leaf's gradient."""
    holders: list[Any] = gc.get_referrers(tensor)
    return any(
        holder is not ours and not isinstance(holder, FrameType | weakref.ref | LeafGradient)
        for holder in holders
    )
