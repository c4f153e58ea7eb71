"""The parameters of a rank's stages while they run: on the mesh of a stage, as activations are."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._zero.unit import Held, Unit


class HeldParameters:
    """Lets modules compute with parameters of the mesh of a stage; memory is that of the stored.

    A unit of parameters that nobody gathers: contributions to their gradients reach what is stored,
    on the mesh of all stages, and are summed at the end of a step, once.

    Args:
        parameters: those that are on this rank.
        mesh: of the stage.
    """

    def __init__(self, parameters: Sequence[Held], mesh: DeviceMesh) -> None:
        self._unit = Unit("", [], list(parameters), mesh)

    def __enter__(self) -> HeldParameters:
        """Swap in."""
        self._unit.require_stored()
        self._unit.swap_in()
        return self

    def __exit__(self, *exception: object) -> None:
        """Swap out: between steps modules hold what is stored."""
        self._unit.swap_out()
