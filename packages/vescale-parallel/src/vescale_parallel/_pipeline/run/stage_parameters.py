"""The parameters of a rank's stages while they run: on the mesh of a stage, as activations are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_dtensor.storage import local_leaves

from vescale_parallel._zero.parameter_writes import written_past_versions
from vescale_parallel._zero.unit import Unit, UnitParameter, cast, put_all


class HeldParameters:
    """Lets modules compute with parameters of the mesh of a stage; memory is that of the stored.

    A unit of parameters that nobody gathers: contributions to their gradients reach what is stored,
    on the mesh of all stages, and are summed at the end of a step, once.

    On one rank they are plain tensors, as the activations are: nothing is dispatched there.

    Args:
        parameters: those that are on this rank.
        mesh: of the stage.
    """

    def __init__(self, parameters: Sequence[UnitParameter], mesh: DeviceMesh) -> None:
        self._unit = (_PlainUnit if is_plain(mesh) else Unit)("", [], list(parameters), mesh)
        self._places = [one.places for one in self._unit.held]
        # The same ones for all microbatches of a step: making them costs more than swapping.
        self._fulls: dict[bool, list[Tensor]] = {}
        self._depth = 0

    def __enter__(self) -> HeldParameters:
        """Swap in, where that has not been done: a step does so around all of its forwards."""
        if not self._depth:
            self._swap_in()
        # Behind what may raise.
        self._depth += 1
        return self

    def _swap_in(self) -> None:
        recorded = torch.is_grad_enabled()
        # With a graph and without: what was cast under no_grad has no history for a backward to go
        # back on.
        if recorded not in self._fulls:
            self._unit.require_stored()
            self._fulls[recorded] = self._unit.made()
        put_all(self._places, self._fulls[recorded])

    def __exit__(self, *exception: object) -> None:
        """Swap out: between steps modules hold what is stored."""
        self._depth -= 1
        if not self._depth:
            put_all(self._places, [one.stored for one in self._unit.held])

    @property
    def units(self) -> list[Unit]:
        """What modules hold in place of stored parameters, if that changes from step to step."""
        casts = any(one.compute is not None for one in self._unit.held)
        return [self._unit] if casts or not isinstance(self._unit, _PlainUnit) else []

    def written(self) -> set[str]:
        """Names of parameters that were written to where no version of what is stored tells."""
        every = (written_past_versions(self._unit, fulls) for fulls in self._fulls.values())
        return set().union(*every)

    def forget(self) -> None:
        """A step has ended: the next one has graphs of its own."""
        for fulls in self._fulls.values():
            self._unit.dropped(fulls)
        self._fulls.clear()


def forget_held(held: object) -> None:
    """Release what one step has used; units of `zero` do so by themselves."""
    if isinstance(held, HeldParameters):
        held.forget()


class _PlainUnit(Unit):
    """A unit whose modules hold the stored leaves themselves, as plain tensors.

    So torch accumulates each gradient as it comes, in place, and a backward in two halves finds
    each parameter at a node of its own. A node around all of them would hold a second set of
    gradients until the last one has come.
    """

    def made(self) -> list[Tensor]:
        """The leaves; cast where the plan asks for another dtype."""
        leaves = local_leaves([one.stored for one in self.held])
        if torch.is_grad_enabled():
            self._gathering.note_plain_uses()
        fulls = [cast(leaf, one.compute) for one, leaf in zip(self.held, leaves, strict=True)]
        for full in fulls:
            # torch's mark: `isinstance(weight, nn.Parameter)` in a forward is true of it, as on one
            # device.
            full._is_param = True
        return fulls

    def dropped(self, fulls: Sequence[Tensor]) -> None:
        """Leaves are local tensors of parameters again, and no parameters themselves."""
        super().dropped(fulls)
        for full in fulls:
            vars(full).pop("_is_param", None)


def is_plain(mesh: DeviceMesh) -> bool:
    """Whether a stage lies on one rank, so that what it computes with are plain tensors."""
    return mesh.size() == 1
