"""What a rule returns for a call: which dims may be sharded together, and the outputs' layouts.

A rule names the dims of its operands and outputs by letters, as in einsum. Along one mesh axis an
operation may run

- replicated: every operand is replicated;
- sharded along a letter: every operand that has the letter is sharded there, the others are
  replicated; outputs that have the letter are sharded, those that lack it are partial (if the rule
  names the reduction);
- on partial sums: where the operation is linear in some operands, those may be partial, and so are
  the outputs.

`candidates` turns this into one `AxisStrategy` per possibility, with no mesh and no shape in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vescale_dtensor._layout.placements import (
    REDUCE_OPS,
    Partial,
    Placement,
    ReduceOp,
    Replicate,
    Shard,
)

_LINEAR_OPS: tuple[ReduceOp, ...] = ("sum", "avg")

Dims = tuple[Hashable | None, ...]
"""A letter per dim; None for a dim that is never split."""


@dataclass(frozen=True)
class AxisStrategy:
    """One way to run along one mesh axis: a placement per operand and per output.

    (torch: a single-dim strategy.) A `Shard` here stands for any sharding of that dim, even, ragged
    or interleaved, which the planner fills in; with `fixed_placement` it stands for itself.
    With `contiguous_only` every rank has to hold one interval of indices: the local op counts from
    where it begins. A `proactive` strategy is taken also where no operand lies like this yet, if it
    is the cheapest.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    fixed_placement: bool = False
    contiguous_only: bool = False
    proactive: bool = False


