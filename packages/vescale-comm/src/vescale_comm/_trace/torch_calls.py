"""Collectives that torch.distributed issues itself, as its dispatcher sees them: their records."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_comm._groups.group import ranks_of
from vescale_comm._torch.call_site import call_site
from vescale_comm._torch.compat import being_traced, unboxed_process_group
from vescale_comm._torch.own_calls import Calls, counted_in, is_own_call
from vescale_comm._torch.ranks import compact
from vescale_comm._trace.record import Record

# What torch's operators are called, in the namespaces `c10d` and `_c10d_functional`, by what is
# recorded. One that is not here is counted as unrecorded.
_OPERATORS = {
    "all_reduce": "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced "
    "all_reduce_coalesced_",
    "all_gather": "allgather_ _allgather_base_ allgather_coalesced_ "
    "allgather_into_tensor_coalesced_ all_gather_into_tensor all_gather_into_tensor_coalesced "
    "all_gather_into_tensor_out",
    "reduce_scatter": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_ "
    "reduce_scatter_tensor reduce_scatter_tensor_coalesced reduce_scatter_tensor_out",
    "all_to_all": "alltoall_ alltoall_base_ all_to_all_single",
    "broadcast": "broadcast_ broadcast",
    "reduce": "reduce_",
    "gather": "gather_",
    "scatter": "scatter_",
    "send": "send isend",
    "recv": "recv_ recv_any_source_ irecv",
    "barrier": "barrier monitored_barrier_",
}
_RECORDED_AS = {name: op for op, names in _OPERATORS.items() for name in names.split()}

_INPUTS = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors", "tensor")
_GROUPS = ("process_group", "group_name")
_ROOTS = ("root_rank", "src")


class TorchCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records torch's collectives of this thread, and of the backwards that it starts.

    Autograd hands modes to the threads in which it runs backwards of a device. What this package
    launches passes by: its own records say more.

    Args:
        record: called with each, before it is launched.
        known: where the calls are counted that have a record.
    """

    def __init__(self, record: Callable[[Record], None], known: Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._add, self._known = record, known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record a collective, and run any operator."""
        kwargs = kwargs or {}
        found = None
        if func.namespace in ("c10d", "_c10d_functional") and not is_own_call():
            found = _recorded(func, args, kwargs)
        if found is None:
            return func(*args, **kwargs)
        record, process_group = found
        self._add(record)
        with counted_in([self._known], process_group):
            result = func(*args, **kwargs)
        record.end = time.time_ns()
        return result


def _recorded(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Record, ProcessGroup] | None:
    """Return the record of a call, and its group; None of what is none, or sends to nobody."""
    op = _RECORDED_AS.get(func.__name__.partition(".")[0])
    if op is None:
        return None
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    process_group = unboxed_process_group(_first(given, _GROUPS))
    if process_group is None:
        return None
    ranks = ranks_of(process_group)
    value = None if op == "barrier" else _first(given, _INPUTS)
    tensors = list(_flat(value))
    if len(ranks) == 1 or any(map(being_traced, tensors)):
        return None
    # Several travel as one.
    shape = tensors[0].shape if len(tensors) == 1 else (sum(one.numel() for one in tensors),)
    record = Record(
        op,
        f"ranks {compact(ranks)}",
        (),
        ranks,
        _sent(op, value, given, len(ranks), process_group.rank()),
        tuple(shape) if tensors else (),
        tensors[0].dtype if tensors else None,
        start=time.time_ns(),
        site=call_site(),
        device=tensors[0].device.type if tensors else "cpu",
        of_torch=True,
    )
    return record, process_group


def _sent(op: str, value: Any, given: dict[str, Any], members: int, me: int) -> int:
    """Return the bytes that this member sends: see `trace`."""
    size, is_root = _bytes(value), _first(given, _ROOTS) == me
    match op:
        case "all_reduce":
            return 2 * size * (members - 1) // members
        case "all_gather":
            return (members - 1) * size
        case "reduce_scatter" | "all_to_all":
            return size - _staying(value, given, members, me)
        case "scatter":
            return size - _staying(value, given, members, me) if is_root else 0
        case "broadcast":
            return (members - 1) * size if is_root else 0
        case "reduce" | "gather":
            return 0 if is_root else size
    return size if op == "send" else 0


def _staying(value: Any, given: dict[str, Any], members: int, me: int) -> int:
    """Return the bytes of what a member keeps of its input: its piece, or its part."""
    sizes: Sequence[int] | None = given.get("input_split_sizes")
    if sizes:
        return _bytes(value) * sizes[me] // max(sum(sizes), 1)
    if "input_tensors" in given:
        # Of a list of lists there is one for each tensor that is scattered.
        lists: Sequence[Any] = value if value and not isinstance(value[0], Tensor) else [value]
        return sum(_bytes(pieces[me]) for pieces in lists)
    return _bytes(value) // members


def _bytes(value: Any) -> int:
    return sum(one.numel() * one.element_size() for one in _flat(value))


def _flat(value: Any) -> Iterator[Tensor]:
    """All tensors of a tensor or of lists of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Sequence):
        for one in value:
            yield from _flat(one)


def _first(given: dict[str, Any], names: Sequence[str]) -> Any:
    return next((given[name] for name in names if name in given), None)
