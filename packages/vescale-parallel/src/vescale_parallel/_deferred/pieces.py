"""A rank's elements of a value, bitwise those of one device.

The steps of most parameters treat all elements alike: memory, a draw into all of it, arithmetic by
element. Such steps run on a rank's elements only, draws by vescale-rng. Whatever else makes a value
(a factorisation, a transposition, another tensor's mean) is replayed for the whole of this one
tensor, and the elements are taken from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from vescale_rng import Box, Distribution, ShardLayout, fill_, use
from vescale_rng.streams import at

from vescale_parallel._deferred.replay import constant, default_dtype, replay, replaying
from vescale_parallel._deferred.tape import Buffer, Constant, Fill, Step, Value, making_of, names_of

_MEMORY: Final = {
    "empty": 0.0,
    "empty_like": 0.0,
    "new_empty": 0.0,
    "zeros": 0.0,
    "zeros_like": 0.0,
    "new_zeros": 0.0,
    "ones": 1.0,
    "ones_like": 1.0,
    "new_ones": 1.0,
}
"""Ops that make memory with one number in all of it, and the number."""

_DRAWN: Final = names_of("rand randn randint rand_like randn_like randint_like")

_BY_ELEMENT: Final = names_of(
    "detach alias clone _to_copy copy_ mul mul_ div div_ neg neg_ abs abs_ sqrt sqrt_ clamp clamp_ "
    "clamp_min clamp_min_ clamp_max clamp_max_ where lt gt le ge eq ne maximum minimum "
    "logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not masked_fill "
    "masked_fill_"
)
"""Ops whose result is exactly rounded for each element: vectors of any length give the same bits.
Not so `exp`, `erfinv` or `add` with a factor, whose bits depend on where a vector begins."""

_SUMS: Final = names_of("add add_ sub sub_")


def piece(value: Value, layout: ShardLayout, local: Tensor) -> None:
    """Write a rank's elements of a value into `local`.

    Memory: where the steps go by element, a few times that of `local`; else a few times that of
    the value.

    Args:
        value: what is wanted.
        layout: which elements of it, and where in `local`.
        local: of the value's dtype, on its device.
    """
    with torch.no_grad():
        if not _by_element(value, layout, local):
            _take(replay(value), layout, local)


def _take(whole: Tensor, layout: ShardLayout, local: Tensor) -> None:
    for box in layout.boxes:
        _part(box, local).copy_(whole[_slices(box.global_offset, box.shape)])


def _part(box: Box, local: Tensor) -> Tensor:
    start = local.storage_offset() + box.local_offset
    return local.as_strided(box.shape, box.local_strides, start)


def _slices(start: Sequence[int], extent: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))


def _by_element(value: Value, layout: ShardLayout, local: Tensor) -> bool:
    """Run the steps on a rank's elements; False, with nothing done, if they do not go by them."""
    making = making_of(value)
    steps = [one for one in making.steps if not _is_box_view(one, value)]
    # All of them are looked at before any runs: `local` must not be half written when one of them
    # turns out to need other ranks' elements.
    if not value.is_whole or not all(_goes_by_element(s, value, making.hollow) for s in steps):
        return False
    token = replaying.set(True)
    try:
        made = _Locals(layout, local, value.buffer)
        for step in steps:
            made.run(step, hollow=step in making.hollow)
        # Where the wanted memory was written to from the beginning, it is `local` itself.
        if made.of(value) is not local:
            local.copy_(made.of(value))
    finally:
        replaying.reset(token)
    return True


def _goes_by_element(step: Step, value: Value, hollow: frozenset[Step]) -> bool:
    shape = value.meta.shape
    made = all(one.is_whole and one.meta.shape == shape for one in step.made)
    if step in hollow or step.name in _MEMORY or step.name in _DRAWN:
        drawn = step.draw is not None and step.draw.distribution is not None
        return made and (step in hollow or step.name in _MEMORY or drawn)
    if step.name in ("fill_", "zero_"):
        # By a number: what else may fill a tensor is a tensor itself.
        return all(one in step.written for one in step.values) and all(
            _box_in(one, shape) is not None for one in step.written
        )
    # A real tensor is all of it, and no part of one: only a number goes with any part.
    if any(one.tensor.ndim or not step.values for one in step.constants):
        return False
    inputs = all(one.is_whole and one.meta.shape == shape for one in step.values)
    if step.name == "full":
        return made and not step.values
    if not (made and inputs):
        return False
    if isinstance(step.func, Fill):
        return True
    if step.draw is not None:
        return step.draw.distribution is not None
    # With a factor it is a product and a sum, which a vector unit may fuse and the rest of a row
    # may not.
    if step.name in _SUMS and (len(step.args) > 2 or step.kwargs.get("alpha", 1) != 1):
        return False
    return step.name in _BY_ELEMENT or step.name in _SUMS


