"""A tensor as metadata: what has to be known of one that comes from another stage."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm.nested import map_tensors
from vescale_dtensor import DTensor

from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.trace.placeholders import Watcher, watched_placeholder


class TensorSpec(NamedTuple):
    """What a tensor is, but for its values.

    Attributes:
        dtype: its dtype.
        shape: of the local tensor.
        stride: of the local tensor, in elements.
        placements: on the mesh of a stage; None: a plain tensor.
        global_shape: of a distributed tensor.
        global_stride: of a distributed tensor, in elements.
        requires_grad: whether a gradient goes back to it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    placements: tuple[Any, ...] | None
    global_shape: tuple[int, ...]
    global_stride: tuple[int, ...]
    requires_grad: bool


class NestedSpecs(NamedTuple):
    """A nesting of tensors, but for their values.

    Attributes:
        nesting: the nesting; in place of each tensor its number.
        specs: the tensors by number.
    """

    nesting: Any
    specs: tuple[TensorSpec, ...]


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor, with its history: complete gradients go back through it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_of(local: Tensor) -> Tensor:
    """The bytes of a tensor's elements, one after another, whatever lies between these."""
    flat = local.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    # A single element may have any stride, and is seen as bytes with that of one alone.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def require_dense(tensor: Tensor) -> None:
    """Refuse a tensor whose elements do not lie in memory one by one.

    It cannot be sent, and what stood for it would be a dense one, for which code may do other
    things (`if x.is_sparse`).

    Raises:
        PipelineError: it is sparse, nested, quantized, or has no values.
    """
    if tensor.layout is torch.strided and not (
        tensor.is_nested or tensor.is_quantized or tensor.is_meta
    ):
        return
    kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else tensor.layout
    raise PipelineError(
        f"a block of a pipeline returns a tensor that is {'meta' if tensor.is_meta else kind}: "
        "between stages there are dense tensors with values. Return what it is made of, and make "
        "it where it is used."
    )


def spec_of(tensor: Tensor) -> TensorSpec:
    """Describe a tensor.

    Raises:
        PipelineError: nothing is known to stand for it, see `require_dense`.
    """
    require_dense(tensor)
    needs = bool(tensor.requires_grad)
    if isinstance(tensor, DTensor):
        local = tensor.detach().to_local()
        placements: tuple[Any, ...] | None = tuple(tensor.placements)
    else:
        local, placements = tensor.detach(), None
    return TensorSpec(
        local.dtype,
        tuple(local.shape),
        tuple(local.stride()),
        placements,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        needs,
    )


def describe(value: Any) -> NestedSpecs:
    """Describe a nesting of tensors."""
    specs: list[TensorSpec] = []

    def number(tensor: Tensor) -> Tensor:
        specs.append(spec_of(tensor))
        # As a tensor, which `map_tensors` finds again when others are put in its place.
        return torch.tensor(len(specs) - 1, device="cpu")

    return NestedSpecs(map_tensors(number, value), tuple(specs))


