"""State that few wrappers have, in one object that is made when the first of it is set.

Higher rooms keep it there, so it is untyped where its class imports this one. All of it is of one
wrapper: neither a copy of the wrapper nor a view of it has any. What most wrappers have, or calls
ask for, is in attributes of `DTensor` itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class RareState:
    """State that few wrappers have; what is None or False is not there.

    Attributes:
        retained_grad: the gradient of an activation that `retain_grad` was called on; until it is
            set to None.
        retain_grad_hook: the handle of the hook that stores it; from `retain_grad` on.
        way_back: of a copied view that may be written to: its base, and what puts values back (see
            `_dispatch/written_views.py`); until it becomes its own view.
        memory: what stands for its memory where a rank has no address to compare, a
            `_ops.tensor.memory_identity.Memory`; until it is given other memory.
        function_node: the node of the custom autograd.Function that made this, which is shown as
            `grad_fn` (see `_autograd/function_bridge.py`); until `detach_`.
        from_checkpoint: whether a checkpoint stored this as its input and has handed it out again
            (see `answer_below_overrides` there).
        holds_node: whether a bridge keeps this for its hidden node (see `_released` there).
    """

    retained_grad: Any = None
    retain_grad_hook: Any = None
    way_back: Any = None
    memory: Any = None
    function_node: Any = None
    from_checkpoint: bool = False
    holds_node: bool = False


NOTHING = RareState()
"""What wrappers have that have none: never written to."""


def rare_state(tensor: Any) -> RareState:
    """The state of this wrapper alone, to be written to; to be read it is the attribute `_rare`."""
    state: RareState = tensor._rare
    if state is NOTHING:
        state = tensor._rare = RareState()
    return state
