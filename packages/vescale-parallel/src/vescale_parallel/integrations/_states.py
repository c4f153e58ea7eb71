"""States of models and optimizers as one device has them, and back; how a method is called."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch.distributed as dist
import vescale_comm
from torch import Tensor, nn
from torch.optim import Optimizer
from vescale_comm.agreement import broadcast_text, gather_texts
from vescale_comm.nested import map_tensors
from vescale_dtensor import DTensor, Replicate, distribute_tensor
from vescale_dtensor.state_dict import full_state_dict

from vescale_parallel._apply.parallelize import parallelize
from vescale_parallel._common.mesh import from_launcher
from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.trace.text import from_text, to_text
from vescale_parallel._plan.plan import Plan
from vescale_parallel._zero.schedule import zero_schedule_of

PlanFor = Plan | Callable[[nn.Module], Plan] | None
"""A plan, or what makes one of the model that the trainer has made; None: data parallel."""


def rank() -> int:
    """Return the rank of this process; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def local_rank() -> int:
    """Return the rank of this process on its machine, as torchrun says it."""
    # Without a launcher that says it, all ranks are taken to be on one machine.
    return from_launcher("LOCAL_RANK", rank())


def barrier() -> None:
    """Wait until all ranks are here: what rank 0 has written can be read behind it."""
    if dist.is_initialized():
        vescale_comm.barrier()


def decided(decision: bool, *, every: bool) -> bool:
    """Return what the ranks decide together: whether all do, or any. Collective."""
    if not dist.is_initialized():
        return decision
    told = [one == "yes" for one in gather_texts("yes" if decision else "no")]
    return all(told) if every else any(told)


def broadcast_plain(value: Any, source: int) -> Any:
    """Return what rank `source` has: plain values, which travel as text. Collective.

    Raises:
        TypeError: on every rank, it is something else there.
    """
    if not dist.is_initialized():
        return value
    text = ""
    if rank() == source:
        # What cannot be sent is said by all: the others wait for it.
        with suppress(PipelineError):
            text = to_text(os.fspath(value) if isinstance(value, os.PathLike) else value)
    text = broadcast_text(text, source)
    if not text:
        raise TypeError(
            f"broadcast: rank {source} has no plain value to send. Texts, numbers and lists, "
            "tuples and dicts of them are sent; anything else would be unpickled."
        )
    return from_text(text)


def is_parallel(model: nn.Module) -> bool:
    """Return whether a model has distributed parameters."""
    return any(isinstance(one, DTensor) for one in model.parameters())


def is_offloaded(model: nn.Module) -> bool:
    """Return whether `offload=` keeps something of a model on the host, where it has to stay."""
    schedule = zero_schedule_of(model)
    units = schedule.units if schedule is not None else []
    return any(buffer.host is not None for unit in units for buffer in unit.buffers)


def made_parallel(model: nn.Module, mesh: Any, plan: PlanFor, **options: Any) -> nn.Module:
    """Parallelise a model that is not parallel yet; without a mesh it stays what it is."""
    if mesh is None or is_parallel(model):
        return model
    chosen = plan if plan is None or isinstance(plan, Plan) else plan(model)
    return parallelize(model, mesh, chosen, **options)


def whole(value: Any) -> Any:
    """Return a value with global plain tensors in place of DTensors. Collective."""

    def plain(tensor: Tensor) -> Tensor:
        detached: Any = tensor.detach()
        found: Tensor = detached.full_tensor() if isinstance(tensor, DTensor) else tensor
        return found

    return map_tensors(plain, value)


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state of plain tensors, on the CPU; empty but on rank 0. Collective."""
    state = full_state_dict(model, cpu_offload=True, rank0_only=True)
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        # Writers leave out what is tied by looking at the memory.
        # On other ranks the state is empty.
        if known in state and name in state:
            state[name] = state[known]
    return state


def inner(optimizer: Any) -> Optimizer:
    """Return torch's optimizer within the wrappers of a trainer."""
    # Wrappers are optimizers themselves, and may be wrapped again.
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    found: Optimizer = optimizer
    return found


@contextmanager
def whole_states(*optimizers: Any) -> Iterator[None]:
    """While it lasts, `state_dict()` of these optimizers is one device's. Collective at its start.

    So a library may ask on rank 0 alone. Other ranks get states without tensors.
    """
    with ExitStack() as stack:
        for optimizer in map(inner, optimizers):
            state = optimizer.state_dict()
            found = _gathered(state)

            # `found` as a default: by its name all hooks would return that of the last optimizer.
            def hook(_: Optimizer, __: dict[str, Any], found: Any = found) -> Any:
                return found

            stack.callback(optimizer.register_state_dict_post_hook(hook, prepend=False).remove)
        yield


def _gathered(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with global tensors on rank 0, one after the other; elsewhere none."""
    keeps = rank() == 0
    tensors: dict[Any, dict[str, Any]] = {}
    for index, values in state["state"].items():
        tensors[index] = {}
        for name, value in values.items():
            # On every rank, in one order: each is a collective, whoever keeps the result.
            one = whole(value)
            if keeps:
                # Moved at once, so that the device holds one whole tensor at a time.
                tensors[index][name] = map_tensors(lambda t: t.cpu(), one)
    return {**state, "state": tensors if keeps else {}}


@contextmanager
def loading_whole(*optimizers: Any) -> Iterator[None]:
    """While it lasts, `load_state_dict()` of these optimizers takes the state of one device."""
    with ExitStack() as stack:
        for optimizer in map(inner, optimizers):
            handle = optimizer.register_load_state_dict_post_hook(distribute_state)
            stack.callback(handle.remove)
        yield


def distribute_state(optimizer: Optimizer) -> None:
    """Distribute the plain tensors of an optimizer's state as its parameters are, in place."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, DTensor) and isinstance(state, Mapping):
            for name, value in list(state.items()):
                optimizer.state[parameter][name] = _as_parameter(value, parameter)


def _as_parameter(value: Any, parameter: DTensor) -> Any:
    # Tensors of no dims are counts of steps, which torch's optimizers keep plain, beside DTensors,
    # too.
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.ndim == 0:
        return value
    mesh = parameter.device_mesh
    # Means of rows and the like, which are smaller than the parameter, lie whole on every rank.
    alike = value.shape == parameter.shape
    where = parameter.placements if alike else [Replicate()] * mesh.ndim
    # None: every rank has read the whole value, and nothing is sent.
    return distribute_tensor(value, mesh, where, src_data_rank=None)
