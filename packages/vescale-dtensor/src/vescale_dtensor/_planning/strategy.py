"""The types that a rule returns: which dims may be sharded together, and the outputs' placements.

A rule names the dims of its operands and outputs by letters, as in einsum. On one mesh axis an
operation may run

- replicated: every operand is replicated;
- sharded on a letter: every operand that has the letter is sharded there, and the others are
  replicated; outputs that have the letter are sharded, and those that lack it are partial (if the
  rule names the reduction);
- on partial values: if the operation is linear in some operands, those may be partial, and so are
  the outputs.

`Signature` states the letters, and `Signature.strategy` turns them into a `Strategy`: one
`AxisStrategy` per possibility, with no mesh and no shape in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.placements import REDUCE_OPS, Partial, ReduceOp, Replicate, Shard

_REPLICATE = Replicate()
# Reductions that commute with linear functions; max, min and product do not.
_LINEAR_OPS: tuple[ReduceOp, ...] = ("sum", "avg")

Dims = tuple[Hashable | None, ...]
"""A letter per dim; None for a dim that is never sharded."""


# With an `__init__` of its own: a plan has a dozen of these, and what `dataclass` writes for a
# frozen class passes each field through `object.__setattr__`, at twice the cost.
@dataclass(frozen=True, init=False)
class AxisStrategy:
    """One way to run on one mesh axis, which torch calls a single-dim strategy.

    Attributes:
        inputs: a placement per operand. A `Shard` stands for any sharding of that dim, even,
            ragged or interleaved; the planner fills in the operands' own.
        outputs: a placement per output, likewise.
        fixed_placement: whether a `Shard` stands for itself alone.
        contiguous_only: whether every rank has to hold one interval of indices, since the local op
            counts from where it begins.
        proactive: whether to take this, if it is the cheapest, although no operand has such a
            placement yet.
        local_bytes: bytes that the rule's own local call sends on the axis, beside what
            redistributes operands, in the unit of `select.relative_sizes`.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    fixed_placement: bool = False
    contiguous_only: bool = False
    proactive: bool = False
    local_bytes: float = 0.0

    def __init__(
        self,
        inputs: tuple[Placement, ...],
        outputs: tuple[Placement, ...],
        fixed_placement: bool = False,
        contiguous_only: bool = False,
        proactive: bool = False,
        local_bytes: float = 0.0,
    ) -> None:
        fields = self.__dict__
        fields["inputs"] = inputs
        fields["outputs"] = outputs
        fields["fixed_placement"] = fixed_placement
        fields["contiguous_only"] = contiguous_only
        fields["proactive"] = proactive
        fields["local_bytes"] = local_bytes


