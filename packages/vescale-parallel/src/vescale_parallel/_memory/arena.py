"""A plan executed: operations in their order, storages at their offsets in one block of memory.

What cannot lie in the arena (results of the graph, and of operators that cannot be told where to
write) is allocated as ever, and is freed after its last user. The first run is checked node by
node against what was planned: shapes, strides and which tensors share a storage.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves
from vescale_comm.nested import tensors_within

from vescale_parallel._errors import MemoryPlanError
from vescale_parallel._memory.places import Place
from vescale_parallel._memory.tracing import Result, TracedGraph, placeholders


@dataclass(frozen=True)
class _Step:
    """One operation: how it runs, where it writes, and which values nobody needs after it."""

    node: fx.Node
    target: Any  # what the node called, and with what, when it was planned
    given: tuple[Any, Any]
    place: Place | None
    outs: tuple[tuple[Result, int], ...]  # what it writes, and at which offset
    drops: tuple[fx.Node, ...]
    waits: bool  # for copies to the host that may still read where it writes


class Arena:
    """Runs a graph in an order, with the storages of some operations in one block of memory."""

    def __init__(
        self,
        of: TracedGraph,
        order: Sequence[int],
        places: Mapping[int, Place],
        offsets: Mapping[int, int],
        size: int,
        alignment: int,
        device: torch.device,
    ) -> None:
        self.of, self.size, self.device = of, size, device
        self.alignment = alignment
        self.checked = False
        # By this order and not by that of the graph: the last user is another one then.
        last: dict[fx.Node, int] = {}
        for step, at in enumerate(order):
            last.update(dict.fromkeys([of.nodes[at], *of.nodes[at].all_input_nodes], step))
        graph = of.module.graph
        # Fetched anew at each run: a module's tensors may be replaced at any time.
        self._constants = [node for node in graph.nodes if node.op == "get_attr"]
        self._planned = dict(zip(placeholders(of.module), of.inputs, strict=True))
        for node in self._constants:
            if isinstance(constant(of.module, str(node.target)), Tensor):
                (self._planned[node],) = of.results[node]
        for node in graph.output_node().all_input_nodes:
            # What is returned is dropped by nobody.
            last.pop(node, None)
        drops: dict[int, list[fx.Node]] = {}
        for node, step in last.items():
            # Constants belong to the module.
            if node.op != "get_attr":
                drops.setdefault(step, []).append(node)
        self.steps = []
        waiting = _waiting(of, order, offsets)
        for step, at in enumerate(order):
            node, place = of.nodes[at], places.get(at)
            outs = [
                (one, offsets[one.storage])
                for one in (of.results[node] if place else ())
                if one.storage is not None
            ]
            call = node.target, (node.args, node.kwargs)
            dropped = tuple(drops.get(step, ()))
            self.steps.append(_Step(node, *call, place, tuple(outs), dropped, step in waiting))

    def block(self) -> Tensor:
        """Memory of the arena's size, uninitialised."""
        # Allocators give addresses of their own alignment, and plans may ask for more.
        block = torch.empty(self.size + self.alignment, dtype=torch.uint8, device=self.device)
        first = -block.data_ptr() % self.alignment
        return block[first : first + self.size]

    def run(self, inputs: Sequence[Any], block: Tensor | None) -> Any:
        """Run the graph; returns what it returns, outside of the arena.

        Raises:
            MemoryPlanError: inputs or arena do not fit, or the run is not what was planned.
        """
        own = self.block() if block is None else self._fitting(block)
        values = self._inputs(inputs)
        for node in self._constants:
            values[node] = constant(self.of.module, str(node.target))
        self._require_planned(values)
        # A block of our own is new memory, in which nothing can lie.
        if block is not None:
            _apart(block, values)
        # Once: operators choose strides by shapes and devices, which every later run has as well,
        # as inputs and constants are compared each time.
        check = None if self.checked else _Check(self.of, values)
        with torch.no_grad(), _without_autocast(self.device.type):
            for step in self.steps:
                if step.waits:
                    torch.ops.vescale_parallel.host_ready.default(own)
                values[step.node] = self._value(step, values, own)
                if check is not None:
                    check.ran(step.node, values[step.node])
                for node in step.drops:
                    # What is not in the arena is freed here; what is, by being written over.
                    values.pop(node, None)
            result = self.of.module.graph.output_node()
            found = fx.node.map_arg(result.args[0], values.__getitem__)
        self.checked = True
        return found

    def _value(self, step: _Step, values: dict[fx.Node, Any], block: Tensor) -> Any:
        node = step.node
        args, kwargs = fx.node.map_arg(step.given, values.__getitem__)
        if step.place is not None:
            outs = tuple(_view(block, one, at) for one, at in step.outs)
            # By `out=`: the operator must not allocate at all, or the peak would be that of the
            # allocator.
            step.place.write(args, kwargs, outs)
            return outs[0] if step.place.single else outs
        if node.op == "call_function":
            return step.target(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(step.target))(*args[1:], **kwargs)
        return self.of.module.get_submodule(str(step.target))(*args, **kwargs)

    def _fitting(self, block: Tensor) -> Tensor:
        if not isinstance(block, Tensor):
            raise MemoryPlanError(f"an arena is a uint8 tensor, not a {type(block).__name__}.")
        flat = block.dtype == torch.uint8 and block.dim() == 1 and block.is_contiguous()
        if not flat or block.device.type != self.device.type:
            raise MemoryPlanError(
                f"an arena is a contiguous 1-d uint8 tensor on {self.device}, not {block.dtype} of "
                f"shape {tuple(block.shape)} on {block.device}."
            )
        if block.numel() < self.size:
            raise MemoryPlanError(
                f"the arena has {block.numel()} bytes, but this plan needs {self.size}."
            )
        # Offsets are multiples of it, and so are addresses only where the block begins at one.
        if block.data_ptr() % self.alignment and self.size:
            raise MemoryPlanError(
                f"the arena has to begin at an address that {self.alignment} divides."
            )
        return block

    def _inputs(self, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
        nodes = placeholders(self.of.module)
        flat = list(inputs)
        if len(flat) != len(nodes):
            flat = tree_leaves(flat)
        if len(flat) != len(nodes):
            raise MemoryPlanError(f"{len(flat)} inputs were given to a graph of {len(nodes)}.")
        return dict(zip(nodes, flat, strict=True))

    def _require_planned(self, values: Mapping[fx.Node, Any]) -> None:
        """Refuse other inputs and constants than those of the plan, and other ties of them."""
        storages: dict[int, int] = {}
        for node, planned in self._planned.items():
            value = values[node]
            # A learning rate may change: whoever made the graph says that it decides no shape.
            free = "number" in node.meta and isinstance(value, float)
            fault = "" if free else _fault(value, planned)
            if fault:
                raise MemoryPlanError(f"{_called(node)} {fault}; plan again for such tensors.")
            if self.of.writes and isinstance(value, Tensor):
                where = value.untyped_storage().data_ptr()
                if where and storages.setdefault(where, planned.key) != planned.key:
                    raise MemoryPlanError(
                        f"{_called(node)} shares memory with another one, which it did not when "
                        "the graph, which writes to what it is given, was planned."
                    )


def _called(node: fx.Node) -> str:
    return f"{'constant' if node.op == 'get_attr' else 'input'} '{node.name}'"


def _waiting(of: TracedGraph, order: Sequence[int], offsets: Mapping[int, int]) -> set[int]:
    """Steps that write where a copy to the host may still read.

    Such a copy is on a stream of its own. The allocator would keep the memory until it is done; in
    an arena it is free behind the last node that uses it, which is the one that starts the copy.
    """
    made: dict[int, list[tuple[int, int]]] = {}
    for at, offset in offsets.items():
        storage = of.program.storages[at]
        made.setdefault(storage.maker, []).append((offset, offset + storage.bytes))
    found, read = set(), list[tuple[int, int]]()
    for step, at in enumerate(order):
        node = of.nodes[at]
        if any(low < end and start < high for low, high in made.get(at, ()) for start, end in read):
            found.add(step)
            read.clear()  # it waits for all that were started
        name = str(node.target)
        if name == "vescale_parallel.host_ready.default":
            read.clear()
        elif name == "vescale_parallel.host_write.default":
            (copied,) = of.results[node.all_input_nodes[0]]
            one = copied.storage
            if one is not None and one in offsets:
                read.append((offsets[one], offsets[one] + of.program.storages[one].bytes))
    return found


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Casts are in the graph: an operator with an `out` would make no others."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _apart(block: Tensor, values: Mapping[fx.Node, Any]) -> None:
    """Refuse an arena in which an input or a constant lies: it would be written over.

    Raises:
        MemoryPlanError: one does.
    """
    first = block.data_ptr()
    for node, value in values.items():
        if not isinstance(value, Tensor) or not value.numel():
            continue
        sizes = zip(value.shape, value.stride(), strict=True)
        end = value.data_ptr() + value.itemsize * (1 + sum((n - 1) * step for n, step in sizes))
        if value.data_ptr() < first + block.numel() and first < end:
            raise MemoryPlanError(f"{_called(node)} lies in the arena that was given.")


def constant(module: Any, target: str) -> Any:
    """The value of a get_attr node."""
    for part in target.split("."):
        module = getattr(module, part)
    return module


def _view(block: Tensor, result: Result, offset: int) -> Tensor:
    size = result.dtype.itemsize
    for one in result.shape:
        size *= one
    # As bytes first, since storages of all dtypes lie in one block.
    flat = block[offset : offset + size].view(result.dtype)
    # An offset of as_strided counts from the start of the storage, which is the whole arena.
    return flat.as_strided(result.shape, result.stride, flat.storage_offset())


def _fault(value: Any, planned: Any) -> str:
    """What is wrong with a value, in words; nothing if it is what was planned."""
    if not isinstance(planned, Result):
        same = type(value) is type(planned) and value == planned
        return "" if same else f"is {value!r}, but was planned as {planned!r}"
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, but was planned as a tensor"
    # By type of device: a plan for one GPU serves all of its kind.
    found = (tuple(value.shape), value.stride(), value.dtype, value.device.type)
    wanted = (planned.shape, planned.stride, planned.dtype, planned.device.type)
    if _canonical(found) == _canonical(wanted):
        return ""
    return f"has (shape, strides, dtype, device) {found}, but was planned with {wanted}"


def _canonical(one: tuple[Any, ...]) -> tuple[Any, ...]:
    """Strides of dims of one element, and of nothing at all, say nothing."""
    shape, stride, *rest = one
    if 0 in shape:
        return (shape, (), *rest)
    return (shape, tuple(s for s, n in zip(stride, shape, strict=True) if n > 1), *rest)


class _Check:
    """Compares a run with its plan: shapes, and which tensors share memory."""

    def __init__(self, of: TracedGraph, values: Mapping[fx.Node, Any]) -> None:
        self.of = of
        self.where: dict[int, int] = {}  # the address of each planned storage
        for node, value in values.items():
            self.ran(node, value)

    def ran(self, node: fx.Node, value: Any) -> None:
        """Compare the value of a node."""
        tensors = tensors_within(value)
        planned = self.of.results[node]
        if len(tensors) != len(planned):
            raise MemoryPlanError(
                f"node '{node.name}' made {len(tensors)} tensors, but {len(planned)} were planned."
            )
        for tensor, one in zip(tensors, planned, strict=True):
            fault = _fault(tensor, one)
            if fault:
                raise MemoryPlanError(f"node '{node.name}' {fault}: its plan is of no use.")
            if not tensor.numel():
                continue
            # Inside the arena all share a storage: the address without the tensor's own offset.
            address = tensor.data_ptr() - one.offset * one.dtype.itemsize
            if self.where.setdefault(one.key, address) != address:
                raise MemoryPlanError(
                    f"node '{node.name}' returns a tensor in another storage than was planned."
                )
