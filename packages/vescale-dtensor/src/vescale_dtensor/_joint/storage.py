"""Parameters that lie elsewhere than the step finds them: what a joint graph asks about those.

A layer above may store parameters as shards and gather them before they are used (ZeRO). The step
is captured with a stand-in in the place of each; in the joint graph its values are gathered from
what is stored, and its gradient goes back there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from vescale_dtensor._tensor.dtensor import DTensor


@dataclass(frozen=True)
class StoredSlice:
    """Where in the inputs of a storage a stored parameter's local tensor is.

    Attributes:
        index: of the input.
        start, end: elements of it; None: it is the input itself.
    """

    index: int
    start: int | None = None
    end: int | None = None


class ParameterStorage(Protocol):
    """Parameters that are gathered as one; everything in their order."""

    @property
    def name(self) -> str:
        """What it is called in the graph."""

    @property
    def names(self) -> Sequence[str]:
        """Of the parameters."""

    @property
    def stand_ins(self) -> Sequence[DTensor]:
        """Leaves that the step has in the place of parameters."""

    @property
    def stored(self) -> Sequence[DTensor]:
        """The parameters, which optimizers step."""

    @property
    def slices(self) -> Sequence[StoredSlice]:
        """Where their local tensors are in the inputs."""

    def lent(self) -> AbstractContextManager[None]:
        """Inside, the modules hold the stand-ins."""

    def inputs(self) -> list[Tensor]:
        """The tensors that the graph is called with: this rank's, as they are now."""

    def gather(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The local tensors of the stand-ins. Traced: collectives become nodes."""

    def reduce(
        self, contributions: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """From this rank's contributions to what is stored of their sums over its axis. Traced.

        Contributions are partial on every axis on which the stand-in is replicated; sums over other
        axes than that of the storage are left to the caller.
        """

    def written(self) -> None:
        """The stored tensors were stepped by a graph."""
