"""Estimates the memory that a backend of collectives takes while it sends.

gloo gathers into memory of its own, as large as the result, and copies from there; and of a
reduce-scatter it sums up a copy of all that it is given. NCCL works on the tensors themselves.
Where a `Joint` gathers by an exchange it repeats what it sends: as many bytes. What is not counted
is the copy that it keeps of a sum of two members, 4 MiB at most, while that is on its way.
Counted by the allocator's events on torch 2.13 (tests/memory/test_collectives).
"""

from typing import Any, Final

from torch import Tensor, fx
from vescale_comm import CommError, as_group

from vescale_parallel._common.torch_compat import schema_of

_GATHERS: Final = "_c10d_functional::all_gather_into_tensor"
_SCATTERS: Final = "_c10d_functional::reduce_scatter_tensor"


def bytes_while_sent(node: fx.Node, given: Any, made: Any) -> int:
    """Bytes that live from the start of a collective until somebody has waited for it.

    Beside what it makes, and what it is given.

    Args:
        node: of a graph; most are no collective.
        given: the value of its first argument.
        made: its own value.
    """
    schema = getattr(node.target, "_schema", None)
    name = "" if schema is None else schema_of(node.target).name
    of = {_GATHERS: made, _SCATTERS: given}.get(name)
    if not isinstance(of, Tensor) or _backend(str(node.args[-1]), of.device.type) != "gloo":
        return 0
    return of.numel() * of.itemsize


def _backend(group: str, device: str) -> str:
    try:
        return as_group(group).backends.get(device, "")
    except CommError:  # a graph of another process: nobody knows what will carry it
        return ""
