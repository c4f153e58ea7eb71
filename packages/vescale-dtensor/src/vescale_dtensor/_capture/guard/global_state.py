"""Global state that torch functions read: grad mode, autocast, default dtype, RNG policy.

It is guarded at the start of a program and sampled at every recorded step: where it changes between
two steps, the program changes it too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import (
    get_autocast_dtype,
    get_default_dtype,
    is_grad_enabled,
    is_inference_mode_enabled,
)
from torch.overrides import has_torch_function_unary
from vescale_rng import policy

from vescale_dtensor._planning.attention_way import attention_way
from vescale_dtensor._redistribute.half_sums import half_sums_mode
from vescale_dtensor._torch.compat import any_autocast, entered_mesh

_DEVICE_TYPES = ("cpu", "cuda")
# torch's own values outside of any autocast region.
_OFF = (False, torch.bfloat16, False, torch.float16, True)

Autocast = tuple[Any, ...]
"""Enabled and dtype for each device type, whether casts are cached, whether any is enabled."""


class GlobalState(NamedTuple):
    """A sample.

    Attributes:
        grad, inference: modes.
        autocast: see `Autocast`; None where it is off, with the dtypes that torch has.
        dtype: torch's default dtype.
        device: torch's default device, where one was set.
        policy: of vescale_rng.
        mesh: the one that was entered by `with mesh:`.
        half_sums: how ranks add half-precision tensors.
        attention: how ranks share attention of sharded sequences.
        deterministic: whether only deterministic algorithms run.
        precision: of float32 products; None where backends have been given one each.
    """

    grad: bool
    inference: bool
    autocast: Autocast | None
    dtype: torch.dtype
    device: torch.device | None
    policy: str
    mesh: Any
    half_sums: str
    attention: str
    deterministic: bool
    precision: str | None


def global_state() -> tuple[Any, ...]:
    """What holds now: the fields of an `GlobalState`, which takes longer to make."""
    return (
        is_grad_enabled(),
        is_inference_mode_enabled(),
        # Asked at every call: where autocast is as torch has it, three questions in place of five.
        # Where it is off, regions without a dtype of their own begin with the one that was set.
        autocast_state()
        if any_autocast()
        or get_autocast_dtype("cpu") is not _OFF[1]
        or get_autocast_dtype("cuda") is not _OFF[3]
        else None,
        get_default_dtype(),
        # Asked of no tensor: only a mode answers, and a default device is one.
        torch.get_default_device() if has_torch_function_unary(None) else None,
        policy(),
        entered_mesh(),
        half_sums_mode(),
        attention_way(),
        torch.are_deterministic_algorithms_enabled(),
        _matmul_precision(),
    )


def backend_flags() -> tuple[Any, ...]:
    """What chooses between kernels: a replay leaves it as it finds it."""
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        _matmul_precision(),
        cuda.math_sdp_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
        torch.get_num_threads(),
    )


def _matmul_precision() -> str | None:
    """The precision of float32 products; None where backends have been given one each."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch does not tell then
        return None


def autocast_state() -> Autocast:
    """The state of autocast."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        any_autocast(),  # of other devices, too
    )


def is_off(state: Autocast | None) -> bool:
    """Whether autocast casts nothing."""
    return not state or not (state[0] or state[2])


def set_autocast(*state: Any) -> None:
    """Make this the state of autocast; a step of programs. Nothing stands for off."""
    state = state or _OFF
    for index, device_type in enumerate(_DEVICE_TYPES):
        torch.set_autocast_enabled(device_type, state[2 * index])
        torch.set_autocast_dtype(device_type, state[2 * index + 1])
    torch.set_autocast_cache_enabled(state[2 * len(_DEVICE_TYPES)])


def leave_autocast(*state: Any) -> None:
    """The same at the end of the outermost region, where cached casts are dropped."""
    set_autocast(*state)
    torch.clear_autocast_cache()