@dataclass(frozen=True)
class Strategy:
    """All ways to run an op, and how the outputs' global shapes and local values are found.

    Attributes:
        candidates: the possibilities on one axis; the first is always the replicated one.
        axis_candidates: further possibilities for each mesh axis, if they depend on the axis.
        extents: per output, per dim: the (operand, dim) whose global extent it has, or None if
            the dim is never sharded, so that the local extent is the global one. A single entry
            serves all outputs; empty if no output is ever sharded.
        shapes: global shapes of the outputs instead of `extents`, for rules that read shapes.
        local: called as `local(context, args, kwargs)` in place of the torch function, with local
            tensors as arguments; `context` gives layouts (see `LocalContext`).
        specialize: returns, from a `LocalContext`, a function of local tensors that serves every
            call with the same shapes and numbers; None if `local` has to look at each call.
        copy_on_one_device: for rules of views: whether the result is a copy on one device too.
        output_orders: memory orders of the outputs, if the op permutes dims; None: derive them.
        letters: dims of each operand; operands that share a letter must agree in its extent.
        elementwise, full_reduction: see `Signature`.
        copy_on_shards: whether what is a view on one device is a copy of the local tensors.
        probe_order: whether torch chooses the memory order of results itself, so that it has to be
            found by running the op: on tensors without data ("meta"), or on small ones filled with
            ones ("real") or zeros ("zeros", for operands that are indices).
        data_dependent_shape: whether the results' shapes depend on values, so that none may be
            cached.
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
        """Whether operands of these global shapes have the dims and extents that letters state."""
        # Not left to the local op: local shapes of operands that do not fit may still fit by
        # chance, on some ranks, which would then go on to collectives that the others miss.
        extents: dict[Hashable, int] = {}
        for dims, shape in zip(self.letters, shapes, strict=bool(self.letters)):
            if len(dims) != len(shape):
                return False
            for letter, extent in zip(dims, shape, strict=True):
                if letter is not None and extents.setdefault(letter, extent) != extent:
                    return False
        return True

    def candidates_at(self, axis: int) -> tuple[AxisStrategy, ...]:
        """The possibilities on one mesh axis."""
        return (
            self.candidates + self.axis_candidates[axis]
            if self.axis_candidates
            else self.candidates
        )


@dataclass(frozen=True)
class Signature:
    """An op as letters, from which its `Strategy` follows.

    A matrix product is `Signature((("m", "k"), ("k", "n")), (("m", "n"),), reduce={"k": "sum"},
    linear=((0,), (1,)))`. It may be sharded on m or n; sharded on k, its result is a partial sum.
    It takes a partial sum for one operand if the other is replicated.

    Attributes:
        inputs: dims of each operand.
        outputs: dims of each output.
        reduce: letter that some output lacks -> the reduction over it.
        unshardable: letters that may not be sharded.
        linear: groups of operands in which the op is jointly linear: all of a group may be partial
            while the others are replicated.
        bias_operands: operands that are added to a result (a bias). If the output is a partial sum
            and they are not sharded, they are partial too: added on coordinate 0 only.
        preserves_partial: whether the op only moves elements, so that a partial value of any
            reduction stays one.
        contiguous_only: letters whose local indices have to be one interval.
        elementwise: whether each element of the result depends on the operands' elements at the
            same place alone.
        full_reduction: the reduction of an op that reduces all elements; its local form then does
            not depend on the number of dims.
        local, specialize, output_orders, probe_order, data_dependent_shape: see `Strategy`.
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
    output_orders: tuple[tuple[int, ...] | None, ...] | None = None
    probe_order: Literal["meta", "real", "zeros"] | None = None
    data_dependent_shape: bool = False

    def strategy(self) -> Strategy:
        """The strategy that these letters state."""
        # In order of first appearance: of candidates that cost the same, the earlier is chosen.
        letters = dict.fromkeys(chain.from_iterable(self.inputs))
        split = [self._split(letter) for letter in letters if letter is not None]
        possible = [candidate for candidate in split if candidate is not None]
        candidates = [self._replicated(), *possible, *self._partial()]
        extents = tuple([tuple(map(self._source, dims)) for dims in self.outputs])
        return Strategy(
            tuple(candidates),
            extents=extents,
            local=self.local,
            specialize=self.specialize,
            letters=self.inputs,
            elementwise=self.elementwise,
            full_reduction=self.full_reduction,
            output_orders=self.output_orders,
            probe_order=self.probe_order,
            data_dependent_shape=self.data_dependent_shape,
        )

    def _replicated(self) -> AxisStrategy:
        return AxisStrategy((_REPLICATE,) * len(self.inputs), (_REPLICATE,) * len(self.outputs))

    def _split(self, letter: Hashable) -> AxisStrategy | None:
        """The candidate that shards this letter; None if it may not be sharded."""
        if letter in self.unshardable:
            return None
        outputs: list[Placement] = []
        # One output that cannot be expressed rules the sharding out for all.
        for dims in self.outputs:
            if letter in dims:
                outputs.append(Shard(dims.index(letter)))
            elif letter in self.reduce:
                outputs.append(Partial(self.reduce[letter]))
            else:
                return None  # an output without the letter, and no reduction to complete it by
        summed = any(isinstance(p, Partial) for p in outputs)
        inputs: list[Placement] = []
        for index, dims in enumerate(self.inputs):
            if letter in dims:
                inputs.append(Shard(dims.index(letter)))
            else:
                # A replicated bias would be added once per coordinate, and the sum count it so.
                added = summed and index in self.bias_operands
                inputs.append(Partial() if added else _REPLICATE)
        # `Shard` stands for any kind of sharding here: `select` fills in the operands' own.
        return AxisStrategy(
            tuple(inputs), tuple(outputs), contiguous_only=letter in self.contiguous_only
        )

    def _partial(self) -> list[AxisStrategy]:
        """The candidates on which operands and outputs are partial."""
        groups = [(op, group) for op in _LINEAR_OPS for group in self.linear]
        # Moving elements commutes with every reduction, also with max and min.
        if self.preserves_partial:
            groups += [(op, tuple(range(len(self.inputs)))) for op in REDUCE_OPS]
        return [self._joint(op, {*group, *self.bias_operands}) for op, group in groups]

    def _joint(self, op: ReduceOp, joint: set[int]) -> AxisStrategy:
        """The candidate on which the operands in `joint` and all outputs are `Partial(op)`."""
        partial = Partial(op)
        inputs = [partial if i in joint else _REPLICATE for i in range(len(self.inputs))]
        return AxisStrategy(tuple(inputs), (partial,) * len(self.outputs))

    def _source(self, letter: Hashable | None) -> tuple[int, int] | None:
        """The first (operand, dim) with a letter, from which an output has its global extent."""
        if letter is None:
            return None
        for index, dims in enumerate(self.inputs):
            if letter in dims:
                return index, dims.index(letter)
        return None
