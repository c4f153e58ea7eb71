"""Search for the path of stages that sends the fewest bytes.

Without partial placements there is one path: one move, of exactly what each rank lacks. Partial
placements leave a choice: any shard of the local tensor may be reduce-scattered to, and a partial
target accepts any values whose reduction is right. Candidates are compared by the bytes they send
on average for even shards. So the choice is made once for two tuples of placements, serves all
shapes, and is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice, product
from math import prod
from typing import NamedTuple

from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import (
    Partial,
    RaggedShard,
    Replicate,
    Shard,
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
# Candidates multiply over the axes: these bound how many are ranked and how many are measured. 2000
# covers nearly every pair of layouts on three axes; on more axes the first ones are used, and the
# one that always fits.
_MOST_CANDIDATES = 2000
_MOST_EVALUATED = 48


class AxisPath(NamedTuple):
    """Placements of one axis after the reductions, and after the move."""

    after_reduction: Placement
    after_move: Placement


Candidate = tuple[AxisPath, ...]


class PathCost(NamedTuple):
    """Bytes sent by a path, as a share of the global tensor per rank, and number of collectives."""

    sent: float
    collectives: int


# The key holds no shape and no rank: one entry serves all sizes of a batch.
@lru_cache(maxsize=4096)
def stages(
    source: Placements, target: Placements, sizes: tuple[int, ...], wide: tuple[bool, ...]
) -> tuple[Stage, ...]:
    """Return the stages of the cheapest path from `source` to `target`.

    Args:
        source: placements that fit the tensor.
        target: likewise.
        sizes: extent of each mesh axis.
        wide: for each dim, whether it has as many indices as the mesh has ranks.
    """
    source, target = without_trivial_axes(source, sizes), without_trivial_axes(target, sizes)
    return tuple(_Search(source, target, sizes, wide).best().stages())


class _Search:
    """One search: candidates per axis, their lower bounds, and the best path."""

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
        """Return the path that sends least; on a tie that of fewest collectives, else the first."""
        choices = [self._choices(axis) for axis in range(len(self.sizes))]
        # Bounded: choices multiply over axes, and all ranks wait for the first plan of a pair.
        candidates = list(islice(product(*choices), _MOST_CANDIDATES))
        # The bound may have excluded it, and of the others each may hold a shard that does not fit.
        if len(candidates) == _MOST_CANDIDATES:
            candidates.append(self._reduce_then_move())
        # With nothing to compare no cost model is needed. A ragged shard of no units at all fits
        # only an empty tensor, and the model's tensor is not empty.
        if len(candidates) == 1 or self._holds_nothing():
            return next(path for path in map(self._path, candidates) if path is not None)
        placements = {p for axis in choices for choice in axis for p in choice}
        cost_model = CostModel(tuple(placements), self.sizes, self.ndim)
        # Branch and bound: a lower bound is cheap, an exact cost is not, and candidates are looked
        # at in the order of their bounds.
        least = sorted(
            (self._least(candidate, cost_model.sizes), i) for i, candidate in enumerate(candidates)
        )
        best: tuple[PathCost, int, StagePath] | None = None
        for looked_at, bound in enumerate(least):
            # Nothing that follows can be better, or enough were measured. The index breaks ties, so
            # all ranks choose alike.
            if best is not None and (best[:2] <= bound or looked_at >= _MOST_EVALUATED):
                break
            path = self._path(candidates[bound[1]])
            if path is None:
                continue
            found = self._cost(candidates[bound[1]], path, cost_model), bound[1], path
            best = found if best is None or found[:2] < best[:2] else best
        assert best is not None, "to reduce all and to move then is always a way"
        return best[2]

    def _reduce_then_move(self) -> Candidate:
        """Return the candidate that always fits: it has no shards but those of the two layouts."""
        candidate = []
        for axis, (before, after) in enumerate(zip(self.source, self.target, strict=True)):
            if isinstance(before, Partial) and axis not in self.reduced:
                candidate.append(AxisPath(before, before))
                continue
            reduced = before if isinstance(before, Sharded) else _REPLICATE
            candidate.append(AxisPath(reduced, _REPLICATE if isinstance(after, Partial) else after))
        return tuple(candidate)

    def _holds_nothing(self) -> bool:
        """Whether some ragged shard has no units: it fits only empty dims, so nothing is sent."""
        return any(
            isinstance(p, RaggedShard) and not any(p.local_units)
            for p in (*self.source, *self.target)
        )

    def _least(self, candidate: Candidate, sizes: tuple[int, ...]) -> PathCost:
        """Lower bound of what a path sends, and of its number of collectives."""
        sent, collectives, after_reduction = self._reducing(candidate, sizes)
        # A rank has to receive at least what it owns more of at the end.
        growth = _share([choice.after_move for choice in candidate], sizes) - after_reduction
        # Rounded, so that float noise cannot make equal costs differ and hide a tie.
        return PathCost(round(sent + max(0.0, growth), 9), collectives + (growth > 1e-9))

    def _cost(self, candidate: Candidate, path: StagePath, cost_model: CostModel) -> PathCost:
        """Cost of a path: its reductions, and exactly what the move has to send."""
        sent, collectives, _ = self._reducing(candidate, cost_model.sizes)
        missing = cost_model.missing(path.after_reduction, path.after_move)
        return PathCost(round(sent + missing, 9), collectives + (missing > 1e-9))

    def _reducing(self, candidate: Candidate, sizes: tuple[int, ...]) -> tuple[float, int, float]:
        """What the reductions send, in how many collectives, and what a rank holds after them."""
        # Narrowing sends nothing and is done first, so its shards count from the start.
        at = [
            choice.after_reduction if isinstance(before, Replicate) else before
            for choice, before in zip(candidate, self.source, strict=True)
        ]
        share, sent, collectives = _share(at, sizes), 0.0, 0
        for together in self.groups:
            for axes in together:
                # A reduce-scatter sends all but the own part: (n - 1) times the
                # result.
                members = prod(
                    sizes[a] for a in axes if isinstance(candidate[a].after_reduction, Sharded)
                )
                share /= members
                sent += share * (members - 1)
                collectives += members > 1
            for axes in together:
                # An all-reduce is a reduce-scatter and an all-gather of what the scatters have
                # left.
                members = prod(
                    sizes[a] for a in axes if isinstance(candidate[a].after_reduction, Replicate)
                )
                sent += 2 * share * (members - 1) / members
                collectives += members > 1
        return sent, collectives, share

    def _choices(self, axis: int) -> list[AxisPath]:
        """Return the placements that an axis may have on the way, least changes first."""
        before, after = self.source[axis], self.target[axis]
        # Stays partial (or is only scaled): no reduction, no move.
        if isinstance(before, Partial) and axis not in self.reduced:
            return [AxisPath(before, before)]
        # A shard can only be moved: nothing about it changes before the reductions are done.
        if isinstance(before, Sharded):
            return [AxisPath(before, p) for p in self._ends(axis)]
        if isinstance(after, Partial):
            return self._between_reductions(axis)
        # With nothing to reduce, narrowing early gains nothing over slicing in the move.
        if isinstance(before, Replicate) and not (self.reduced and isinstance(after, Sharded)):
            return [AxisPath(_REPLICATE, after)]
        # A dict for its order: the first of equally cheap candidates wins, on every rank the same.
        candidates: dict[Placement, None] = (
            {_REPLICATE: None} if isinstance(after, Replicate) else {}
        )
        if isinstance(after, Sharded):
            candidates[after] = None
        candidates |= dict.fromkeys(self._free_shards(axis, self.target, after))
        return [AxisPath(p, after) for p in (candidates | {_REPLICATE: None})]

    def _between_reductions(self, axis: int) -> list[AxisPath]:
        """Choices for a reduced or replicated axis that is partial in the target."""
        # The first end is `Replicate`, which leads the result below.
        ends = self._ends(axis)[1:]
        candidates = (
            dict.fromkeys([*ends, *self._free_shards(axis, self.target, _REPLICATE)])
            if ends
            else {}
        )
        apart = [AxisPath(p, q) for p in candidates for q in ends if p != q]
        return [AxisPath(_REPLICATE, _REPLICATE), *(AxisPath(p, p) for p in ends), *apart]

    def _ends(self, axis: int) -> list[Placement]:
        """Return the placements that an axis may have after the move, before it is padded."""
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
        """Yield shards that go inside of any others; even ones first.

        Args:
            axis: the axis that shards.
            layout: placements whose local tensors the shards should match, to send less.
            own: the placement of `axis` in it.
        """
        for dim in self.dims:
            yield Shard(dim)
        # These are placed inside the shards of other axes, and still match what `layout` gives the
        # coordinates of this axis, so what follows has less to send.
        for dim in self.dims:
            shards = shards_of(in_mesh_order(layout), (dim,))
            outer = prod(self.sizes[a] for a, _ in shards if a < axis)
            if outer > 1:
                # The outer shards repeat this axis' pattern `outer` times along the dim.
                yield StridedShard(dim, outer)
            elif shards and shards[0] == (axis, own) and isinstance(own, Sharded):
                yield UnclippedShard(own)

    def _path(self, candidate: Candidate) -> StagePath | None:
        """Return the path through these placements; None if some shard does not fit there."""
        padded = [
            axis
            for axis, choice in enumerate(candidate)
            if isinstance(choice.after_move, Sharded) and isinstance(self.target[axis], Partial)
        ]
        # Padding undoes these shards from the inside out, so they have to be the innermost.
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
    """Return the share of the tensor that a rank holds, on average."""
    return 1.0 / prod(n for p, n in zip(placements, sizes, strict=True) if isinstance(p, Sharded))


def _fits(state: State, inserted: list[int], known: tuple[State, State]) -> bool:
    """Whether the shards of some axes go inside of the others, for every shape.

    Args:
        state: the state with all shards.
        inserted: the axes whose shards are new in it.
        known: states of layouts that fit; a shard that one of them has also fits inside the same
            outer shards here.
    """
    # Without the new shards first; they are added from the outside in, each checked against what is
    # there by then.
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
    """Return dims along which sharding can help: those sharded anyway, and one that is not."""
    shards = [p for p in (*source, *target) if isinstance(p, Sharded)]
    named = {d for p in shards for d in p.cut_dims()}
    flat = {d for p in shards if is_flat(p) for d in p.cut_dims()}
    # One free dim is as good as another; a dim with fewer indices than ranks would leave some ranks
    # without work.
    spare = [d for d in range(len(wide)) if d not in named]
    # A dim of a flattened group is not offered: it is no dim of the local tensor.
    best = [d for d in spare if wide[d]] or ([] if named else spare)
    # Wide dims first, for even shards where that is possible.
    return tuple(sorted([*sorted(named - flat), *best[:1]], key=lambda d: not wide[d]))