class Blanks:
    """Memory of tensors whose values mean nothing: one for each form of local tensor.

    A late stage stands in for dozens of blocks, whose results would be held all at once.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._made: dict[object, tuple[Tensor, int]] = {}
        # By the `id` of what is kept beside them, and whether the tensors tell of their uses.
        self._standing: dict[tuple[int, bool], tuple[NestedSpecs, list[Tensor]]] = {}
        # The forwards in which they stand in: the last one is told.
        self.watchers: list[Watcher] = []
        self._is_written = False

    @property
    def is_written(self) -> bool:
        """Whether the model writes to a placeholder, which then cannot be used again."""
        return self._is_written

    def begin(self) -> None:
        """A forward begins: what the one before has written to stands for nothing any more."""
        written = [one for one, version in self._made.values() if one._version != version]
        # A model that writes to results of blocks does so each time.
        self._is_written = self._is_written or bool(written)
        if self._is_written:
            self._standing.clear()

    def ready(
        self, described: NestedSpecs, *, tells: bool = False
    ) -> tuple[Any, list[Tensor]] | None:
        """What `stand_in` returns, where the tensors are there already."""
        found = self._standing.get((id(described), tells))
        if found is None:
            return None
        made, nesting = found[1], described.nesting
        if isinstance(nesting, Tensor):
            return made[0], made
        return map_tensors(lambda number: made[int(number)], nesting), made

    def stand_in(
        self, described: NestedSpecs, mesh: DeviceMesh, *, tells: bool = False
    ) -> tuple[Any, list[Tensor]]:
        """`placeholders`, of which the tensors are the same ones in each forward.

        Args:
            described: the nesting.
            mesh: of the stage.
            tells: whether the tensors tell `watchers` of functions that take them.
        """
        known = self.ready(described, tells=tells)
        if known is not None:
            return known
        value, made = placeholders(described, mesh, self)
        is_kept = not self._is_written and not any([one.is_inference() for one in made])
        if tells:
            made = [watched_placeholder(one, self.watchers) for one in made]
            value = map_tensors(lambda number: made[int(number)], described.nesting)
        if is_kept:
            self._standing[id(described), tells] = described, made
        return value, made

    def local(self, spec: TensorSpec) -> Tensor:
        """A local tensor of that form: an object of its own, in shared memory."""
        key = spec.dtype, spec.shape, spec.stride
        found = self._made.get(key)
        # The model may write to a result of a block: what others share has to tell that it is none.
        self._is_written = self._is_written or (found is not None and found[0]._version != found[1])
        if found is None or found[0]._version != found[1]:
            made = _nothing(spec, self._device)
            if made.is_inference():
                return made  # of which torch counts no versions
            found = self._made[key] = made, made._version
        # What is marked, and who uses it, is noted by the `id` of a tensor: each needs an object of
        # its own.
        return found[0].detach()


def placeholders(
    described: NestedSpecs, mesh: DeviceMesh, blanks: Blanks | None = None
) -> tuple[Any, list[Tensor]]:
    """A nesting of tensors whose values mean nothing, and these tensors.

    Real memory, in which arithmetic by element costs little beside a block: it draws what it draws
    on the stage that has the values.

    Args:
        described: the nesting.
        mesh: of the stage.
        blanks: whose memory they share; None: each has its own.
    """
    made = []
    for spec in described.specs:
        local = _nothing(spec, mesh.device_type) if blanks is None else blanks.local(spec)
        made.append(wrapped(spec, local, mesh))
    return map_tensors(lambda number: made[int(number)], described.nesting), made


def _nothing(spec: TensorSpec, device: str) -> Tensor:
    # What slips past all checks shall at least be seen in the loss.
    number = spec.dtype.is_floating_point or spec.dtype.is_complex
    nothing = float("nan") if number else 0
    if not _shares(spec.shape, spec.stride):
        made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        return made.fill_(nothing)
    # One that is expanded cannot be written to: filled as a row.
    reach = sum((n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True)) + 1
    row = torch.full((reach,), nothing, dtype=spec.dtype, device=device)
    return row.as_strided(spec.shape, spec.stride)


def as_strided_like(flat: Tensor, spec: TensorSpec) -> Tensor:
    """A local tensor that came row-major, in the memory order that it had."""
    if flat.stride() == spec.stride and flat.shape == spec.shape:
        return flat
    given = flat.view(spec.shape)
    if tuple(given.stride()) == spec.stride:
        return given
    # The order of memory decides in which order a dropout draws.
    stride = _distinct(spec.shape, spec.stride)
    ordered = torch.empty_strided(spec.shape, stride, dtype=spec.dtype, device=flat.device)
    return ordered.copy_(given)


@lru_cache(maxsize=1024)
def _distinct(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, or where elements share memory (`expand`), those of a copy in the same order.

    Elements need places of their own: those of a gradient differ where those of the value do not.
    """
    # What torch takes for results of functions by element: given strides if nothing is shared.
    like = torch.empty_strided(shape, stride, device="meta")
    return stride if not _shares(shape, stride) else tuple(torch.empty_like(like).stride())


@lru_cache(maxsize=1024)
def _shares(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements may share memory: a dim steps by no more than those within it reach."""
    if not all(shape):
        return False
    reach = 0
    for step, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def wrapped(spec: TensorSpec, local: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor of that local tensor; its gradient flows back to it, complete."""
    if spec.placements is None:
        return local
    made: Tensor = DTensor.from_local(
        local, mesh, spec.placements, shape=spec.global_shape, stride=spec.global_stride
    )
    return made