def _is_box_view(step: Step, value: Value) -> bool:
    """Whether it makes a view that is a box of the value, as `weight[3]` does."""
    shape = value.meta.shape
    return step.is_view and all(
        one.buffer is value.buffer and not one.is_whole and _box_in(one, shape) for one in step.made
    )


def _box_in(value: Value, shape: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    """Begin and end along each dim of the box that a view is of a row-major tensor, if it is."""
    meta = value.meta
    # Where the buffer is not exactly one tensor of that shape, places in it are no boxes.
    if math.prod(shape) * meta.element_size() != value.buffer.nbytes or not meta.numel():
        return None
    steps = torch.empty(tuple(shape), device="meta").stride()
    left = [(n, s) for n, s in zip(meta.shape, meta.stride(), strict=True) if n > 1]
    at, box = meta.storage_offset(), []
    for extent, step in zip(shape, steps, strict=True):
        begin = at // step if extent > 1 else 0
        at -= begin * step
        # The view's dims in the order of the tensor's, each as far apart as there.
        size = left.pop(0)[0] if left and left[0][1] == step and extent > 1 else 1
        if begin + size > extent:
            return None
        box.append((begin, begin + size))
    return None if left or at else tuple(box)


class _Locals:
    """A rank's elements of the values of some steps, all in the layout of the one wanted."""

    def __init__(self, layout: ShardLayout, local: Tensor, wanted: Buffer) -> None:
        self._layout, self._like, self._wanted = layout, local, wanted
        self._buffers: dict[Any, Tensor] = {}

    def of(self, value: Value) -> Tensor:
        """The elements of a value that are here."""
        return self._buffers[value.buffer]

    def run(self, step: Step, *, hollow: bool) -> None:
        """Run one step."""
        for value in step.made:
            if value.buffer not in self._buffers and (hollow or not step.values or not step.reads):
                self._buffers[value.buffer] = self._allocated(value, step, hollow)
        if hollow or step.name in _MEMORY or step.name == "full":
            return
        if step.draw is not None or isinstance(step.func, Fill):
            target = step.written[0] if step.written else step.made[0]
            self._draw(step, self.of(target))
        elif step.name in ("fill_", "zero_"):
            number = 0 if step.name == "zero_" else tree_map(self._given(step), step.args[1])
            for view in step.written:
                for part in self._boxes_of(view):
                    part.fill_(number)
        else:
            given = self._given(step)
            args, kwargs = tree_map(given, (step.args, step.kwargs))
            with default_dtype(step.default_dtype):
                made = step.func(*args, **kwargs)
            for value in step.made:
                self._buffers.setdefault(value.buffer, made)

    def _allocated(self, value: Value, step: Step, hollow: bool) -> Tensor:
        size, like = self._like.size(), self._like
        if value.buffer is self._wanted:
            made = like  # nothing is copied where it was drawn already
        else:
            kind: Any = {"dtype": value.meta.dtype, "device": like.device}
            made = torch.empty_strided(size, like.stride(), **kind)
        if step.name == "full":
            made.fill_(step.args[1])
        elif not hollow and step.name in _MEMORY and "empty" not in step.name:
            made.fill_(_MEMORY[step.name])
        return made

    def _draw(self, step: Step, local: Tensor) -> None:
        draw = step.draw
        # From where one device began this draw, whatever has been drawn since.
        with at(draw.place, draw.generator) if draw else nullcontext(), use("native"):
            if isinstance(step.func, Fill):
                step.func.fill(local, self._layout)
            else:
                assert draw is not None
                assert isinstance(draw.distribution, Distribution)
                fill_(local, draw.distribution, self._layout, draw.generator)

    def _given(self, step: Step) -> Any:
        def given(one: Any) -> Any:
            if isinstance(one, Value):
                return self.of(one)
            return constant(one, step) if isinstance(one, Constant) else one

        return given

    def _boxes_of(self, view: Value) -> Iterator[Tensor]:
        """What is here of a view that is a box of the tensor."""
        local, wanted = self.of(view), _box_in(view, self._layout.global_shape)
        assert wanted is not None
        for box in self._layout.boxes:
            ends = [s + n for s, n in zip(box.global_offset, box.shape, strict=True)]
            low = [max(w[0], s) for w, s in zip(wanted, box.global_offset, strict=True)]
            high = [min(w[1], e) for w, e in zip(wanted, ends, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                starts = [a - s for a, s in zip(low, box.global_offset, strict=True)]
                extents = [b - a for a, b in zip(low, high, strict=True)]
                yield _part(box, local)[_slices(starts, extents)]
