"""Counts the collectives of a stretch of code, ours and torch's alike, and the bytes sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_c10d: Any = distributed_c10d  # its resolver of group names is private

WRAPPERS = (DTensor, AsyncCollectiveTensor)
"""torch's tensors around others: the ops that they lead to are seen one by one."""

# Bytes that one of k members sends, by the bytes of its input, as `vescale_comm.trace` counts.
_SENT: dict[str, Callable[[int, int], int]] = {
    "all_reduce": lambda size, k: 2 * size * (k - 1) // k,
    "all_gather": lambda size, k: size * (k - 1),
    "reduce_scatter": lambda size, k: size * (k - 1) // k,
    "all_to_all": lambda size, k: size * (k - 1) // k,
    "broadcast": lambda size, k: size * (k - 1),
    "send": lambda size, k: size,
}
# Beginnings of the names of torch's ops, without underscores.
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
}


class Wire(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, counts this rank's collectives: classic and functional, in backward too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the op if it is a collective; run it."""
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented  # else what the wrapper sends would not be seen
        name = _collective(func)
        if name is not None:
            names = [argument.name for argument in func._schema.arguments]
            self._count(name, dict(zip(names, args, strict=False)))
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, arguments: dict[str, Any]) -> None:
        group = _group(arguments)
        members = group.size()
        if members > 1:
            self.counts[name] += 1
            size = _input_bytes(arguments)
            parts = arguments.get("input_split_sizes")
            if parts:
                # What a member keeps may be more, or less, than what it sends to each other one.
                own = size * int(parts[group.rank()]) // max(1, sum(map(int, parts)))
                self.bytes += size - own
            else:
                self.bytes += _SENT[name](size, members)


def _collective(func: Any) -> str | None:
    namespace, _, op = func._schema.name.partition("::")
    if namespace not in ("c10d", "_c10d_functional"):
        return None
    plain = op.replace("_", "")
    return next((name for start, name in _NAMES.items() if plain.startswith(start)), None)


def _group(arguments: dict[str, Any]) -> dist.ProcessGroup:
    boxed = arguments.get("process_group")
    if boxed is not None:
        return dist.ProcessGroup.unbox(boxed)
    named: Any = arguments["group_name"]
    if isinstance(named, str):
        named = _c10d._resolve_process_group(named)
    found: dist.ProcessGroup = named
    return found


def _input_bytes(arguments: dict[str, Any]) -> int:
    inputs = next(v for name, v in arguments.items() if name.startswith(("input", "tensor")))
    return sum(t.numel() * t.element_size() for t in tree_leaves(inputs))
