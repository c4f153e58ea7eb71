"""`grad_fn`: what a DTensor shows of its autograd node.

The node belongs to the local tensor, and the gradients that pass through it are this rank's. Users
therefore see a stand-in: it has the node's name and its predecessors, and refuses hooks, which
belong on tensors and modules, where they receive DTensors.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch.autograd.graph import Node

from vescale_dtensor._errors import UnsupportedError


class LocalNode(Node):
    """Stands for a node of the local graph."""

    # `torch.autograd.graph.Node` is the class that torch's own helpers test for (`isinstance`), and
    # what they call is what is answered or refused below.
    def __init__(self, node: Any) -> None:
        self._node = node

    def name(self) -> str:
        """The node's name, as on one device."""
        name: str = self._node.name()
        return name

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """Stand-ins for the nodes that its gradients go to."""
        return tuple(
            (None if node is None else LocalNode(node), at)
            for node, at in self._node.next_functions
        )

    def metadata(self) -> dict[str, Any]:
        """Whatever was filed with the node."""
        filed: dict[str, Any] = self._node.metadata
        return filed

    @property
    def _input_metadata(self) -> NoReturn:
        self._refuse("_input_metadata")

    # A number that torch gives nodes in the order of their making: nothing of this rank's data.
    def _sequence_nr(self) -> int:
        number: int = self._node._sequence_nr()
        return number

    def register_hook(self, fn: Any) -> Any:
        """Refused: it would see gradients of this rank's piece."""
        self._refuse("register_hook")

    def register_prehook(self, fn: Any) -> Any:
        """Refused: it would see gradients of this rank's piece."""
        self._refuse("register_prehook")

    def _register_hook_dict(self, tensor: Any) -> NoReturn:
        self._refuse("_register_hook_dict")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f"grad_fn.{what} of a DTensor: its autograd node works on this rank's piece. Register "
            "hooks on the tensor or on the module: they are called with DTensors."
        )

    # Stand-ins are made anew at each question; two of one node are the same to who compares them.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalNode) and self._node is other._node

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return f"<{self.name()} of a DTensor>"
