"""Holds what the gradient state of a leaf refers to weakly, on the wrapper of the leaf."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vescale_dtensor._tensor.dtensor import DTensor


class ReducesMany(Protocol):
    """What reduces the gradients of many parameters at once."""

    def reduce(self) -> None:
        """Reduce every gradient that has not been reduced. Collective."""


class LeafHolds:
    """What the wrapper of a leaf holds, and its gradient state refers to weakly.

    Attributes:
        gradient: the DTensor last returned for `.grad`.
        reducer: reduces the gradients of many parameters at once.
        accumulation_node: the node that accumulates, if there is a hook on it. Torch holds the node
            weakly, and the hook dies with it.
        others: what layers above want to live as long.
    """

    __slots__ = ("__weakref__", "accumulation_node", "gradient", "others", "reducer")

    def __init__(self, before: LeafHolds | None) -> None:
        self.gradient: DTensor | None = None
        self.reducer: ReducesMany | None = None
        self.accumulation_node: Any = None
        # Of the wrapper, whichever local tensor it has.
        self.others: tuple[object, ...] = () if before is None else before.others


class AxesMask:
    """A mask of axes that may grow, for whoever must not hold the state of which it is a part."""

    __slots__ = ("mask",)

    def __init__(self) -> None:
        self.mask = 0
