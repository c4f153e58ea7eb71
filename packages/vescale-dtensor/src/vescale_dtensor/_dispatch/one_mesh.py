"""Brings operands on several spellings of one mesh to one of them, before a call is planned.

Where layouts mean the same on both, nothing is sent: the tensor is given another layout, with the
gradient of a redistribution without steps. So the mesh is chosen on which most can stay as they
are. Which one follows from layouts and shapes, so all ranks choose alike.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._layout.spellings import nearest, respelled
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import Rule
from vescale_dtensor._tensor.dtensor import DTensor


def on_one_mesh(call: OpCall, rule: Rule) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, with all operands on one spelling of their mesh.

    Collective, if an operand has no words on that spelling for what it is.

    Args:
        call: with operands on several.
        rule: of the function.
    """
    mesh = _mesh_for(call, rule)
    return call.replaced([brought_to(operand, mesh) for operand in call.operands])


def _mesh_for(call: OpCall, rule: Rule) -> DeviceMesh:
    """The spelling on which the fewest bytes have other words; the first one of several such."""
    # What is written, or viewed, stays where it is.
    kept = rule.writes if rule.writes is not None else 0 if rule.views else None
    written = None if kept is None else call.operands[kept]
    if isinstance(written, DTensor):
        mesh: DeviceMesh = written._spec.layout.mesh
        return mesh
    tensors = [operand for operand in call.operands if isinstance(operand, DTensor)]
    meshes: list[DeviceMesh] = [tensor._spec.layout.mesh for tensor in tensors]
    return min(meshes, key=lambda mesh: _bytes_sent(tensors, mesh))


def _bytes_sent(tensors: list[DTensor], mesh: DeviceMesh) -> int:
    """Bytes of the tensors that `mesh` has no words for."""
    return sum(
        tensor.numel() * tensor._spec.tensor_meta.dtype.itemsize
        for tensor in tensors
        if respelled(tensor._spec.layout, mesh) is None
    )


def brought_to(operand: Any, mesh: DeviceMesh) -> Any:
    """An operand on this spelling of its mesh. Collective, if that has no words for its layout."""
    if not isinstance(operand, DTensor) or operand._spec.layout.mesh == mesh:
        return operand
    layout = operand._spec.layout
    return redistributed(operand, respelled(layout, mesh) or nearest(layout, mesh))
