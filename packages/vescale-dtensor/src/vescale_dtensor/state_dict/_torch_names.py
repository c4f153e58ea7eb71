"""`torch.distributed.checkpoint.state_dict` for models of DTensors.

torch's own functions do the naming and the bookkeeping, and hand DTensors on as they are; gathering
and distributing them is what is done here. They are imported when first needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from vescale_comm.agreement import broadcast_text

from vescale_dtensor._autograd.conversion import distribute_tensor
from vescale_dtensor._errors import LayoutError, UnsupportedError
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor.state_dict._conversion import gathered_state

Optimizers = Optimizer | Iterable[Optimizer]


def _torch() -> Any:
    """Torch's module of these functions."""
    from torch.distributed.checkpoint import state_dict

    return state_dict


def _without_gathering(options: Any) -> Any:
    """Options with which torch's functions leave DTensors alone."""
    options = options or _torch().StateDictOptions()
    changed = {"full_state_dict": False, "cpu_offload": False, "broadcast_from_rank0": False}
    return replace(options, **changed)


def _as_asked(state: Any, options: Any) -> Any:
    """A state as the options want it. Collective if it is to be full."""
    if options is None or not (options.full_state_dict or options.cpu_offload):
        return state
    if options.full_state_dict:
        # Both together: only the first rank keeps it, as in torch.
        offload = options.cpu_offload
        return gathered_state(state, cpu_offload=offload, rank0_only=offload)
    raise UnsupportedError(
        "StateDictOptions(cpu_offload=True) without full_state_dict=True: a DTensor lies on the "
        "device of its mesh. Ask for both, or use vescale_ckpt, which copies to the host by itself"
    )


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """Return a model's state dict. Collective if it is to be full.

    The signature is that of `torch.distributed.checkpoint.state_dict.get_model_state_dict`.

    Args:
        model: the model.
        submodules: see torch's.
        options: torch's `StateDictOptions`. `full_state_dict=True`: global plain tensors, with
            `cpu_offload=True` on the CPU of the first rank, and an empty dict on others.

    Raises:
        UnsupportedError: `cpu_offload=True` alone.
    """
    given = _without_gathering(options)
    state = _torch().get_model_state_dict(model, submodules=submodules, options=given)
    found: dict[str, Any] = _as_asked(state, options)
    return found


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: Any = None,
) -> Any:
    """Return the state dict of optimizers, with names of parameters. See `get_model_state_dict`.

    The signature is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`.
    """
    given = _without_gathering(options)
    state = _torch().get_optimizer_state_dict(
        model, optimizers, submodules=submodules, options=given
    )
    return _as_asked(state, options)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: Any = None,
) -> tuple[dict[str, Any], Any]:
    """Return the state dicts of a model and of optimizers. See `get_model_state_dict`.

    The signature is that of `torch.distributed.checkpoint.state_dict.get_state_dict`.
    """
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, options: Any = None
) -> Any:
    """Load a state dict into a model. Collective.

    The signature is that of `torch.distributed.checkpoint.state_dict.set_model_state_dict`.

    Args:
        model: the model.
        model_state_dict: of DTensors, or of plain global tensors, the same on every rank.
        options: torch's `StateDictOptions`. `broadcast_from_rank0=True`: only the first rank's
            values count, and others may pass an empty dict.

    Returns:
        Names that are missing or unexpected.
    """
    if options is not None and options.broadcast_from_rank0:
        model_state_dict = _from_first_rank(model, model_state_dict)
    return _torch().set_model_state_dict(
        model, model_state_dict, options=_without_gathering(options)
    )


def _from_first_rank(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The first rank's values, distributed as the model is. Collective.

    Names that the first rank lacks are left out, and those that the model lacks are kept: torch
    tells of both, on every rank.

    Raises:
        UnsupportedError: a tensor of the model that is not distributed.
        LayoutError: a value of the first rank has another shape than the model's.
    """
    # What the first rank has is known there alone, and every rank has to do the same by it.
    given = {
        name: list(one.shape) if isinstance(one, Tensor) else None for name, one in state.items()
    }
    # As data: what is unpickled could run whatever another rank sends.
    told = json.loads(broadcast_text(json.dumps(given), 0))
    shapes = {name: None if one is None else tuple(one) for name, one in told.items()}
    own = model.state_dict()
    found: dict[str, Any] = {
        name: torch.empty(0, device="cpu") for name in shapes if name not in own
    }
    for name, tensor in own.items():
        if not isinstance(tensor, DTensor):
            raise UnsupportedError(
                f"broadcast_from_rank0=True: {name!r} of the model is no DTensor, so it has no "
                "mesh to be broadcast over. Call distribute_module(model, mesh) first"
            )
        shape = shapes.get(name)
        if shape is None:
            continue
        if shape != tuple(tensor.shape):
            raise LayoutError(
                f"broadcast_from_rank0=True: {name!r} is {list(shape)} on the first rank, and "
                f"{list(tensor.shape)} in the model"
            )
        value = state.get(name)
        if not isinstance(value, Tensor) or value.shape != tensor.shape:  # another rank's
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        value = value.detach().to(tensor.device, tensor.dtype)
        mesh, placements = tensor.device_mesh, tensor.placements
        found[name] = distribute_tensor(value, mesh, placements, src_data_rank=0)
    return found


def set_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, optim_state_dict: Any, *, options: Any = None
) -> None:
    """Load a state dict into optimizers. Collective.

    The signature is that of `torch.distributed.checkpoint.state_dict.set_optimizer_state_dict`.

    Args:
        model: the model.
        optimizers: its optimizers.
        optim_state_dict: of DTensors, or of plain global tensors, the same on every rank. Those of
            a parameter's shape are distributed as the parameter is.
        options: torch's `StateDictOptions`, without `broadcast_from_rank0`.

    Raises:
        UnsupportedError: `broadcast_from_rank0=True`.
    """
    if options is not None and options.broadcast_from_rank0:
        raise UnsupportedError(
            "set_optimizer_state_dict(broadcast_from_rank0=True): pass the full state on every rank"
        )
    given = _without_gathering(options)
    _torch().set_optimizer_state_dict(model, optimizers, optim_state_dict, options=given)
    several = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    for optimizer in several:
        for parameter, state in optimizer.state.items():
            _distribute_as(parameter, state)


def _distribute_as(parameter: Tensor, state: dict[str, Any]) -> None:
    """Distribute the plain tensors of an optimizer's state as their parameter is, in place."""
    if not isinstance(parameter, DTensor):
        return
    mesh, placements = parameter.device_mesh, parameter.placements
    for name, value in state.items():
        plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if plain and value.shape == parameter.shape:
            state[name] = distribute_tensor(value, mesh, placements, src_data_rank=None)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: Any,
    options: Any = None,
) -> Any:
    """Load state dicts into a model and its optimizers. Collective. See `set_model_state_dict`.

    The signature is that of `torch.distributed.checkpoint.state_dict.set_state_dict`.

    Returns:
        Names of the model that are missing or unexpected.
    """
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return set_model_state_dict(model, model_state_dict, options=options)
