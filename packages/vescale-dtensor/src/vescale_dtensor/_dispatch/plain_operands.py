"""Plain tensors among DTensors: they count as replicated, so all ranks must hold equal values.

The usual case in which they do not is a batch that was not wrapped: each rank would train on its
own data, wrongly and in silence. So the first executions compare a digest over the ranks.

Whether a digest is compared depends on facts that are equal on every rank (function, layouts, dtype
and number of dims; never values or extents), so that no rank waits alone. The comparison is not
part of the user's program: `vescale_comm.trace` does not count it.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import Group, group_of
from vescale_comm.agreement import by_ranks, gather_numbers

from vescale_dtensor._autograd.conversion import as_replicated, refuse_transformed
from vescale_dtensor._dispatch.observers import plain_comparison_mode
from vescale_dtensor._errors import DisagreementError
from vescale_dtensor._layout.execution_events import record, silent
from vescale_dtensor._layout.first_uses import FirstUses
from vescale_dtensor._layout.mesh import describe
from vescale_dtensor._layout.notation import short_dtype
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import function_name
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.observers import observers
from vescale_dtensor._tensor.value_digest import digest, unread_operands
from vescale_dtensor._torch.bounded_cache import Subscribers
from vescale_dtensor._torch.compat import is_traced, no_torch_function

# The first executions of each kind of call are compared.
_compared = FirstUses(2, most_kinds=256)
# Compiled calls skip the comparison, so their caches subscribe here to be emptied.
on_reset = Subscribers()


def replicated_operand(operand: Tensor, mesh: DeviceMesh, call: OpCall) -> DTensor:
    """Wrap a plain operand of a call with DTensors as replicated. Collective if it is compared.

    Args:
        operand: the plain tensor.
        mesh: the mesh of the DTensors.
        call: the parsed call.

    Raises:
        DisagreementError: it was compared, and ranks hold different values. On every rank.
        UnsupportedError: it is a tensor of vmap, torch.func.grad or forward mode.
    """
    refuse_transformed(operand)
    if _is_compared(operand, mesh, call):
        compare(operand, mesh, call)
    return as_replicated(operand, mesh)


class uncompared:
    """Compare nothing in the block: for code that only some ranks run, which would deadlock."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = silent.set(True)

    def __exit__(self, *_: object) -> None:
        silent.reset(self._token)


def _is_compared(operand: Tensor, mesh: DeviceMesh, call: OpCall) -> bool:
    """Whether this execution compares the operand, and count it. The same on every rank."""
    mode = plain_comparison_mode() if observers else None
    if mode is not None:
        return bool(mode.compares_plain) and is_comparable(operand, call)
    if operand.ndim == 0:
        return False
    mesh, kind = _mesh_of(call) or mesh, _comparison_key(operand, call)
    # The usual answer, so it comes before the checks that cost more.
    if _compared.is_over(mesh, kind):
        return False
    if silent.get() or not is_comparable(operand, call):
        return False
    _compared.add(mesh, kind)
    return True


def needs_no_comparison(operand: Tensor, call: OpCall) -> bool:
    """Whether no further execution of such a call compares this plain operand.

    Then a compiled call, which compares nothing, may answer it.
    """
    if operand.ndim == 0:
        return True
    mesh = _mesh_of(call)
    return mesh is not None and _compared.is_over(mesh, _comparison_key(operand, call))


def _mesh_of(call: OpCall) -> DeviceMesh | None:
    """Return the mesh that calls of a kind are counted on: that of the first DTensor."""
    meshes = (o._spec.layout.mesh for o in call.operands if isinstance(o, DTensor))
    return next(meshes, None)


def is_comparable(operand: Tensor, call: OpCall) -> bool:
    """Whether the operand has values that can be compared here, and that matter."""
    if type(operand) not in (Tensor, torch.nn.Parameter) or operand.is_meta:
        return False  # fake tensors and other subclasses have no values to compare
    if operand.layout is not torch.strided or torch.compiler.is_compiling() or is_traced():
        return False
    name = getattr(call.func, "__name__", "")
    return not any(operand is one for one in unread_operands(name, call.args, call.kwargs))


def _comparison_key(operand: Tensor, call: OpCall) -> Hashable:
    """The kind of a call, by which executions are counted. Equal on every rank.

    So it holds no extents: those of a batch that was not wrapped may differ over ranks. Layouts are
    in it as text: counts are kept for as long as their mesh lives, and a layout holds its mesh.
    """
    place = next(i for i, other in enumerate(call.operands) if other is operand)
    kinds = [
        repr(other._spec.layout) if isinstance(other, DTensor) else (other.ndim, other.dtype)
        for other in call.operands
    ]
    return (call.func, place, *kinds)


def reset_comparisons() -> None:
    """Forget all counts: the first executions of every kind of call are compared again."""
    _compared.clear()
    on_reset.notify()


def compare(operand: Tensor, mesh: DeviceMesh, call: OpCall) -> None:
    """Compare a plain operand over the ranks of a mesh. Collective.

    Raises:
        DisagreementError: its shape or values differ. On every rank.
        CommMismatchError: other ranks execute something else. On every rank.
    """
    group = group_of(mesh, tuple(range(mesh.ndim)))
    if group.size == 1 or "fake" in group.backends.values():
        return
    # The result is read on the host, which a CUDA graph cannot record.
    if operand.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    place = next(i for i, other in enumerate(call.operands) if other is operand)
    # A call that is new to one rank alone would pair its gather with whatever the others send.
    record(mesh, f"compares operand {place} of {function_name(call.func)}")
    # Unseen by modes: capture would record the comparison as a part of the program.
    with torch.no_grad(), no_torch_function():
        rows = _gathered(operand, group)
    if all(row == rows[0] for row in rows):
        return
    said = [f"shape {list(row[:-1])}, digest {row[-1] & (1 << 64) - 1:016x}" for row in rows]
    told = by_ranks(said, group.ranks)
    raise DisagreementError(_message(operand, place, mesh, call, told))


def _gathered(operand: Tensor, group: Group) -> list[tuple[int, ...]]:
    """Shape and digest of every rank's tensor, in the order of the group. Collective."""
    # Rows are of one length: the number of dims is part of the kind, hence equal on all ranks.
    return gather_numbers([*operand.shape, int(digest(operand).item())], group)


def _message(operand: Tensor, place: int, mesh: DeviceMesh, call: OpCall, told: str) -> str:
    return (
        f"{function_name(call.func)}: operand {place} is a plain {short_dtype(operand.dtype)} "
        f"tensor among DTensors on {describe(mesh)}. It counts as replicated, but the ranks "
        f"disagree ({told}). If each rank holds its part of a batch, wrap it: "
        "DTensor.from_local(x, mesh, [Shard(0), …]). If it should be the same everywhere, "
        "distribute_tensor(x, mesh) takes that of the first rank."
    )
