"""Searches for the path of stages that sends the fewest bytes.

Without partial placements there is one path: one move, of exactly what is missing. Partial sums
leave a choice: any part of what a rank has a term of may be reduced to it, and a partial target
accepts any values that add up. Candidates are compared by the bytes they send on average for even
shards, so the choice is made once for two tuples of placements and serves all shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice, product
from math import prod
from typing import NamedTuple

from vescale_dtensor._layout.placements import (
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    Sharded,
    StridedShard,
    is_flat,
)
from vescale_dtensor._redistribute.cost import CostModel
from vescale_dtensor._redistribute.stages import Stage, StagePath, reduction_groups, to_reduce
from vescale_dtensor._redistribute.states import (
    Dims,
    Placements,
    State,
    UnclippedShard,
    admits_shard,
    in_mesh_order,
    shards_of,
    without_trivial_axes,
)

_REPLICATE = Replicate()
# Enough for nearly every pair on three axes. Meshes of more axes take the first ones.
_MOST_CANDIDATES = 2000
_MOST_EVALUATED = 48


class AxisPath(NamedTuple):
    """Placements of one axis after the reductions, and after everything is sent."""

    after_reduction: Placement
    after_move: Placement


Candidate = tuple[AxisPath, ...]


class Cost(NamedTuple):
    """What a path sends, as a share of the whole for each rank, and its number of collectives."""

    sent: float
    collectives: int


@lru_cache(maxsize=4096)
def stages(
    source: Placements, target: Placements, sizes: tuple[int, ...], wide: tuple[bool, ...]
) -> tuple[Stage, ...]:
    """The stages of the cheapest path from `source` to `target`.

    Args:
        source: placements that fit the tensor.
        target: likewise.
        sizes: extent of each mesh axis.
        wide: for each dim, whether it has as many indices as the mesh has ranks.
    """
    source, target = without_trivial_axes(source, sizes), without_trivial_axes(target, sizes)
    return tuple(_Search(source, target, sizes, wide).best().stages())


class _Search:
    def __init__(
        self,
        source: Placements,
        target: Placements,
        sizes: tuple[int, ...],
        wide: tuple[bool, ...],
    ) -> None:
        self.source, self.target, self.sizes = source, target, sizes
        self.reduced = to_reduce(source, target)
        self.groups = reduction_groups(source, self.reduced)
        self.dims = _useful_dims(source, target, wide)
        self.ndim = len(wide)

    def best(self) -> StagePath:
        """The path that sends least, then the one of the fewest collectives, then the first."""
        choices = [self._choices(axis) for axis in range(len(self.sizes))]
        # Bounded: choices multiply over axes, and every rank waits for the first plan of a pair.
        candidates = list(islice(product(*choices), _MOST_CANDIDATES))
        if len(candidates) == 1 or self._holds_nothing():
            return next(path for path in map(self._path, candidates) if path is not None)
        placements = {p for axis in choices for choice in axis for p in choice}
        cost_model = CostModel(tuple(placements), self.sizes, self.ndim)
        # What a path sends at least is cheap to say. Most paths are never looked at closer.
        least = sorted(
            (self._least(candidate, cost_model.sizes), i) for i, candidate in enumerate(candidates)
        )
        best: tuple[Cost, int, StagePath] | None = None
        for looked_at, bound in enumerate(least):
            if best is not None and (best[:2] <= bound or looked_at >= _MOST_EVALUATED):
                break
            path = self._path(candidates[bound[1]])
            if path is None:
                continue
            found = self._cost(candidates[bound[1]], path, cost_model), bound[1], path
            best = found if best is None or found[:2] < best[:2] else best
        assert best is not None, "to reduce all and to move then is always a way"
        return best[2]

    def _holds_nothing(self) -> bool:
        """Whether some cut has no units: it fits only a dim of which there is nothing to send."""
        return any(
            isinstance(p, RaggedShard) and not any(p.local_units)
            for p in (*self.source, *self.target)
        )

    def _least(self, candidate: Candidate, sizes: tuple[int, ...]) -> Cost:
        """At least what a path sends, as a share of the whole, and its collectives."""
        sent, collectives, after_reduction = self._reducing(candidate, sizes)
        growth = _share([choice.after_move for choice in candidate], sizes) - after_reduction
        return Cost(round(sent + max(0.0, growth), 9), collectives + (growth > 1e-9))

    def _cost(self, candidate: Candidate, path: StagePath, cost_model: CostModel) -> Cost:
        sent, collectives, _ = self._reducing(candidate, cost_model.sizes)
        missing = cost_model.missing(path.after_reduction, path.after_move)
        return Cost(round(sent + missing, 9), collectives + (missing > 1e-9))

    def _reducing(self, candidate: Candidate, sizes: tuple[int, ...]) -> tuple[float, int, float]:
        """What is sent by reductions, in how many collectives, and what a rank holds then."""
        at = [
            choice.after_reduction if isinstance(before, Replicate) else before
            for choice, before in zip(candidate, self.source, strict=True)
        ]
        share, sent, collectives = _share(at, sizes), 0.0, 0
        for together in self.groups:
            for axes in together:
                members = prod(
                    sizes[a] for a in axes if isinstance(candidate[a].after_reduction, Sharded)
                )
                share /= members
                sent += share * (members - 1)
                collectives += members > 1
            for axes in together:
                members = prod(
                    sizes[a] for a in axes if isinstance(candidate[a].after_reduction, Replicate)
                )
                sent += 2 * share * (members - 1) / members
                collectives += members > 1
        return sent, collectives, share

    def _choices(self, axis: int) -> list[AxisPath]:
        """What an axis may be on the way; what changes least comes first."""
        before, after = self.source[axis], self.target[axis]
        if isinstance(before, Partial) and axis not in self.reduced:
            return [AxisPath(before, before)]
        if isinstance(before, Sharded):
            return [AxisPath(before, p) for p in self._ends(axis)]
        if isinstance(after, Partial):
            return self._between_reductions(axis)
        if isinstance(before, Replicate) and not (self.reduced and isinstance(after, Sharded)):
            return [AxisPath(_REPLICATE, after)]
        candidates: dict[Placement, None] = (
            {_REPLICATE: None} if isinstance(after, Replicate) else {}
        )
        if isinstance(after, Sharded):
            candidates[after] = None
        candidates |= dict.fromkeys(self._free_shards(axis, self.target, after))
        return [AxisPath(p, after) for p in (candidates | {_REPLICATE: None})]

    def _between_reductions(self, axis: int) -> list[AxisPath]:
        """For an axis that owes one reduction, or none, and will owe another."""
        ends = self._ends(axis)[1:]
        candidates = (
            dict.fromkeys([*ends, *self._free_shards(axis, self.target, _REPLICATE)])
            if ends
            else {}
        )
        apart = [AxisPath(p, q) for p in candidates for q in ends if p != q]
        return [AxisPath(_REPLICATE, _REPLICATE), *(AxisPath(p, p) for p in ends), *apart]

    def _ends(self, axis: int) -> list[Placement]:
        """What an axis may be before it is padded, or what it has to be."""
        before, after = self.source[axis], self.target[axis]
        if not isinstance(after, Partial):
            return [after]
        if after.reduce_op == "avg" and Partial("prod") in self.target:
            return [_REPLICATE]  # what is multiplied at the end may not be multiplied with itself
        ends: dict[Placement, None] = {_REPLICATE: None}
        if isinstance(before, Sharded):
            ends[before] = None
        return [*(ends | dict.fromkeys(self._free_shards(axis, self.source, before)))]

    def _free_shards(self, axis: int, layout: Placements, own: Placement) -> Iterator[Placement]:
        """Cuts that go inside of any others, even ones first.

        Args:
            axis: the axis that cuts.
            layout: whose pieces they may have to do with.
            own: its placement on this axis.
        """
        for dim in self.dims:
            yield Shard(dim)
        for dim in self.dims:
            shards = shards_of(in_mesh_order(layout), (dim,))
            outer = prod(self.sizes[a] for a, _ in shards if a < axis)
            if outer > 1:
                # What is left of the pieces when the outer cuts are undone.
                yield StridedShard(dim, outer)
            elif shards and shards[0] == (axis, own) and isinstance(own, Sharded):
                yield UnclippedShard(own)

    def _path(self, candidate: Candidate) -> StagePath | None:
        """The path through these placements, unless some cut does not fit there."""
        padded = [
            axis
            for axis, choice in enumerate(candidate)
            if isinstance(choice.after_move, Sharded) and isinstance(self.target[axis], Partial)
        ]
        after_move = in_mesh_order(tuple(choice.after_move for choice in candidate)).innermost(
            padded
        )
        after_reduction = tuple(choice.after_reduction for choice in candidate)
        path = StagePath.through(
            self.source, self.target, self.sizes, self.reduced, after_reduction, after_move
        )
        new = [
            axis
            for axis, p in enumerate(self.source)
            if not isinstance(p, Sharded) and isinstance(after_reduction[axis], Sharded)
        ]
        ends = in_mesh_order(self.target), in_mesh_order(self.source)
        fits = _fits(path.after_reduction, new, ends) and _fits(after_move, padded, ends)
        return path if fits else None


def _share(placements: Iterable[Placement], sizes: tuple[int, ...]) -> float:
    """What a rank holds, on average."""
    return 1.0 / prod(n for p, n in zip(placements, sizes, strict=True) if isinstance(p, Sharded))


def _fits(state: State, inserted: list[int], known: tuple[State, State]) -> bool:
    """Whether the cuts of some axes go inside of the others, for every shape."""
    at = state.replacing({axis: _REPLICATE for axis in inserted})
    for axis in [a for a in state.order if a in inserted]:
        shard = state.placements[axis]
        assert isinstance(shard, Sharded)
        fitting = [
            tuple(c for c in shards_of(layout, shard.cut_dims()) if c[0] < axis)
            for layout in known
            if layout.placements[axis] == shard
        ]
        if not any(admits_shard(at, shard, outer) for outer in fitting or [()]):
            return False
        at = at.replacing({axis: shard})
    return True


def _useful_dims(source: Placements, target: Placements, wide: tuple[bool, ...]) -> Dims:
    """Dims along which it can help to cut: those that are cut anyway, and one that is not."""
    shards = [p for p in (*source, *target) if isinstance(p, Sharded)]
    named = {d for p in shards for d in p.cut_dims()}
    flat = {d for p in shards if is_flat(p) for d in p.cut_dims()}
    spare = [d for d in range(len(wide)) if d not in named]
    best = [d for d in spare if wide[d]] or ([] if named else spare)
    # Even pieces where that is possible.
    return tuple(sorted([*sorted(named - flat), *best[:1]], key=lambda d: not wide[d]))
