"""Buckets: many tensors in few flat buffers, so that they travel in few collectives."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import index

import torch
from torch import Tensor

from vescale_comm._engine.flat_ops import near_equal
from vescale_comm._errors import CommArgumentError
from vescale_comm._groups.group import GroupLike, as_group
from vescale_comm._torch.buffers import flat_concat

Shape = tuple[int, ...]

CAP_BYTES = 25 * 2**20
"""Default cap of a buffer: large enough that latency no longer matters."""

ALIGN_BYTES = 16
"""Default alignment: the widest load and store of a GPU's thread, and a vector of a CPU's."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One flat buffer of a `Bucket`.

    Attributes:
        dtype: dtype of the buffer and of every tensor in it.
        numel: number of elements, those of the gaps included.
        members: indices of the tensors in it, in the order of their places.
        offsets: where each of them begins, in elements.
    """

    dtype: torch.dtype
    numel: int
    members: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.numel * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"Buffer({self.dtype}[{self.numel}] of {len(self.members)} tensors)"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A plan of where tensors of known shapes and dtypes are in flat buffers.

    Made once, with `Bucket.plan`, from tensors in the order of their use; holds no data and
    communicates nothing. Each dtype has its own buffers, which hold tensors in the given order,
    each at a multiple of the alignment; gaps are zero. The one copy that it knows is `pack`: who
    writes into the views of `unpack(allocate())` to begin with needs none.

    Attributes:
        shapes: shape of each tensor.
        buffers: the buffers, in the order of their first tensors.

    Examples:
        bucket = Bucket.plan([p.shape for p in params], [p.dtype for p in params])
        flats = bucket.pack([p.grad for p in params])           # one copy
        grads = bucket.unpack([all_reduce_(f, group) for f in flats])  # in place, and views
    """

    shapes: tuple[Shape, ...]
    buffers: tuple[Buffer, ...]

    @staticmethod
    def plan(
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        *,
        cap_bytes: int = CAP_BYTES,
        align_bytes: int = ALIGN_BYTES,
    ) -> "Bucket":
        """Plan buffers for tensors.

        Args:
            shapes: shape of each tensor, in the order of use.
            dtypes: dtype of each tensor.
            cap_bytes: most bytes of a buffer; a tensor that is larger has one for itself.
            align_bytes: each tensor begins at a multiple of this in its buffer. 1: no gaps. At
                least an element; an element of another size is rounded up to full elements.

        Raises:
            CommArgumentError: not as many dtypes as shapes, or a cap or an alignment that is not
                positive.
        """
        if len(shapes) != len(dtypes):
            raise CommArgumentError(f"Bucket: {len(shapes)} shapes, but {len(dtypes)} dtypes")
        for name, value in (("cap_bytes", cap_bytes), ("align_bytes", align_bytes)):
            if value <= 0:
                raise CommArgumentError(f"Bucket: {name} is {value}; it has to be positive")
        # A plan is of known shapes: a tracer's symbols become the numbers that they stand for.
        known = tuple(tuple(map(index, shape)) for shape in shapes)
        return _plan(known, tuple(dtypes), cap_bytes, align_bytes)

    def allocate(self, device: torch.device | str = "cpu") -> list[Tensor]:
        """Return memory for all buffers, zeroed: `unpack` gives the tensors in it."""
        return [torch.zeros(each.numel, dtype=each.dtype, device=device) for each in self.buffers]

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors into new flat buffers, differentiably.

        Raises:
            CommArgumentError: tensors that are not those of the plan.
        """
        self._check(tensors)
        return [_packed(buffer, tensors, self.shapes) for buffer in self.buffers]

    def unpack(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors in flat buffers, as views.

        Raises:
            CommArgumentError: buffers that are not of the plan's sizes and dtypes.
        """
        given = [flat.numel() for flat in flats]
        planned = [buffer.numel for buffer in self.buffers]
        if given != planned:
            raise CommArgumentError(f"{self!r} has buffers of {planned} elements, not of {given}")
        found: dict[int, Tensor] = {}
        for number, flat in enumerate(flats):
            found.update(self.views(number, flat))
        return [found[member] for member in range(len(self.shapes))]

    def views(self, number: int, flat: Tensor) -> dict[int, Tensor]:
        """Return the tensors in one flat buffer, as views, by their indices.

        Args:
            number: which buffer of the plan it is.
            flat: 1-D, contiguous.

        Raises:
            CommArgumentError: it is not of that buffer's size and dtype.
        """
        buffer = self.buffers[number]
        if (flat.numel(), flat.dtype) != (buffer.numel, buffer.dtype):
            raise CommArgumentError(
                f"{self!r}: buffer {number} is {buffer!r}, and the one given is {flat.dtype} of "
                f"{flat.numel()} elements"
            )
        # One narrow each: autograd forbids in-place ops on the outputs of a split.
        return {
            # The gap after a tensor is in no view: nothing reads or writes it, and it stays zero.
            member: flat.narrow(0, start, prod(self.shapes[member])).view(self.shapes[member])
            for member, start in zip(buffer.members, buffer.offsets, strict=True)
        }

    def own_parts(self, flats: Sequence[Tensor], group: GroupLike = None) -> list[Tensor]:
        """Return this member's part of each flat buffer, as views.

        The members' parts follow one another and differ by one element at most.

        Args:
            flats: the buffers.
            group: from `group_of`, a torch process group, or None for the default one.

        Raises:
            CommArgumentError: buffers that are not of the plan's sizes and dtypes.
        """
        group = as_group(group)
        self.unpack(flats)  # only to check them
        parts = []
        for flat in flats:
            sizes = near_equal(flat.numel(), group.size)
            parts.append(flat.narrow(0, sum(sizes[: group.rank]), sizes[group.rank]))
        return parts

    def _check(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != len(self.shapes):
            raise CommArgumentError(f"{self!r} was given {len(tensors)} tensors")
        for buffer in self.buffers:
            devices = sorted({str(tensors[member].device) for member in buffer.members})
            if len(devices) > 1:
                raise CommArgumentError(
                    f"{self!r} was given tensors on {', '.join(devices)}: a buffer is on one device"
                )
            for member in buffer.members:
                self.check_member(buffer, member, tensors[member])

    def check_member(self, buffer: Buffer, member: int, x: Tensor) -> None:
        """Check that `x` is what was planned as tensor `member`, which is in `buffer`.

        Raises:
            CommArgumentError: it is not.
        """
        if (tuple(x.shape), x.dtype) != (self.shapes[member], buffer.dtype):
            raise CommArgumentError(
                f"{self!r} was planned for {buffer.dtype} {self.shapes[member]} as tensor "
                f"{member}, and given {x.dtype} {tuple(x.shape)}"
            )

    def __repr__(self) -> str:
        return f"Bucket({len(self.shapes)} tensors in {list(self.buffers)})"


def _packed(buffer: Buffer, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> Tensor:
    """Return one concatenation of the tensors and the gaps between them."""
    parts: list[Tensor] = []
    end = 0
    for member, start in zip(buffer.members, buffer.offsets, strict=True):
        if start > end:
            # Zeros and not uninitialised memory: a NaN in a gap would spoil a block's scale on the
            # wire.
            parts.append(tensors[member].new_zeros(start - end))
        parts.append(tensors[member])
        end = start + prod(shapes[member])
    return flat_concat(parts)


# A training loop asks for the same few plans at every step.
@lru_cache(maxsize=64)
def _plan(
    shapes: tuple[Shape, ...], dtypes: tuple[torch.dtype, ...], cap_bytes: int, align_bytes: int
) -> Bucket:
    filling: dict[torch.dtype, list[int]] = {}
    ends: dict[torch.dtype, int] = {}
    full: list[tuple[torch.dtype, list[int], list[int]]] = []
    starts: dict[torch.dtype, list[int]] = {}
    for member, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        each = -(-align_bytes // dtype.itemsize)
        # A tensor larger than the cap opens a buffer and fills it alone; it is never split, because
        # a view of it has to be contiguous.
        start, numel = _next_multiple(ends.get(dtype, 0), each), prod(shape)
        if dtype not in filling or (start + numel) * dtype.itemsize > cap_bytes:
            filling[dtype], starts[dtype], start = [], [], 0
            full.append((dtype, filling[dtype], starts[dtype]))
        filling[dtype].append(member)
        starts[dtype].append(start)
        ends[dtype] = start + numel
    buffers = (
        Buffer(dtype, offsets[-1] + prod(shapes[members[-1]]), tuple(members), tuple(offsets))
        for dtype, members, offsets in full
    )
    return Bucket(shapes, tuple(buffers))


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
