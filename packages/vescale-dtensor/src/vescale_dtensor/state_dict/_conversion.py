"""The DTensors of a nested state as plain tensors, or as torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor._errors import LayoutError
from vescale_dtensor._tensor.dtensor import DTensor


def converted(state: Any, convert: Callable[[DTensor], Any]) -> Any:
    """A state of dicts, lists and tuples, with something else in place of each DTensor."""
    if isinstance(state, DTensor):
        return convert(state)
    if isinstance(state, Mapping):
        # A plain dict: those of modules carry metadata that plain tensors have no use for.
        return {key: converted(value, convert) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(converted(value, convert) for value in state)
    return state


def gathered_state(state: Any, *, cpu_offload: bool, rank0_only: bool) -> Any:
    """A state with global tensors in place of DTensors. Collective, one tensor after the other.

    Args:
        state: on every rank the same, but for values.
        cpu_offload: move plain tensors to the CPU, as soon as each is gathered.
        rank0_only: other ranks than the first one of the world get an empty dict.
    """
    keeps = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0

    def whole(tensor: DTensor) -> Tensor | None:
        # Every rank takes part; those that do not keep it free it before the next one.
        detached: Any = tensor.detach()
        found: Tensor = detached.full_tensor()
        if not keeps:
            return None
        return found.cpu() if cpu_offload else found

    made = converted(state, whole)
    return made if keeps else {}


def full_state_dict(
    model: nn.Module, *, cpu_offload: bool = False, rank0_only: bool = False
) -> dict[str, Any]:
    """Return a model's state dict with global plain tensors: that of one device. Collective.

    Args:
        model: the model; it is not changed.
        cpu_offload: whether tensors are moved to the CPU as they are gathered.
        rank0_only: whether other ranks than the first get an empty dict. They have to call it, too.

    Examples:
        state = full_state_dict(model, rank0_only=True)
        if rank == 0:
            torch.save(state, "model.pt")
    """
    state = model.state_dict()
    found: dict[str, Any] = gathered_state(state, cpu_offload=cpu_offload, rank0_only=rank0_only)
    return found


def as_torch(state: Any) -> Any:
    """Return a state with torch's DTensors in place of ours, on the same memory.

    For what takes only those: `async_save` of `torch.distributed.checkpoint`, say. What is loaded
    into the result is in the model. What is no DTensor is the same object.

    Args:
        state: dicts, lists and tuples: `{"model": model.state_dict(), "step": 3}`.

    Raises:
        LayoutError: a partial tensor, of which each rank holds a summand.
        UnsupportedError: a placement that torch does not have.
    """

    def one(tensor: DTensor) -> Any:
        if any(p.is_partial() for p in tensor.placements):
            raise LayoutError(
                f"as_torch: {tensor!r} is partial, so each rank holds a summand of it: "
                "redistribute it to Replicate() or Shard() before it is saved"
            )
        detached: Any = tensor.detach()
        return detached.to_torch()

    return converted(state, one)
