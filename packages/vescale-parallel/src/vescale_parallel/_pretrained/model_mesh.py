"""The ranks that load or save a model together."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_dtensor import DTensor

from vescale_parallel._step.forward_backward import step_of


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh that a model is parallelised over; None where it is not.

    Meshes side by side hold a model each, which are loaded and saved at different times.
    """
    meshes = [one.device_mesh for one in model.parameters() if isinstance(one, DTensor)]
    # Whose steps are invariant has its parameters on a mesh without the axes of the batch.
    whole = getattr(step_of(model), "mesh", None)
    if meshes and isinstance(whole, DeviceMesh):
        return whole
    return meshes[0] if meshes else None
