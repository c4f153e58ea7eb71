"""A device that is not the host, for machines without one: its memory is counted, and the host's.

Its tensors are of another device type: an operator that meets one beside a tensor of the host
raises, autograd runs its nodes in a thread of their own, and values are real. Kernels are those of
the host, by torch's fallback. Collectives are gloo's, on the same memory.
"""

import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.cpp_extension import load

NAME = "second"
_CALLS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "gather", "scatter"),
    *("reduce_scatter", "alltoall", "alltoall_base", "barrier", "send", "recv", "recv_anysource"),
    *("_allgather_base", "_reduce_scatter_base"),
    *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
)
# What newer versions of torch call some of them.
_NEW = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
}


def compiled(folder: Path) -> Any:
    """Compile the device's memory, or find it compiled, and register it. Once a process."""
    source = Path(__file__).with_suffix(".cpp")
    made = load("second_device", [str(source)], build_directory=str(folder), extra_cflags=["-O0"])
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
    }
    answers |= {"device_count": 1, "current_device": 0}
    answers |= {"get_amp_supported_dtype": [torch.bfloat16]}
    for name, answer in answers.items():
        setattr(module, name, lambda answer=answer: answer)
    for name in ("manual_seed_all", "set_device"):
        setattr(module, name, lambda argument: None)
    module._lazy_init = lambda: None  # type: ignore[attr-defined]
    torch._register_device_module(NAME, module)
    _register_group(made)
    return made


def _register_group(device: Any) -> None:
    def on_host(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [on_host(one) for one in argument]
        is_ours = isinstance(argument, Tensor) and argument.device.type == NAME
        return device.as_host(argument) if is_ours else argument

    class Group(dist.ProcessGroup):
        """Gloo, of tensors of both devices."""

        def __init__(self, rank: int, size: int, inner: Any) -> None:
            super().__init__(rank, size)
            self._inner, self._name = inner, ""

        def getBackendName(self) -> str:
            return NAME

        def _set_group_name(self, name: str) -> None:
            self._name = name

        @property
        def group_name(self) -> str:
            return self._name

        @property
        def pg_name(self) -> str:
            return self._name

        def _get_backend(self, device: Any) -> Any:
            return self._inner

    def passed_on(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs = {key: on_host(one) for key, one in kwargs.items()}
            return getattr(self._inner, name)(*map(on_host, args), **kwargs)

        return call

    for name in _CALLS:
        setattr(Group, name, passed_on(name))
    for name, other in _NEW.items():
        setattr(Group, name, passed_on(other))

    def create(store: Any, rank: int, size: int, timeout: Any) -> Group:
        return Group(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend(NAME, create, devices=["cpu", NAME])
