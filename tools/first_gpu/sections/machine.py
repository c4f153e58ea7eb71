"""Describes this machine: device, driver, memory, versions, and which parts are there."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tools.first_gpu.cases import Case, CaseResult, figure, holds, same_bits
from tools.packages import PACKAGES

OPTIONAL = (
    *("triton", "scipy", "xxhash", "safetensors", "fsspec", "rich", "tensorboard"),
    *("transformers", "accelerate", "lightning", "hypothesis", "pytest"),
)
_SET = ("CUDA_", "NCCL_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "CUBLAS")


def cases(device: torch.device) -> list[Case]:
    """The cases, of which none takes long."""
    return [
        Case("device", _device, ("cuda",)),
        Case("driver", _driver, ("cuda",)),
        Case("memory", _memory, ("cuda",)),
        Case("versions", _versions),
        Case("processor", _processor),
        *(Case(f"import {one.module}", partial(_imports, one.module)) for one in PACKAGES),
        Case("optional parts", _optional),
        Case("environment", _environment),
        Case("simulated ranks", _simulates),
        Case("arithmetic", _arithmetic),
        Case("triton compiles", _triton_compiles, ("triton gpu",)),
    ]


def _device(device: torch.device) -> CaseResult:
    facts = torch.cuda.get_device_properties(device)
    count = torch.cuda.device_count()
    return figure(
        f"{count} x {facts.name}, compute capability {facts.major}.{facts.minor}, "
        f"{facts.multi_processor_count} multiprocessors of "
        f"{facts.max_threads_per_multi_processor} threads"
    )


def _driver(device: torch.device) -> CaseResult:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return figure("nvidia-smi is not there")
    asked = "--query-gpu=driver_version,pstate,clocks.sm,clocks.max.sm,power.limit,compute_mode"
    command = [tool, asked, "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return figure(done.stdout.strip().split("\n")[0] or done.stderr.strip())


def _memory(device: torch.device) -> CaseResult:
    free, total = torch.cuda.mem_get_info(device)
    backend = torch.cuda.get_allocator_backend()
    return figure(f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f}, allocator {backend}")


def _versions(device: torch.device) -> CaseResult:
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    parts.append(f"CUDA {torch.version.cuda}")
    if device.type == "cuda":
        parts.append(f"cuDNN {torch.backends.cudnn.version()}")  # type: ignore[no-untyped-call]
        if torch.distributed.is_nccl_available():
            numbers: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            parts.append(f"NCCL {'.'.join(map(str, numbers))}")
    return figure(
        ", ".join([*parts, f"numpy {_version('numpy') or 'is not there'}", platform.platform()])
    )


def _processor(device: torch.device) -> CaseResult:
    return figure(
        f"{platform.machine()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} "
        f"threads and {torch.backends.cpu.get_cpu_capability()}"
    )


def _imports(module: str, device: torch.device) -> CaseResult:
    found = import_module(module)
    return holds("it imports", True, f"{found.__version__}, {_short(found.__file__)}")


def _short(file: str | None) -> str:
    parts = (file or "").split(os.sep)
    return "/".join(parts[parts.index("packages") :]) if "packages" in parts else str(file)


def _optional(device: torch.device) -> CaseResult:
    there = {name: _version(name) for name in OPTIONAL if find_spec(name) is not None}
    tools = [one for one in ("g++", "nvcc", "ninja") if shutil.which(one)]
    text = ", ".join(f"{name} {number}".strip() for name, number in there.items())
    return figure(f"{text or 'none'}; compilers: {', '.join(tools) or 'none'}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _environment(device: torch.device) -> CaseResult:
    # Names and not values, of which some are nobody's business, but for those of our own.
    named = sorted(name for name in os.environ if name.startswith(_SET))
    return figure(", ".join(named) or "nothing that concerns CUDA, NCCL, torch or triton")


def _simulates(device: torch.device) -> CaseResult:
    from vescale_comm import all_reduce, simulate

    def body(rank: int, world_size: int) -> Tensor:
        return all_reduce(torch.full((3,), float(rank + 1), device=device))

    found = simulate(2)(body)
    expected = torch.full((3,), 3.0)
    return same_bits({f"rank {at}": (expected, one) for at, one in enumerate(found)})


def _arithmetic(device: torch.device) -> CaseResult:
    """A product and its gradient beside the same in float64."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator).to(device) for _ in range(2))
    found = (a @ b).to("cpu")
    exact = (a.to("cpu", torch.float64) @ b.to("cpu", torch.float64)).to(torch.float32)
    distance = float((found - exact).abs().max())
    tf32 = torch.get_float32_matmul_precision()
    return holds(
        "products of float32 within 1e-4 of float64's", distance < 1e-4,
        f"{distance:.1e}, float32 products are {tf32!r}",
    )  # fmt: skip


def _triton_compiles(device: torch.device) -> CaseResult:
    from tools.first_gpu.sections import _triton_probe

    x = torch.arange(1000.0, device=device)
    return same_bits({"x + 1": (x + 1, _triton_probe.plus_one(x))}, "a kernel's bits")
