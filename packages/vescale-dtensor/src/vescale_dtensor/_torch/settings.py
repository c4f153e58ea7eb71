"""By which functions in C torch is asked for its settings: part of the private API that is listed.

All of them are found by their names, so that what a later torch adds is among them.
"""

from __future__ import annotations

import re
from types import BuiltinFunctionType
from typing import Any

import torch

_STATE_GETTERS = """
_get_deterministic_algorithms _get_deterministic_algorithms_warn_only _get_warnAlways
_get_deterministic_fill_uninitialized_memory _get_float32_matmul_precision _get_qengine
_get_cudnn_enabled _get_cudnn_benchmark _get_cudnn_deterministic _get_cudnn_allow_tf32
_get_cublas_allow_tf32 _get_cublas_allow_fp16_reduced_precision_reduction
_get_cublas_allow_bf16_reduced_precision_reduction _get_mkldnn_enabled _get_mkldnn_deterministic
_get_mkldnn_allow_tf32 _get_nnpack_enabled _get_flash_sdp_enabled _get_math_sdp_enabled
_get_mem_efficient_sdp_enabled _get_cudnn_sdp_enabled _get_overrideable_sdp_enabled
get_num_threads get_num_interop_threads is_anomaly_enabled is_anomaly_check_nan_enabled
_is_multithreading_enabled is_autocast_cache_enabled
"""


def state_getters() -> list[Any]:
    """The functions in C, without arguments, by which torch is asked for its own settings."""
    names = _STATE_GETTERS.split()
    return [getattr(torch._C, name) for name in names if hasattr(torch._C, name)]


_SETTINGS = re.compile(r"_?(get|is)_\w+|\w+_enabled")
# What depends on where it is asked, which recordings follow by themselves; and what is no setting.
_NO_SETTINGS = re.compile(
    r"grad_enabled|fwd_grad|inference|autocast_(\w+_)?enabled|any_autocast|cpu_dtype|gpu_dtype"
    r"|torch_function|function_sta|dispatch|tracing|tls|thread_name|caught|backtrace|mobile|tensor"
    r"|alias|default_d|symnode|nested|value_trace|schema|operation|module|bytecode|graph|set_"
    r"|accelerator|propagator|custom_class|upgrade|version|all_dtypes"
)
_PRECISIONS = (
    *(("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    *(("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
)
# Those of cpu and cuda are part of what every call begins with.
_OTHER_DEVICES = ("xpu", "hpu", "mps", "mtia", "xla", "ipu")
_GIVEN = {
    "_get_fp32_precision_getter": _PRECISIONS,
    "get_autocast_dtype": tuple((device,) for device in _OTHER_DEVICES),
}


def settings_getters() -> list[Any]:
    """The functions in C that give settings of torch, where users ask for them."""
    names = [n for n in dir(torch._C) if _SETTINGS.fullmatch(n) and not _NO_SETTINGS.search(n)]
    found = [getattr(torch._C, name) for name in names]
    return [one for one in found if isinstance(one, BuiltinFunctionType)]


def setting_of(getter: Any) -> Any:
    """What a function of `settings_getters` gives; of one that takes arguments, all that it may."""
    found = []
    for given in _GIVEN.get(getter.__name__, ((),)):
        try:
            found.append(getter(*given))
        except (TypeError, RuntimeError):  # it takes others, or torch knows no such device
            found.append(None)
    return tuple(found)
