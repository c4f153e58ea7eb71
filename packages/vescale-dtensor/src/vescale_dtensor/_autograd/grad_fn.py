"""`DTensor.grad_fn`: a stand-in for the autograd node of the local tensor.

The gradients that pass through the node are this rank's. The stand-in has the node's name and its
predecessors, and refuses hooks: those belong on tensors and modules, where they get DTensors.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch.autograd.graph import Node

from vescale_dtensor._errors import UnsupportedError


class LocalNode(Node):
    """Stand-in for a node of the graph of local tensors."""

    # A subclass, since torch's own helpers test for `torch.autograd.graph.Node`. Everything that
    # they read or call is answered or refused below.
    def __init__(self, node: Any) -> None:
        self._node = node

    def name(self) -> str:
        """The node's name, as on one device."""
        name: str = self._node.name()
        return name

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """Stand-ins for the nodes to which this node sends gradients, each with the input index."""
        return tuple(
            (None if node is None else LocalNode(node), at)
            for node, at in self._node.next_functions
        )

    def metadata(self) -> dict[str, Any]:
        """The dict of user data that torch keeps with the node."""
        filed: dict[str, Any] = self._node.metadata
        return filed

    @property
    def _input_metadata(self) -> NoReturn:
        self._refuse("_input_metadata")

    # The order in which torch made its nodes. It says nothing about this rank's data.
    def _sequence_nr(self) -> int:
        number: int = self._node._sequence_nr()
        return number

    def register_hook(self, fn: Any) -> Any:
        """Refused: the hook would get gradients of this rank's local tensor.

        Raises:
            UnsupportedError: always.
        """
        self._refuse("register_hook")

    def register_prehook(self, fn: Any) -> Any:
        """Refused: the hook would get gradients of this rank's local tensor.

        Raises:
            UnsupportedError: always.
        """
        self._refuse("register_prehook")

    def _register_hook_dict(self, tensor: Any) -> NoReturn:
        self._refuse("_register_hook_dict")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f"grad_fn.{what} of a DTensor: its autograd node works on this rank's piece. Register "
            "hooks on the tensor or on the module: they are called with DTensors."
        )

    # Each read of `grad_fn` makes another stand-in, so two of one node have to compare equal: code
    # that walks graphs keeps nodes in sets.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalNode) and self._node is other._node

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return f"<{self.name()} of a DTensor>"
