"""Kinds of state that settings of torch have, and objects in C that modules of libraries hold.

Found by trying all functions and attributes of torch that set something, and what of its getters
gives another value afterwards.
"""

import io
import sys
import threading

import numpy
import torch
from stale_kinds_asked import asked, setting
from stale_kinds_users import KINDS as KINDS

# --- functions of torch that set what others give

DTYPES = torch.bfloat16, torch.float16, torch.float32
SWITCH = False, True
# The name of what sets, that of what gives, and the values: the first is torch's own.
FUNCTIONS = [
    ("set_anomaly_enabled", "is_anomaly_enabled", SWITCH),
    ("set_autocast_cache_enabled", "is_autocast_cache_enabled", SWITCH[::-1]),
    ("set_deterministic_debug_mode", "get_deterministic_debug_mode", (0, 1, 2)),
    ("set_float32_matmul_precision", "get_float32_matmul_precision", ("highest", "high")),
    ("set_num_threads", "get_num_threads", (1, 2)),
    ("set_warn_always", "is_warn_always_enabled", SWITCH),
]
IN_C = [
    "cublas_allow_bf16_reduced_precision_reduction",
    "cudnn_allow_tf32",
    "cudnn_benchmark",
    "math_sdp_allow_fp16_bf16_reduction",
    "miopen_immediate",
    "mkldnn_deterministic",
    "mkldnn_enabled",
    "nnpack_enabled",
    "warnAlways",
]
FUNCTIONS += [(f"_C._set_{name}", f"_C._get_{name}", SWITCH) for name in IN_C]
FUNCTIONS += [
    (f"_C._set_{name}", f"_C._is_{name}", SWITCH)
    for name in ("view_replay_enabled", "grad_layout_enforcement_enabled", "multithreading_enabled")
]
FUNCTIONS += [
    (f"_C._set_sdp_use_{name}", f"_C._get_{name}_sdp_enabled", SWITCH[::-1])
    for name in ("flash", "math", "mem_efficient", "cudnn", "fa3")
]


def named(path):
    """An object of torch by its name; None where this torch has none of it."""
    found = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def number(value):
    """A number that tells values of settings apart."""
    return value + 2.0 if isinstance(value, int | float) else float(sum(map(ord, str(value))))


for setter, getter, values in FUNCTIONS:
    if named(setter) is not None and named(getter) is not None:
        asked(
            f"torch.{setter}",
            lambda n, name=setter, values=values: named(name)(values[n % len(values)]),
            lambda name=getter: number(named(name)()),
        )

# --- attributes of backends

ATTRIBUTES = {
    "backends.cudnn.allow_tf32": SWITCH,
    "backends.cudnn.benchmark": SWITCH,
    "backends.cudnn.deterministic": SWITCH,
    "backends.cudnn.enabled": SWITCH[::-1],
    "backends.cudnn.rnn.fp32_precision": ("none", "ieee", "tf32"),
    "backends.fp32_precision": ("none", "ieee", "tf32"),
    "backends.mkldnn.enabled": SWITCH[::-1],
    "backends.mkldnn.deterministic": SWITCH,
    "backends.mkldnn.matmul.fp32_precision": ("none", "ieee", "bf16"),
    "backends.quantized.engine": tuple(torch.backends.quantized.supported_engines),
}
for path, values in ATTRIBUTES.items():
    owner, _, name = path.rpartition(".")
    if hasattr(named(owner), name):
        asked(
            f"torch.{path}",
            lambda n, owner=owner, name=name, values=values: setattr(
                named(owner), name, values[n % len(values)]
            ),
            lambda owner=owner, name=name: number(getattr(named(owner), name)),
        )


WEIGHT = torch.full((4, 4), 1.0 / 3)


asked(
    "dtype of autocast on cpu",
    lambda n: torch.set_autocast_dtype("cpu", (torch.bfloat16, torch.float64)[n % 2]),
    lambda: number(torch.get_autocast_dtype("cpu")),
)
asked(
    "autocast on another device",
    lambda n: torch.set_autocast_enabled("xpu", bool(n % 2)),
    lambda: number(torch.is_autocast_enabled("xpu")),
)


def cast_by_default(x):
    with torch.autocast("cpu"):
        return x @ WEIGHT


setting(
    "dtype of autocast regions that name none",
    lambda n: torch.set_autocast_dtype("cpu", DTYPES[n % 2]),
    cast_by_default,
)

# --- objects that modules of libraries hold


# Beside `sys.stderr`, which has to stay as it is.
QUIET = io.TextIOWrapper(io.BytesIO())


def reconfigured(**options):
    def change(count):
        sys.quiet = QUIET
        QUIET.reconfigure(**{name: values[count % len(values)] for name, values in options.items()})

    return change


ERRORS = ("strict", "ignore", "backslashreplace")
asked("errors of a stream", reconfigured(errors=ERRORS), lambda: len(sys.quiet.errors))
asked(
    "name of the main thread",
    lambda n: setattr(threading.main_thread(), "name", "MainThread" + "-" * n),
    lambda: len(threading.main_thread().name),
)
asked(
    "numpy's call at errors",
    lambda n: numpy.seterrcall((None, print)[n % 2]),
    lambda: 2 if numpy.geterrcall() is print else 3,
)
