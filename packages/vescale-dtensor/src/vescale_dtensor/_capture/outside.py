"""The tensors from outside that the code of a captured function can get at.

A tensor that a recording uses was made by one of its steps or is one of these. Any other was made
where the recorder could not see it, and a replay would silently use its old values: refused.
"""

from __future__ import annotations

from torch import Tensor

from vescale_dtensor._tensor.dtensor import DTensor


class OutsideTensors:
    """The tensors that a recording met from outside; they stay alive as long as it runs."""

    def __init__(self) -> None:
        # By id, with the tensor held: DTensors compare by element, and a freed id could come again.
        self._known: dict[int, Tensor] = {}
        self._wrappers: dict[int, DTensor] = {}

    def add(self, tensor: Tensor) -> None:
        """Take in a tensor, and the local tensor that it wraps."""
        self._known[id(tensor)] = tensor
        if isinstance(tensor, DTensor):
            local = tensor._local_tensor
            self._known[id(local)] = local
            # The first one met, until a call shows which one the function uses.
            self._wrappers.setdefault(id(local), tensor)

    def holders(self) -> list[Tensor]:
        """All tensors as code has them: DTensors, not their local tensors."""
        locals_ = {id(t._local_tensor) for t in self._known.values() if isinstance(t, DTensor)}
        return [t for t in self._known.values() if id(t) not in locals_]

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def prefer(self, wrapper: DTensor) -> None:
        """Take this wrapper for its local tensor, where there are several."""
        if wrapper in self:
            self._wrappers[id(wrapper._local_tensor)] = wrapper

    def wrapper_of(self, local: Tensor) -> DTensor | None:
        """The DTensor that has this local tensor."""
        # The wrapper may have been given another local tensor since.
        wrapper = self._wrappers.get(id(local))
        return wrapper if wrapper is not None and wrapper._local_tensor is local else None
