"""`distribute_module`: distributes a module's parameters, inputs and outputs by given functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._autograd.conversion import distribute_tensor
from vescale_dtensor._errors import DTensorError
from vescale_dtensor._layout.mesh import current_mesh
from vescale_dtensor._tensor.dtensor import DTensor

# By identity and weak: a module that is gone must not mark another one at its address.
_distributed: WeakSet[nn.Module] = WeakSet()


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
) -> nn.Module:
    """Make every parameter and buffer of a module a DTensor, in place, and return the module.

    Args:
        module: the module.
        device_mesh: default: the mesh of the enclosing `with mesh:`.
        partition_fn: called as `(name, submodule, mesh)` for each submodule; it replaces the
            parameters that are to be sharded. The others are replicated, with the values of the
            mesh's first rank. A parameter that several submodules share stays one.
        input_fn: called as `(module, inputs, mesh)` before each forward; may return new inputs.
        output_fn: called as `(module, outputs, mesh)` after it; may return new outputs.

    Raises:
        DTensorError: the module was distributed before, or a function takes other arguments.
        MeshError: no mesh.
    """
    if module in _distributed:
        raise DTensorError(
            f"distribute_module: this {type(module).__name__} was distributed already; "
            "redistribute its parameters instead"
        )
    mesh = device_mesh if device_mesh is not None else current_mesh("distribute_module")
    # Checked before anything changes: a module must not be left half distributed.
    before = _with_mesh("input_fn", input_fn, mesh)
    after = _with_mesh("output_fn", output_fn, mesh)
    # Shared parameters are recognized by identity, across all submodules.
    made: dict[int, Any] = {}
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        _replicate_rest(submodule, mesh, made)
    if before is not None:
        module.register_forward_pre_hook(before)
    if after is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: after(mod, outputs))
    _distributed.add(module)
    return module


def _replicate_rest(module: nn.Module, mesh: DeviceMesh, made: dict[int, Any]) -> None:
    """Replicate the parameters and buffers of one submodule that are still plain tensors.

    `made` maps the id of each plain tensor to what it became and to itself.
    """
    for name, parameter in list(module._parameters.items()):
        if parameter is None or isinstance(parameter, DTensor):
            continue
        if id(parameter) not in made:
            # Detached: the parameter is a new leaf. In the order of the module, the same on all
            # ranks, as each of these is a broadcast.
            distributed = distribute_tensor(parameter.detach(), mesh)
            # The plain tensor is stored as well: freed, its id could become that of the next one.
            made[id(parameter)] = (nn.Parameter(distributed, parameter.requires_grad), parameter)
        module.register_parameter(name, made[id(parameter)][0])
    for name, buffer in list(module._buffers.items()):
        if buffer is None or isinstance(buffer, DTensor):
            continue
        if id(buffer) not in made:
            made[id(buffer)] = (distribute_tensor(buffer, mesh), buffer)
        # Past `register_buffer`, which would reset whether a buffer is persistent.
        module._buffers[name] = made[id(buffer)][0]


def _with_mesh(
    what: str, function: Callable[..., Any] | None, mesh: DeviceMesh
) -> Callable[[nn.Module, Any], Any] | None:
    """Adapt `function(module, values, mesh)`, or torch's older form without module, to a hook."""
    if function is None:
        return None
    count = len(inspect.signature(function).parameters)
    if count == 3:
        return lambda module, values: function(module, values, mesh)
    if count == 2:
        return lambda _, values: function(values, mesh)
    raise DTensorError(
        f"distribute_module: {what} takes {count} arguments; it is called with "
        "(module, values, device_mesh)"
    )
