"""Checks that ranks agree on the parts that they pass to `from_local`, and finds the global shape.

`local_map` asks the same of the results of its function, which are wrapped as by `from_local`.

No single rank knows the global shape of uneven shards, or that another one holds another dtype. So
they exchange a few numbers: one all-reduce of the minimum and the maximum of each. The result is
the same on every rank, so all branch alike: if minima and maxima are equal, every rank passed the
same and nothing more is sent. Otherwise a second exchange gathers what each rank holds, and gives
the global shape, or an error on every rank.

Whether anything is exchanged follows from what is the same on every rank (the mesh, the placements
as passed, how often), never from local data, so no rank waits alone. Like the comparison of plain
operands this is no part of the program: `vescale_comm.trace` does not count it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import Group, broadcast, explained_failures, group_of
from vescale_comm.agreement import by_ranks, digest, gather_texts, message_device

from vescale_dtensor._errors import DisagreementError, LayoutError
from vescale_dtensor._layout.derived_placements import as_placement
from vescale_dtensor._layout.execution_events import record, silent
from vescale_dtensor._layout.first_uses import FirstUses
from vescale_dtensor._layout.layout import normalized
from vescale_dtensor._layout.mesh import coordinates, describe
from vescale_dtensor._layout.notation import short_dtype
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import Shard
from vescale_dtensor._layout.shard_geometry import owned
from vescale_dtensor._layout.spec import order_of
from vescale_dtensor._torch.compat import is_traced, no_torch_function

Shape = tuple[int, ...]

# How many calls of a kind are compared where the local shape already is the global one.
_FIRST_USES = 2
# Calls of a kind: from one option, on one mesh, with these placements, with `shape=` or not.
_uses = FirstUses(_FIRST_USES, most_kinds=256)

# The first exchange has room for so many extents; those of further dims are part of the digest.
_TOLD = 12
# So many characters of what one rank passes stand in an error.
_QUOTED = 256


class Asked(NamedTuple):
    """What one rank passes to `from_local`, or gets from the function of a `local_map`.

    Attributes:
        local: its local tensor.
        placements: one per mesh axis.
        shape: global shape, if passed.
        stride: global strides, if passed.
        by: the function that was called, for errors.
        option: its argument that gives the global shape, likewise.
        rest: other arguments that have to be the same on every rank, in words.
        computed: whether a kernel made the local tensor, and chose its memory order by its size.
    """

    local: Tensor
    placements: tuple[object, ...]
    shape: Shape | None
    stride: Shape | None
    by: str = "from_local"
    option: str = "shape="
    rest: tuple[str, ...] = ()
    computed: bool = False

    @property
    def text(self) -> str:
        """Everything that has to be the same on every rank; local shapes may differ."""
        # It is compared, and quoted in the error: what may be long (ragged units) comes last, as
        # there is room for the beginning only.
        given = (("shape", self.shape), ("stride", self.stride))
        rest = [f"{k}={v}" for k, v in given if v is not None]
        grad = ["requires_grad"] if self.local.requires_grad else []
        dims = f"{short_dtype(self.local.dtype)} of {self.local.ndim} dims"
        return ", ".join([dims, *grad, *rest, *self.rest, f"as {list(self.placements)}"])

    @property
    def order(self) -> Shape:
        """The dims of more than one index, from the slowest in memory to the fastest.

        Empty if `stride=` was passed: that decides then, and is compared as part of `text`.
        """
        if self.stride is not None:
            return ()
        strides = self.local.stride()
        dims = [dim for dim, extent in enumerate(self.local.shape) if extent > 1]
        return tuple(sorted(dims, key=lambda dim: -strides[dim]))


class Agreed(NamedTuple):
    """What the ranks found out together; None for what each knows by itself.

    Attributes:
        shape: global shape.
        order: memory order of the local tensor that tells most of it: all dims from the slowest.
    """

    shape: Shape | None = None
    order: Shape | None = None


class Told(NamedTuple):
    """What one rank sent to all others: see `Asked`."""

    text: str
    order: Shape
    shape: Shape
    strides: Shape


def is_asked_for(mesh: DeviceMesh, asked: Asked, always: bool) -> bool:
    """Whether this call compares what ranks pass. The same answer on every rank.

    Args:
        mesh: the mesh.
        asked: what this rank passes.
        always: whether the user asked for it (`run_check=True`).
    """
    # First of all, and without counting: where some ranks call alone, those would count further
    # than the others, and later wait for them.
    if silent.get():
        return False
    # Of sharded placements without `shape=`, every call: there the exchange gives the shape.
    if not always and (asked.shape is not None or not _cuts(asked.placements)):
        kind = (asked.option, asked.shape is None, *asked.placements)
        if _uses.is_over(mesh, kind):
            return False
        _uses.add(mesh, kind)
    if torch.compiler.is_compiling() or is_traced():
        return False
    return mesh.size() > 1 and mesh.get_coordinate() is not None


def is_settled(mesh: DeviceMesh, asked: Asked) -> bool:
    """Whether no later call like this one is compared, unless the user asks for it.

    Calls that are skipped for it are not counted. That is the same on every rank, as the count is
    full by then, or nobody ever reads it.
    """
    if mesh.size() == 1 or "fake" in group_of(mesh, tuple(range(mesh.ndim))).backends.values():
        return True
    kind = (asked.option, True, *asked.placements)
    return not _cuts(asked.placements) and _uses.is_over(mesh, kind)


def can_exchange(mesh: DeviceMesh, local: Tensor) -> bool:
    """Whether numbers can be exchanged and read now. The same answer on every rank."""
    # A fake group exchanges nothing.
    if "fake" in group_of(mesh, tuple(range(mesh.ndim))).backends.values():
        return False
    # The result is read on the host, which a CUDA graph cannot record.
    return not (local.is_cuda and torch.cuda.is_current_stream_capturing())


@lru_cache(maxsize=1024)
def _cuts(placements: tuple[object, ...]) -> bool:
    """Whether some placement is sharded, so that the global shape differs from the local one."""
    return any(isinstance(as_placement(p), Sharded) for p in placements)


def agreed(mesh: DeviceMesh, asked: Asked) -> Agreed:
    """Compare what the ranks pass, and find the global shape and memory order. Collective.

    Returns:
        No shape if all passed the same and the shards are even, so that each rank can compute it;
        nothing where nothing can be exchanged (see `can_exchange`).

    Raises:
        DisagreementError: ranks pass different dtypes, numbers of dims, placements, global shapes
            or strides, `requires_grad` or memory orders. On every rank.
        LayoutError: their local shapes are not those of any tensor in that layout. On every rank.
    """
    group = group_of(mesh, tuple(range(mesh.ndim)))
    if not can_exchange(mesh, asked.local):
        return Agreed()
    # A call that one rank makes alone would pair with whatever the others send.
    record(mesh, f"compares what ranks pass to {asked.by}")
    with torch.no_grad(), no_torch_function():
        if _all_same(asked, group) and _is_even(asked):
            return Agreed(order=_whole_order(tuple(asked.local.shape), asked.local.stride()))
        told = _told(asked, group)
    texts, shapes = [one.text for one in told], [one.shape for one in told]
    if _orders_differ(told, asked.computed):
        texts = [f"{one.text}, memory order {list(one.order)}" for one in told]
    if len(set(texts)) > 1:
        words = by_ranks(map(_quoted, texts), group.ranks)
        raise DisagreementError(
            f"{asked.by} on {describe(mesh)}: the ranks disagree ({words}). All need the same "
            f"dtype, dims, placements, {asked.option}, requires_grad, memory order and options."
        )
    # Of a dim of which it holds one index, a rank cannot tell the place, and of nothing no order.
    most = max(told, key=lambda one: (len(one.order), prod(one.shape)))
    order = _whole_order(most.shape, most.strides)
    return Agreed(_joined(mesh, asked, shapes, group), order)


def _whole_order(shape: Shape, strides: Sequence[int]) -> Shape:
    # By the shape that the strides are of: in another one, a dim of one index may have more.
    return order_of(shape, strides) or tuple(range(len(shape)))


def _orders_differ(told: list[Told], computed: bool) -> bool:
    """Whether ranks order dims otherwise of which each of them has several indices."""
    if len({one.shape for one in told}) == 1:
        return len({one.order for one in told}) > 1
    if computed:
        return False
    holding = [one for one in told if 0 not in one.shape]
    common = set.intersection(*(set(one.order) for one in holding)) if holding else set()
    return len({tuple(d for d in one.order if d in common) for one in holding}) > 1


def _is_even(asked: Asked) -> bool:
    """Whether equal local shapes are right by themselves, and determine the global shape.

    Equal interleaved or ragged shards may still be wrong, and a global shape that was passed has to
    be checked against the local ones.
    """
    ours = [as_placement(p) for p in asked.placements]
    return asked.shape is None and not any(
        isinstance(p, Sharded) and type(p) is not Shard for p in ours
    )


def _all_same(asked: Asked, group: Group) -> bool:
    """Whether all ranks pass the same and hold local tensors of one shape. Collective."""
    shape = tuple(asked.local.shape)
    # Padded with -1, which is no extent, to one length on every rank, whatever its number of dims.
    extents = (*shape, *[-1] * _TOLD)[:_TOLD]
    # Of a dim of one index the stride says where it lies, if all ranks say the same.
    whole = order_of(shape, asked.local.stride()) if 1 in shape else None
    rest = digest(f"{asked.text} {asked.order} {whole} {shape[_TOLD:]}")
    own = torch.tensor([rest, *extents], dtype=torch.int64, device="cpu")
    # The minimum is the negative of the maximum of the negatives: one collective for both.
    both = torch.cat([own, -own]).to(message_device(group))
    with explained_failures("all_reduce", both, group):
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group.process_group)
    greatest, least = both.cpu().chunk(2)
    return torch.equal(greatest, -least)


def _told(asked: Asked, group: Group) -> list[Told]:
    """Gather what every rank passes, in the order of the group. Collective.

    Texts are equal where the ranks passed the same, and only there.
    """
    local = asked.local
    mine = Told(asked.text, asked.order, tuple(local.shape), tuple(local.stride()))
    rows = [json.loads(row) for row in gather_texts(json.dumps(mine), group)]
    return [Told(text, *map(tuple, numbers)) for text, *numbers in rows]


def _quoted(text: str) -> str:
    """As much of a text as an error has room for."""
    # With the digest, as texts that differ behind their beginning would look equal.
    if len(text) <= _QUOTED:
        return text
    return f"{text[:_QUOTED]}… ({len(text.encode())} bytes, digest {digest(text):x})"


def _joined(mesh: DeviceMesh, asked: Asked, shapes: list[Shape], group: Group) -> Shape:
    """The global shape that gives each rank the local shape it has.

    Raises:
        LayoutError: no global shape does. Every rank finds the same, from what was gathered.
    """
    sizes = tuple(mesh.shape)
    shape = asked.shape
    placements = normalized(asked.placements, len(shape if shape is not None else shapes[0]))
    if shape is None:
        shape = tuple(_extent(dim, placements, sizes, shapes) for dim in range(len(shapes[0])))
    expected = [
        tuple(part.extent for part in owned(placements, sizes, shape, coordinate))
        for coordinate in coordinates(sizes)
    ]
    if expected != shapes:
        words = by_ranks([str(list(s)) for s in shapes], group.ranks)
        wanted = by_ranks([str(list(s)) for s in expected], group.ranks)
        raise LayoutError(
            f"{asked.by}: {list(placements)} on {describe(mesh)} of global shape {list(shape)} "
            f"gives {wanted}; found {words}. {_way_out(asked, placements, shapes)}"
        )
    return shape


def _way_out(asked: Asked, placements: tuple[Placement, ...], shapes: list[Shape]) -> str:
    """The part of an error that says what to do."""
    if asked.shape is not None:
        return f"Pass the true global shape as {asked.option}, the same on every rank."
    if not any(isinstance(p, Sharded) for p in placements):
        return "What is not sharded has one shape everywhere; Shard(dim) is for parts of one dim."
    if len(placements) == 1 and isinstance(placements[0], Shard):
        dim = placements[0].dim
        if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
            return f"Only dim {dim} is sharded: all others have one extent everywhere."
        units = tuple(shape[dim] for shape in shapes)
        return f"Shards of such sizes are RaggedShard(({dim},), {units})."
    return "Shard() gives ceil(n/k) to each, and less to the last; RaggedShard takes any sizes."


def _extent(dim: int, placements: tuple[Placement, ...], sizes: Shape, shapes: list[Shape]) -> int:
    """The global extent of a dim: the sum of the local extents over the axes that shard it."""
    # One line of ranks through the mesh: coordinate 0 of all other axes, which hold copies of it.
    cutting = {
        axis for axis, p in enumerate(placements) if isinstance(p, Sharded) and dim in p.cut_dims()
    }
    along = [
        shape[dim]
        for coordinate, shape in zip(coordinates(sizes), shapes, strict=True)
        if not any(index for axis, index in enumerate(coordinate) if axis not in cutting)
    ]
    return sum(along)


def take_over_replicated(local: Tensor, mesh: DeviceMesh, placements: Sequence[object]) -> None:
    """Broadcast the data of coordinate 0, over all replicated axes at once. Collective.

    Args:
        local: this rank's local tensor; it is written to.
        mesh: the mesh.
        placements: one per mesh axis.
    """
    axes = [a for a, p in enumerate(placements) if as_placement(p).is_replicate()]
    if not axes:
        return
    group = group_of(mesh, tuple(axes))
    if group.size > 1 and "fake" not in group.backends.values():
        with torch.no_grad():
            local.copy_(broadcast(local.detach(), group, source=0))
