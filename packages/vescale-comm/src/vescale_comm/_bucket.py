"""Buckets: many tensors in few flat buffers, so that they travel in few collectives."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from vescale_comm._errors import CommArgumentError
from vescale_comm._group import GroupLike, as_group
from vescale_comm._reduce import all_reduce
from vescale_comm._views import joined, views

Shape = tuple[int, ...]

CAP_BYTES = 25 * 2**20
"""Default cap of a buffer: large enough that latency no longer matters."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One flat buffer of a `Bucket`.

    Attributes:
        dtype: dtype of the buffer and of every tensor in it.
        numel: number of elements.
        members: indices of the tensors in it, in the order in which they lie.
    """

    dtype: torch.dtype
    numel: int
    members: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Buffer({self.dtype}[{self.numel}] of {len(self.members)} tensors)"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A plan that lays tensors of known shapes and dtypes out in flat buffers.

    Made once, with `Bucket.plan`; holds no data and communicates nothing. Tensors lie without gaps
    and in the given order, each dtype in its own buffers.

    Attributes:
        shapes: shape of each tensor.
        buffers: the buffers, in the order of their first tensors.

    Example:
        bucket = Bucket.plan([p.shape for p in params], [p.dtype for p in params])
        flats = bucket.pack([p.grad for p in params])           # one copy
        grads = bucket.unpack([all_reduce(f, group) for f in flats])  # views
    """

    shapes: tuple[Shape, ...]
    buffers: tuple[Buffer, ...]

    @staticmethod
    def plan(
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        *,
        cap_bytes: int = CAP_BYTES,
    ) -> "Bucket":
        """Plans buffers for tensors.

        Args:
            shapes: shape of each tensor.
            dtypes: dtype of each tensor.
            cap_bytes: most bytes of a buffer; a tensor that is larger has one for itself.

        Raises:
            CommArgumentError: not as many dtypes as shapes, or a cap that is not positive.
        """
        if len(shapes) != len(dtypes):
            raise CommArgumentError(f"Bucket: {len(shapes)} shapes, but {len(dtypes)} dtypes")
        if cap_bytes <= 0:
            raise CommArgumentError(f"Bucket: cap_bytes is {cap_bytes}; it has to be positive")
        return _plan(tuple(map(tuple, shapes)), tuple(dtypes), cap_bytes)

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies tensors into flat buffers, differentiably.

        Raises:
            CommArgumentError: tensors that are not those of the plan.
        """
        self._check(tensors)
        return [joined([tensors[member] for member in buffer.members]) for buffer in self.buffers]

    def unpack(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors in flat buffers, as views.

        Raises:
            CommArgumentError: buffers that are not of the plan's sizes.
        """
        given = [flat.numel() for flat in flats]
        planned = [buffer.numel for buffer in self.buffers]
        if given != planned:
            raise CommArgumentError(f"{self!r} has buffers of {planned} elements, not of {given}")
        found: dict[int, Tensor] = {}
        for flat, buffer in zip(flats, self.buffers, strict=True):
            shapes = [self.shapes[member] for member in buffer.members]
            found.update(zip(buffer.members, views(flat, shapes), strict=True))
        return [found[member] for member in range(len(self.shapes))]

    def _check(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != len(self.shapes):
            raise CommArgumentError(f"{self!r} was given {len(tensors)} tensors")
        for buffer in self.buffers:
            for member in buffer.members:
                x = tensors[member]
                if (tuple(x.shape), x.dtype) != (self.shapes[member], buffer.dtype):
                    raise CommArgumentError(
                        f"{self!r} was planned for {buffer.dtype} {self.shapes[member]} as tensor "
                        f"{member}, and given {x.dtype} {tuple(x.shape)}"
                    )

    def __repr__(self) -> str:
        return f"Bucket({len(self.shapes)} tensors in {list(self.buffers)})"


def all_reduce_bucketed(
    tensors: Sequence[Tensor],
    group: GroupLike = None,
    *,
    op: str = "sum",
    cap_bytes: int = CAP_BYTES,
) -> list[Tensor]:
    """Reduces many tensors with one all-reduce for each buffer that they fill.

    Args:
        tensors: any shapes and dtypes, the same list on every member.
        group: from `group_of`, a torch process group, or None for the default one.
        op: as for `all_reduce`.
        cap_bytes: most bytes that travel at once.

    Returns:
        The reduced tensors, in the order given; they are views of the buffers.
    """
    group = as_group(group)
    bucket = Bucket.plan(
        [x.shape for x in tensors], [x.dtype for x in tensors], cap_bytes=cap_bytes
    )
    return bucket.unpack([all_reduce(flat, group, op=op) for flat in bucket.pack(tensors)])


# A training loop asks for the same few plans at every step.
@lru_cache(maxsize=64)
def _plan(shapes: tuple[Shape, ...], dtypes: tuple[torch.dtype, ...], cap_bytes: int) -> Bucket:
    full: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    free: dict[torch.dtype, int] = {}
    for member, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        size = prod(shape) * dtype.itemsize
        if dtype not in filling or size > free[dtype]:
            filling[dtype], free[dtype] = [], cap_bytes
            full.append(filling[dtype])
        filling[dtype].append(member)
        free[dtype] -= size
    buffers = (
        Buffer(dtypes[members[0]], sum(prod(shapes[member]) for member in members), tuple(members))
        for members in full
    )
    return Bucket(shapes, tuple(buffers))
