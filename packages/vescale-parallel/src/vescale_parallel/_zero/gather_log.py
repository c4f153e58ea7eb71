"""Records gathers and reductions in the execution log of a model's ranks."""

from __future__ import annotations

import zlib

from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import execution_log


class GatherLog:
    """The order in which a model's buffers are gathered and reduced, as events of all ranks.

    Buffers of alike units are equally long: ranks that gather different ones would compute with
    each other's weights, and no collective could tell. Each event holds all that came before it
    since the model's forward began, so another order is something new from its first difference
    on, and what is new is compared before anything is sent. A steady program sends nothing.

    Args:
        mesh: of the activations: its ranks all come to each event.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        # A log of its own: a model of many units would use up the checks of what else is new.
        self._log = execution_log(mesh.mesh.flatten().tolist(), "gathers")
        self._before = 0

    def begin(self) -> None:
        """A forward of the model begins."""
        self._before = 0

    def record(self, what: str) -> None:
        """Add an event.

        Raises:
            CommMismatchError: the ranks have come to different ones, here or before.
        """
        # A checksum, unlike `hash`, is the same in every process.
        self._before = zlib.crc32(what.encode(), self._before)
        # None where there is one rank.
        if self._log is not None:
            self._log.record(what, self._before, together=True)
