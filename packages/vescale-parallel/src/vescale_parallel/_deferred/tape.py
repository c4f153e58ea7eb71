"""Records the steps that make the values of a deferred tensor, and the buffers they write.

A step is one call of an op of torch. A value is what a step returned: a tensor by shape and strides
in a buffer, which other values may share (views). Steps write buffers, so the contents of a buffer
at some time are made by the steps that wrote to it before, from the last one that wrote all of it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from vescale_rng import Box, ShardLayout, whole

from vescale_parallel._deferred.draws import Draw

_number = itertools.count()
"""Numbers of steps only have to grow; several threads may take them."""


def names_of(text: str) -> frozenset[str]:
    """A set of names that are written one after another."""
    return frozenset(text.split())


class Fill(ABC):
    """A function that writes all of a tensor, and can write a rank's elements alone."""

    @abstractmethod
    def fill(self, local: Tensor, layout: ShardLayout) -> None:
        """Write a rank's elements.

        Args:
            local: the rank's tensor.
            layout: which elements it has, and where.
        """

    @property
    @abstractmethod
    def summary(self) -> str:
        """What it writes, in words that differ where the values do."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Write all of a tensor, and return it."""
        boxes = whole(tensor.shape).boxes
        own = tuple(Box(box.global_offset, box.shape, 0, tensor.stride()) for box in boxes)
        self.fill(tensor, ShardLayout(tuple(tensor.shape), own, local_shape=tuple(tensor.shape)))
        return tensor


@dataclass(eq=False)
class Buffer:
    """Memory that does not exist: its size in bytes, and the steps that wrote to it, in order."""

    nbytes: int
    writers: list[Step] = field(default_factory=list)


@dataclass(eq=False)
class Value:
    """A tensor without storage.

    Attributes:
        buffer: where it is.
        meta: a tensor on the meta device with its shape, strides, offset and dtype.
        device: where it is to be.
        step: what returned it.
        place: at which place among the tensors that the step returned.
    """

    buffer: Buffer
    meta: Tensor
    device: torch.device
    step: Step
    place: int

    @property
    def is_whole(self) -> bool:
        """Whether it is a row-major tensor that fills its buffer."""
        size = self.meta.numel() * self.meta.element_size()
        return self.meta.is_contiguous() and size == self.buffer.nbytes


@dataclass(eq=False)
class Constant:
    """A real tensor that a step reads; `version` tells whether it was written to since."""

    tensor: Tensor
    version: int


@dataclass(eq=False)
class Step:
    """One call of an op.

    Attributes:
        name: the name of the op, without namespace and overload: `normal_`.
        func: the op.
        args: its arguments, with a `Value` or a `Constant` in place of each tensor.
        kwargs: likewise.
        draw: what it draws, and from where; None if it draws nothing.
        default_dtype: torch's when it was called: what integers are divided into, say.
        made: the values that it returned.
        written: the values that it wrote to.
        reads: whether it reads elements, and not only shapes.
        overwrites: whether it leaves nothing of what was in the buffer that it writes.
        is_view: whether it only makes other tensors of a buffer that is there.
        number: steps with a lower one came before.
    """

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    draw: Draw | None = None
    default_dtype: torch.dtype = torch.float32
    made: list[Value] = field(default_factory=list)
    written: list[Value] = field(default_factory=list)
    reads: bool = True
    overwrites: bool = False
    is_view: bool = False
    number: int = field(default_factory=lambda: next(_number))

    @property
    def values(self) -> list[Value]:
        """The deferred tensors among its arguments."""
        return [one for one in tree_leaves((self.args, self.kwargs)) if isinstance(one, Value)]

    @property
    def constants(self) -> list[Constant]:
        """The real tensors among its arguments."""
        return [one for one in tree_leaves((self.args, self.kwargs)) if isinstance(one, Constant)]


@dataclass(frozen=True)
class ValueSteps:
    """The steps that make a value.

    Attributes:
        steps: those to run, in order.
        hollow: those among them of which only the memory is wanted, as all is overwritten later.
    """

    steps: tuple[Step, ...]
    hollow: frozenset[Step]


def making_of(value: Value) -> ValueSteps:
    """Find the steps that make what a value holds now."""
    # `run`: steps whose results are wanted. `hollow`: steps that only have to provide memory, since
    # what they put into it is overwritten before anybody reads it.
    run: set[Step] = set()
    hollow: set[Step] = set()
    # Buffers whose contents are wanted, as they were before the step of that number.
    todo: list[tuple[Buffer, float]] = [(value.buffer, float("inf"))]
    _take_handles([value], run, hollow)
    while todo:
        buffer, before = todo.pop()
        for step in _writers(buffer, before):
            if step in run:
                continue
            run.add(step)
            if not step.reads:
                continue  # the contents of its operands make no difference: `zeros_like`
            _take_handles(step.values, run, hollow)
            todo += [(one.buffer, step.number) for one in _read_by(step)]
    # A step of which something wanted the contents is run for good, whoever wanted its memory only.
    hollow -= run
    # In the order of recording, which is the order of one device: every step then finds what it
    # read there.
    return ValueSteps(tuple(sorted(run | hollow, key=lambda one: one.number)), frozenset(hollow))


def _writers(buffer: Buffer, before: float) -> Iterator[Step]:
    """The steps that made the contents of a buffer, the last one first."""
    for step in reversed(buffer.writers):
        if step.number < before:
            yield step
            # What was in the buffer before is of no interest: this is where the making of a weight
            # that is initialised twice begins.
            if step.overwrites:
                return


def _read_by(step: Step) -> list[Value]:
    if not step.overwrites:
        return step.values
    # Of what it overwrites, only the memory has to be there (`hollow`).
    return [one for one in step.values if one not in step.written]


def _take_handles(values: Iterable[Value], run: set[Step], hollow: set[Step]) -> None:
    """Add the steps that values need to exist: views of views, down to where memory is made."""
    todo = list(values)
    while todo:
        step = todo.pop().step
        if step in run:
            continue
        if step.is_view:
            run.add(step)
            todo += step.values
        else:
            hollow.add(step)
