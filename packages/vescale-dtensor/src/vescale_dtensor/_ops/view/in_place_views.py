"""`x.t_()`, `x.squeeze_()` and their kin: the wrapper becomes its own view, of the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd import set_data as _become
from vescale_dtensor._dispatch.execute import refuse_view_of_leaf
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._tensor.copied_views import way_back_through
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.rare_state import rare_state

_VIEWS = "t transpose swapaxes swapdims squeeze unsqueeze"
# Nodes that return several views of one tensor, and those that return one view of theirs.
_SEVERAL = ("UnbindBackward", "SplitBackward", "SplitWithSizesBackward")
_NAMES = """
Alias AsStrided Diagonal Expand Movedim Permute Real Imag Select Slice Squeeze T Transpose Unflatten
Unfold Unsqueeze View
"""
_ONE = tuple(f"{name}Backward" for name in _NAMES.split())


def _in_place_view(name: str) -> Callable[..., Any]:
    view = getattr(torch.Tensor, name)

    def run(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        recorded = torch.is_grad_enabled() and self.requires_grad
        if recorded and self.is_leaf:
            raise RuntimeError(
                f"a leaf that requires grad is being used in an in-place operation: {name}_"
            )
        refuse_view_of_leaf(self)
        if recorded and _is_one_of_several(self._local_tensor):
            raise RuntimeError(
                f"{name}_ of one of several views that one function returned ({self!r}), which "
                f"autograd does not let change in place; use {name}, which returns a new tensor"
            )
        if self._rare.retain_grad_hook is not None:
            raise UnsupportedError(
                f"Tensor.{name}_ of {self!r}, which retains its gradient in the shape that it had; "
                f"use {name}, which returns a new tensor"
            )
        found: DTensor = view(self, *args, **kwargs)
        if found is self:
            return found
        way = way_back_through(self, found)
        _become.become_view_in_place(self, found)
        rare_state(self).way_back = way
        return self

    return run


def _is_one_of_several(local: Tensor) -> bool:
    """Whether a tensor is one of several views (`chunk`, `unbind`), or a view of one."""
    node: Any = local.grad_fn if local._is_view() else None
    while node is not None and node.name().startswith(_ONE):
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith(_SEVERAL)


HANDLERS: dict[Any, Callable[..., Any]] = {
    getattr(torch.Tensor, f"{name}_"): _in_place_view(name) for name in _VIEWS.split()
}
"""Functions this module answers for."""
