"""Finds storages that an arena can hold: their operators can write where they are asked to.

An operator qualifies by an overload with the same arguments and `out=` (or the same less dtype,
layout, device and pin_memory) that is not generated from the functional form: those compute as
ever and then copy, which saves no memory. Copies and fills are written straight into place.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from vescale_parallel._common.torch_compat import schema_of
from vescale_parallel._memory.tracing import Result, TracedGraph

# With `out=` but no better for it: measured by what they allocate inside.
_COPIES_INSIDE: Final = ("aten::convolution", "aten::native_layer_norm", "aten::embedding")
_FACTORY: Final = ("dtype", "layout", "device", "pin_memory", "memory_format")
_FILLS: Final = {
    "aten::zeros_like": 0,
    "aten::ones_like": 1,
    "aten::zeros": 0,
    "aten::ones": 1,
    "aten::new_zeros": 0,
    "aten::new_ones": 1,
}
_VALUES: Final = {
    "aten::full_like": "fill_value",
    "aten::full": "fill_value",
    "aten::new_full": "fill_value",
    "aten::scalar_tensor": "s",
}
_IN_PLACE: Final = {  # the same kernel in place, on a copy that lies where the result belongs
    "aten::relu": torch.Tensor.relu_,
    "aten::masked_fill": torch.Tensor.masked_fill_,
    "aten::add": torch.Tensor.add_,
    "aten::sub": torch.Tensor.sub_,
    "aten::mul": torch.Tensor.mul_,
    "aten::div": torch.Tensor.div_,
}
_COPIES: Final = ("aten::clone", "aten::_to_copy")
_NOTHING: Final = ("aten::empty_like", "aten::empty", "aten::empty_strided", "aten::new_empty")
_MOVES: Final = ("resize", "set_")  # what changes the storage of a tensor

Write = Callable[[tuple[Any, ...], dict[str, Any], tuple[Tensor, ...]], Any]


@dataclass(frozen=True)
class Place:
    """How a node writes into memory that it is given.

    Attributes:
        write: called with the node's arguments and the memory, shaped as its results.
        single: whether the node's value is one tensor, and not a tuple.
    """

    write: Write
    single: bool


def places(of: TracedGraph) -> dict[int, Place]:
    """For each operation that can write into an arena, how; all its storages go there."""
    found = {}
    barred = _barred(of)
    makes: dict[int, list[int]] = {}
    for at, storage in enumerate(of.program.storages):
        makes.setdefault(storage.maker, []).append(at)
    device = _device(of)
    for maker, storages in makes.items():
        # An operator writes all of its results into the arena or none: `out=` takes all of them.
        if any(at in barred or of.program.storages[at].device != device for at in storages):
            continue
        place = _place(of.nodes[maker], of.results[of.nodes[maker]], storages)
        if place is not None:
            found[maker] = place
    return found


def arena_device(of: TracedGraph) -> torch.device:
    """The device that most bytes are made on."""
    return torch.device(_device(of))


def _device(of: TracedGraph) -> str:
    sizes: dict[str, int] = {}
    for one in of.program.storages:
        sizes[one.device] = sizes.get(one.device, 0) + one.bytes
    return max(sizes, key=sizes.__getitem__, default="cpu")


def _barred(of: TracedGraph) -> set[int]:
    """Storages that outlive the graph, or that something may touch that wants its own."""
    barred = {at for at, one in enumerate(of.program.storages) if one.kept}
    for at, node in enumerate(of.nodes):
        target = node.target
        known = isinstance(target, torch._ops.OpOverload) or target is operator.getitem
        if not known or any(part in str(target) for part in _MOVES):
            barred.update(of.program.touched[at])
    return barred


def _place(node: fx.Node, results: tuple[Result, ...], storages: list[int]) -> Place | None:
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or len(schema_of(op).returns) != len(results):
        return None
    # Each result in a storage of its own, and no storage that nobody gets.
    if [one.storage for one in results] != storages or not all(map(_whole, results)):
        return None
    name = schema_of(op).name
    # Fills and copies, and kernels in place, make one tensor.
    single = len(results) == 1
    write = _filled(op, name) if single else None
    write = write or _with_out(op) or (_in_place(op, name) if single else None)
    return None if write is None else Place(write, single)


def _whole(result: Result) -> bool:
    """Whether a tensor fills its storage from the start, no element twice."""
    if result.offset or result.dtype.is_complex:
        return False
    needed = 1
    for stride, size in sorted(zip(result.stride, result.shape, strict=True)):
        if size > 1 and stride != needed:
            return False
        needed *= size
    return True


def _filled(op: Any, name: str) -> Write | None:
    if name in _COPIES:
        return lambda args, kwargs, outs: outs[0].copy_(args[0])
    if name in _NOTHING:
        return lambda args, kwargs, outs: outs[0]
    if name in _FILLS:
        value = _FILLS[name]
        return lambda args, kwargs, outs: outs[0].fill_(value)
    if name in _VALUES:
        position = [one.name for one in schema_of(op).arguments].index(_VALUES[name])
        wanted = _VALUES[name]

        def fill(args: Any, kwargs: Any, outs: Any) -> Any:
            return outs[0].fill_(args[position] if position < len(args) else kwargs[wanted])

        return fill
    return None


def _in_place(op: Any, name: str) -> Write | None:
    call: Any = _IN_PLACE.get(name)
    if call is None:
        return None

    def write(args: Any, kwargs: Any, outs: Any) -> Any:
        if args[0].dtype != outs[0].dtype:  # it would be rounded before, and not after
            return outs[0].copy_(op(*args, **kwargs))
        return call(outs[0].copy_(args[0]), *args[1:], **kwargs)

    return write


def _with_out(op: Any) -> Write | None:
    if schema_of(op).name in _COPIES_INSIDE or schema_of(op).is_mutable:
        return None
    mine = [(one.name, str(one.type)) for one in schema_of(op).arguments]
    less = [one for one in mine if one[0] not in _FACTORY]
    for name in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, name)
        outs = [one.name for one in schema_of(other).arguments if one.is_out]
        theirs = [(one.name, str(one.type)) for one in schema_of(other).arguments if not one.is_out]
        if len(outs) != len(schema_of(op).returns) or torch.Tag.generated in other.tags:
            continue
        # An overload that takes anything else could compute something else.
        if theirs in (mine, less):
            return _Out(other, tuple(outs), frozenset(one for one, _ in theirs))
    return None


@dataclass(frozen=True)
class _Out:
    """Calls an overload with `out=`."""

    op: Any
    outs: tuple[str, ...]
    known: frozenset[str]

    def __call__(self, args: Any, kwargs: Any, outs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if name in self.known}
        return self.op(*args, **given, **dict(zip(self.outs, outs, strict=True)))