@dataclass(frozen=True)
class Strategy:
    """All ways to run an op, and how the outputs' global shapes and local values come about.

    Attributes:
        candidates: the possibilities along one axis; the first is always the replicated one.
        axis_candidates: further rows for each mesh axis, where they depend on the axis.
        extents: per output, per dim: the (operand, dim) whose global extent it has, or None where
            the dim is never split and the local extent is the global one. One entry serves all
            outputs if there is only one; none at all where no output is ever cut.
        shapes: global shapes of the outputs instead of `extents`, where the rule reads shapes.
        local: called as `local(context, args, kwargs)` in place of the torch function, with local
            tensors as arguments; `context` tells layouts (see `LocalContext`).
        specialize: makes, from a `LocalContext`, the function of the locals that serves every call
            with these very shapes and numbers, or None where `local` has to look at each.
        copy_on_one_device: whether one device copies, too, where a rule of views gives no view.
        output_orders: memory orders of the outputs, where the op moves dims about; None: derive
            them.
        probe_order: whether torch lays results out in an order of its own, so that it has to be
            asked: on tensors without data ("meta"), or on small ones ("real", or "zeros" where
            numbers are indices).
        data_dependent_shape: whether shapes of results follow from values, so that none may be
            cached.
        letters: dims of each operand, where operands that share a letter must agree in its extent.
        elementwise, full_reduction: see `Signature`.
        copy_on_shards: whether what would be a view on one device is none of the locals.
    """

    candidates: tuple[AxisStrategy, ...]
    axis_candidates: tuple[tuple[AxisStrategy, ...], ...] = ()
    extents: tuple[tuple[tuple[int, int] | None, ...], ...] = ()
    shapes: tuple[tuple[int, ...], ...] | None = None
    local: Callable[..., Any] | None = None
    specialize: Callable[..., Callable[..., Any] | None] | None = None
    copy_on_one_device: bool = False
    output_orders: tuple[tuple[int, ...] | None, ...] | None = None
    letters: tuple[Dims, ...] = ()
    elementwise: bool = False
    full_reduction: ReduceOp | None = None
    copy_on_shards: bool = False
    probe_order: Literal["meta", "real", "zeros"] | None = None
    data_dependent_shape: bool = False

    def fits(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether operands of these global shapes have the dims and extents that letters promise.

        Pieces of operands that do not fit may still fit by chance, on some ranks.
        """
        extents: dict[Hashable, int] = {}
        for dims, shape in zip(self.letters, shapes, strict=bool(self.letters)):
            if len(dims) != len(shape):
                return False
            for letter, extent in zip(dims, shape, strict=True):
                if letter is not None and extents.setdefault(letter, extent) != extent:
                    return False
        return True

    def candidates_at(self, axis: int) -> tuple[AxisStrategy, ...]:
        """The possibilities along one mesh axis."""
        return (
            self.candidates + self.axis_candidates[axis]
            if self.axis_candidates
            else self.candidates
        )


@dataclass(frozen=True)
class Signature:
    """The letters of an op.

    Attributes:
        inputs: dims of each operand.
        outputs: dims of each output.
        reduce: the reduction of letters that no output has.
        unshardable: letters that may not be split.
        linear: groups of operands in which the op is jointly linear: all of a group may be partial
            while the others are whole.
        bias_operands: operands that are added to a result (a bias): where the output is a partial
            sum and they are not split, they take part on coordinate 0 only.
        preserves_partial: whether the op only moves elements, so that any partial may pass through.
        contiguous_only: letters whose local indices have to be one interval.
        elementwise: whether elements are taken one by one, wherever they are.
        full_reduction: the reduction of all elements at once, where that is what the op does: its
            local form then does not care how many dims there are.
        local, specialize: see `Strategy`.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    reduce: Mapping[Hashable, ReduceOp] = field(default_factory=dict)
    unshardable: frozenset[Hashable] = frozenset()
    linear: tuple[tuple[int, ...], ...] = ()
    bias_operands: tuple[int, ...] = ()
    preserves_partial: bool = False
    contiguous_only: frozenset[Hashable] = frozenset()
    elementwise: bool = False
    full_reduction: ReduceOp | None = None
    local: Callable[..., Any] | None = None
    specialize: Callable[..., Callable[..., Any] | None] | None = None

    def strategy(self) -> Strategy:
        """The table of rows that these letters stand for."""
        letters = dict.fromkeys(letter for dims in self.inputs for letter in dims)
        split = [self._split(letter) for letter in letters if letter is not None]
        candidates = [
            self._replicated(),
            *(candidate for candidate in split if candidate is not None),
            *self._partial(),
        ]
        extents = tuple(tuple(map(self._source, dims)) for dims in self.outputs)
        return Strategy(
            tuple(candidates),
            extents=extents,
            local=self.local,
            specialize=self.specialize,
            letters=self.inputs,
            elementwise=self.elementwise,
            full_reduction=self.full_reduction,
        )

    def _replicated(self) -> AxisStrategy:
        return AxisStrategy((Replicate(),) * len(self.inputs), (Replicate(),) * len(self.outputs))

    def _split(self, letter: Hashable) -> AxisStrategy | None:
        if letter in self.unshardable:
            return None
        outputs: list[Placement] = []
        for dims in self.outputs:
            if letter in dims:
                outputs.append(Shard(dims.index(letter)))
            elif letter in self.reduce:
                outputs.append(Partial(self.reduce[letter]))
            else:
                return None
        summed = any(isinstance(p, Partial) for p in outputs)
        inputs: list[Placement] = []
        for index, dims in enumerate(self.inputs):
            if letter in dims:
                inputs.append(Shard(dims.index(letter)))
            else:
                inputs.append(Partial() if summed and index in self.bias_operands else Replicate())
        return AxisStrategy(
            tuple(inputs), tuple(outputs), contiguous_only=letter in self.contiguous_only
        )

    def _partial(self) -> list[AxisStrategy]:
        groups = [(op, group) for op in _LINEAR_OPS for group in self.linear]
        if self.preserves_partial:
            groups += [(op, tuple(range(len(self.inputs)))) for op in REDUCE_OPS]
        return [self._joint(op, {*group, *self.bias_operands}) for op, group in groups]

    def _joint(self, op: ReduceOp, joint: set[int]) -> AxisStrategy:
        inputs = [Partial(op) if i in joint else Replicate() for i in range(len(self.inputs))]
        return AxisStrategy(tuple(inputs), (Partial(op),) * len(self.outputs))

    def _source(self, letter: Hashable | None) -> tuple[int, int] | None:
        if letter is None:
            return None
        for index, dims in enumerate(self.inputs):
            if letter in dims:
                return index, dims.index(letter)
        return None
