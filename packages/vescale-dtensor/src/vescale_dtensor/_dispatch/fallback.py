"""The replicate fallback, for calls without a rule that holds: correct, slow, and logged once.

Operands are redistributed to `Replicate`, every rank runs the operation on them, and its results
are wrapped as replicated. Writes of the operation are found (`writes`) and redistributed back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import MethodDescriptorType
from typing import Any

import torch
import vescale_rng
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._autograd.local_order import expanded_again, in_memory_order
from vescale_dtensor._autograd.local_use import local_for_use
from vescale_dtensor._autograd.redistribute import redistributed, replicated
from vescale_dtensor._dispatch.execute import (
    after_mutation,
    rebuild_like,
    refuse_leaf,
    refuse_view_of_leaf,
)
from vescale_dtensor._dispatch.observers import notify_fallback
from vescale_dtensor._dispatch.overlapping_writes import copy_into, refuse_overlapping
from vescale_dtensor._dispatch.plain_operands import replicated_operand
from vescale_dtensor._dispatch.view_inverses import note_ways_back
from vescale_dtensor._dispatch.writes import WriteWatch, foretold_writes
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.execution_events import generator_in, record_if_drawn, state_before
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.placements import Replicate
from vescale_dtensor._layout.spec import order_of, spec_of, with_strides
from vescale_dtensor._planning.op_call import OpCall, Reads, expanded_dims, is_strided
from vescale_dtensor._planning.plan import function_name, mesh_of
from vescale_dtensor._tensor.copied_views import (
    any_copies,
    check_writable,
    mark_copy,
    same_memory,
)
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.observers import notify_operand, observers, operand_watches
from vescale_dtensor._torch.worlds import on_world_change

logger = logging.getLogger("vescale_dtensor")

# Function names and operand layouts that were logged, and their bound: beyond it none is.
_MOST_NOTES = 1000
_noted: set[tuple[str, tuple[object, ...]]] = set()
on_world_change(_noted.clear)  # layouts hold meshes


def fallback(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call with all operands replicated, without asking for a rule. Collective."""
    return run_replicated(OpCall(func, args, kwargs, Reads.NOTHING))


def run_replicated(call: OpCall) -> Any:
    """Redistribute every operand to `Replicate`, run the op, return replicated results. Collective.

    The new value of an operand that the op changed in place is redistributed to its layout. Results
    that cannot be DTensors (sparse or quantized tensors) stay plain, the same on every rank.

    Raises:
        UnsupportedError: a write to a copied view, or one that changes a DTensor's shape.
        PolicyError: the op draws, and another policy than "native" is in force.
        RuntimeError: a recorded write to a view of a leaf.
    """
    mesh = mesh_of(call)
    if observers:
        notify_fallback(call)
    _note(call, mesh)
    foretold = foretold_writes(call)
    for index in foretold:
        # Before it runs: an operand that is replicated already is passed itself, not as a copy.
        check_writable(call.operands[index], function_name(call.func))
        refuse_view_of_leaf(call.operands[index])
        assigns = call.func is torch.Tensor.__setitem__
        # Other functions may not be recorded.
        if assigns or isinstance(call.func, MethodDescriptorType):
            refuse_leaf(call.operands[index])
        # Of `x[0] = …` the part counts: torch looks at that, in memory that lies as on one device.
        if not assigns:
            refuse_overlapping(call.operands[index], call.func, call.operands)
    locals_ = _locals(call, mesh)
    watch = WriteWatch(call, locals_)
    # To tell afterwards whether autograd recorded a write: then it has to be recorded back, too.
    nodes = [local.grad_fn for local in locals_]
    args, kwargs = call.replaced(locals_)
    generator = generator_in(args, kwargs)
    before = state_before(mesh, locals_[0], generator)
    with vescale_rng.no_native_draws(function_name(call.func)):
        result = call.func(*args, **kwargs)
    # Every rank draws for itself (`svd_lowrank`, say): alike, as long as the generators are.
    record_if_drawn(mesh, locals_[0], generator, before)
    # Sorted, so that all ranks write back, which communicates, in one order.
    for index in sorted(foretold | watch.changed()):
        recorded = torch.is_grad_enabled() and locals_[index].grad_fn is not nodes[index]
        with torch.set_grad_enabled(recorded):
            _write_back(call, index, locals_[index])
    # By identity, which is safe while `locals_` keeps them alive: an op that returns an operand has
    # to return the tensor that the caller passed.
    originals = {id(local): operand for local, operand in zip(locals_, call.operands, strict=True)}
    wrapped = _wrap_replicated(result, mesh, originals)
    _mark_views(wrapped, call, locals_)
    if any_copies():
        note_ways_back(call, wrapped)
    return wrapped


def _locals(call: OpCall, mesh: DeviceMesh) -> list[Tensor]:
    """The operands' replicated local tensors. Collective.

    An operand that is passed twice becomes one tensor: a write through one argument is seen through
    the other.
    """
    found: dict[int, Tensor] = {}
    for operand in call.operands:
        if id(operand) not in found:
            replicated_local = _replicated_local(operand, mesh, call)
            found[id(operand)] = (
                _as_on_one_device(replicated_local, operand)
                if isinstance(operand, DTensor)
                else operand
            )
    return [found[id(operand)] for operand in call.operands]


