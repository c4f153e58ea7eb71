"""Copies between a device and memory of its host, as operators that a graph can have as nodes.

    token = host_write(x, memory, offset)                     # starts to copy out
    y = host_read(token, memory, offset, size, stride, dtype) # starts to copy in
    z = host_ready(y)                                         # y itself, once it is there

`memory` is a constant of the graph, bytes on the host, so plans of the device's memory do not count
it; the token is empty, and says only that the reading follows the writing. On CUDA copies run on a
stream of their own; where the device is the host they are copies all the same.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, fx

NAMESPACE: Final = "vescale_parallel"
_KEY: Final = "CompositeExplicitAutograd"


@cache
def operators() -> Any:
    """`host_write`, `host_read` and `host_ready`, registered at the first call."""
    make: Any = torch.library.Library
    library = make(NAMESPACE, "DEF")
    # `(a!)`: it writes there. Passes that keep writers and readers of memory in their order see it
    # by that.
    library.define("host_write(Tensor x, Tensor(a!) memory, int offset) -> Tensor")
    library.define(
        "host_read(Tensor token, Tensor memory, int offset, int[] size, int[] stride, "
        "ScalarType dtype) -> Tensor"
    )
    library.define("host_ready(Tensor(a) x) -> Tensor(a)")
    for name, call in (("host_write", _write), ("host_read", _read), ("host_ready", _ready)):
        library.impl(name, call, _KEY)
    torch.library.register_fake(f"{NAMESPACE}::host_write", _fake_write, lib=library)
    torch.library.register_fake(f"{NAMESPACE}::host_read", _fake_read, lib=library)
    found = getattr(torch.ops, NAMESPACE)
    names = ("host_write", "host_read", "host_ready")
    calls = {name: getattr(found, name).default for name in names}
    return SimpleNamespace(**calls, library=library)


def host_memory(count: int, device: torch.device) -> Tensor:
    """Bytes on the host, pinned where the device is CUDA."""
    # From pageable memory CUDA copies by way of a buffer of its own, and the program would wait.
    return torch.empty(count, dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu")


def _place(memory: Tensor, offset: int, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    """What lies in the memory, as a tensor of this kind."""
    # Up to the last element that the strides reach: not the number of elements, where they have
    # gaps.
    count = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    flat = memory[offset : offset + count * dtype.itemsize].view(dtype)
    return flat.as_strided(size, stride)


@cache
def _stream(device: torch.device) -> Any:
    make: Any = torch.cuda.Stream
    return make(device)


def _write(x: Tensor, memory: Tensor, offset: int) -> Tensor:
    target = _place(memory, offset, x.shape, x.stride(), x.dtype)
    if x.device.type != "cuda":
        target.copy_(x)
    else:
        stream = _stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            target.copy_(x, non_blocking=True)
        # The caller may give it back before it is copied.
        x.record_stream(stream)
    return x.new_empty(0)


def _read(
    token: Tensor, memory: Tensor, offset: int, size: Any, stride: Any, dtype: torch.dtype
) -> Tensor:
    found = torch.empty_strided(size, stride, dtype=dtype, device=token.device)
    source = _place(memory, offset, size, stride, dtype)
    if found.device.type != "cuda":
        return found.copy_(source)
    stream = _stream(found.device)
    # Behind what was written there, which the same stream has copied.
    stream.wait_stream(torch.cuda.current_stream(found.device))
    with torch.cuda.stream(stream):
        found.copy_(source, non_blocking=True)
    # The memory was allocated on the stream that computes: freed there, it must not be given to
    # others while this copy writes to it.
    found.record_stream(stream)
    return found


def _ready(x: Tensor) -> Tensor:
    if x.device.type == "cuda":
        torch.cuda.current_stream(x.device).wait_stream(_stream(x.device))
    return x


def _fake_write(x: Tensor, memory: Tensor, offset: int) -> Tensor:
    return x.new_empty(0)


def _fake_read(
    token: Tensor, memory: Tensor, offset: int, size: Any, stride: Any, dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=token.device)


def copy_kind(node: fx.Node) -> str:
    """`to_host`, `to_device` or `ready`; empty for any other node."""
    schema: Any = getattr(node.target, "_schema", None)
    name = "" if schema is None else str(schema.name)
    kinds = {"host_write": "to_host", "host_read": "to_device", "host_ready": "ready"}
    space, _, call = name.partition("::")
    return kinds.get(call, "") if space == NAMESPACE else ""