def _as_on_one_device(replicated: DTensor, operand: DTensor) -> Tensor:
    """The local data, in the memory order that one device has: the op may look at strides."""
    local, order = local_for_use(replicated, 0), replicated._spec.layout.order
    expanded = expanded_dims(operand)
    if not expanded or expanded == expanded_dims(local):
        return in_memory_order(local, order)
    return expanded_again(local, order, expanded)


def _replicated_local(operand: Tensor, mesh: DeviceMesh, call: OpCall) -> Any:
    """A replicated DTensor; a plain operand itself if it cannot be one (sparse, quantized)."""
    if isinstance(operand, DTensor):
        if operand_watches:
            notify_operand(operand, (Replicate(),) * len(operand.placements))
        return replicated(operand)
    return replicated_operand(operand, mesh, call) if is_strided(operand) else operand


def _mark_views(result: Any, call: OpCall, replicated: list[Tensor]) -> None:
    """Mark results that alias a gathered operand: they are views that had to be copies."""
    if isinstance(result, list | tuple):
        for item in result:
            _mark_views(item, call, replicated)
    elif isinstance(result, DTensor):
        for operand, replicated_local in zip(call.operands, replicated, strict=True):
            if result is operand or not isinstance(operand, DTensor):
                continue
            copied = not same_memory(operand._local_tensor, replicated_local)
            if (copied or operand._view_copy_of is not None) and same_memory(
                result._local_tensor, replicated_local
            ):
                mark_copy(result, operand)


def _write_back(call: OpCall, index: int, local: Tensor) -> None:
    """Redistribute what the op has written to operand `index` to the operand's layout. Collective.

    Raises:
        UnsupportedError: the target is a copied view, or the op changed its shape.
    """
    target = call.operands[index]
    if not isinstance(target, DTensor):
        return  # a plain operand was passed itself
    check_writable(target, function_name(call.func))
    if tuple(local.shape) != tuple(target.shape):
        raise UnsupportedError(
            f"{function_name(call.func)} changes the shape of a DTensor in place; "
            "use the form that returns a new tensor"
        )
    # The op has written to the target's own memory. If ranks differed here they would not hang:
    # only the local tensor of a replicated target is passed itself, and that one is not sent back.
    if target._local_tensor is local:
        return
    # Of the target, which may be on another spelling of the mesh than other operands.
    mesh = target._spec.layout.mesh
    layout = Layout.of(mesh, [Replicate()] * mesh.ndim)
    # Every rank holds the same new value, so this sends nothing: each rank keeps its own shard.
    replicated_local = wrap(local, spec_of(layout, tuple(local.shape), local.dtype))
    piece = redistributed(replicated_local, target._spec.layout)
    copy_into(target._local_tensor, piece._local_tensor)
    after_mutation(target)


def _wrap_replicated(result: Any, mesh: DeviceMesh, originals: dict[int, Tensor]) -> Any:
    """Wrap results; one that is an operand's local tensor becomes the operand that was passed.

    Raises:
        UnsupportedError: a nested tensor.
    """
    if isinstance(result, Tensor):
        known = originals.get(id(result))
        if known is not None:
            return known
        if result.is_nested:
            raise UnsupportedError(
                "a nested tensor of DTensors: it would hide that they are distributed. Nest "
                "x.full_tensor() for the wholes, or x.to_local()."
            )
        return as_replicated_result(result, mesh) if is_strided(result) else result
    if isinstance(result, list | tuple):
        return rebuild_like(result, [_wrap_replicated(item, mesh, originals) for item in result])
    return result


def as_replicated_result(local: Tensor, mesh: DeviceMesh) -> DTensor:
    """Wrap a result that every rank has computed alike; keeps its strides."""
    order = order_of(tuple(local.shape), local.stride())
    layout = Layout.of(mesh, [Replicate()] * mesh.ndim, order)
    spec = spec_of(layout, tuple(local.shape), local.dtype)
    return wrap(local, with_strides(spec, tuple(local.stride())))


def _note(call: OpCall, mesh: DeviceMesh) -> None:
    """Log a fallback that replicates operands, once per function and layouts, on one rank."""
    # A fallback on replicated operands costs nothing extra, and is not worth a line.
    name = function_name(call.func)
    layouts = tuple(o._spec.layout for o in call.operands if isinstance(o, DTensor))
    moving = [
        o
        for o in call.operands
        if isinstance(o, DTensor) and o._spec.layout.replicated != o._spec.layout.active
    ]
    if not moving or (name, layouts) in _noted or len(_noted) >= _MOST_NOTES:
        return
    _noted.add((name, layouts))
    if any(mesh.get_coordinate() or ()):
        return
    size = sum(o.numel() * o.element_size() for o in moving)
    logger.warning(
        "%s has no rule for %s: its operands were replicated (%d bytes each call). It is right, "
        "but slow; register_rule teaches it.",
        name,
        ", ".join(repr(o) for o in moving),
        size,
    )
