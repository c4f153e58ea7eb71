"""Plans which collectives are merged, and their order, from what all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Final

from vescale_parallel._errors import GraphError
from vescale_parallel._graph.agreement import Agreed, Entry

BUCKETED: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_SMALL: Final = 1024  # bytes: nobody notices that they live longer
_SUMS: Final = ("all_reduce", "reduce_scatter")
Order = tuple[int, ...]
Buckets = tuple[tuple[int, ...], ...]
"""Indices of collectives: each tuple is one collective of the scheduled graph."""


def early(agreed: Agreed, *, ahead: bool = True) -> Order:
    """An order in which sums of gradients come as soon as they can, and gathers one earlier.

    Without `ahead`, gathers come where they were: behind the sums of what was used before.

    In a traced step sums stand after the whole backward, and so after the collectives of tensor
    parallelism, which one order of all would make them wait for. They are those that nothing else
    needs, or that a norm of all of them does.
    """
    # By what any rank needs: a sum that is free here may be waited for elsewhere.
    needed = frozenset().union(*agreed.needs)
    late: dict[int, set[int]] = {}  # and what each still has to come behind
    for at, entry in enumerate(agreed.entries):
        total = entry.direction == "total"
        sums = entry.kind in _SUMS and (total or at not in needed)
        # An exchange of gradients, which each rank then adds up by itself.
        if sums or (entry.kind == "all_to_all" and total):
            late[at] = set(agreed.needs[at])
    order: list[int] = []
    # In the order of the trace, which is one in which each has what it needs.
    rest = [at for at in range(len(agreed.entries)) if at not in late]
    if not any(is_free(agreed, at) for at in rest):
        # Before all others what is small and needs none of them: how many tokens count, say, that
        # the loss divides by. Not where gathers run ahead: it would be ahead in their place.
        rest.sort(key=lambda at: not _is_ready(agreed, at))
    waiting = late
    new = [at for at, missing in waiting.items() if not missing]
    while new or rest:
        # What the others wait for goes first; a sum has nobody that waits for it yet.
        new = new or [rest.pop(0)]
        order += new
        waiting = {at: missing for at, missing in waiting.items() if at not in new}
        for missing in waiting.values():
            missing.difference_update(new)
        new = [at for at, missing in waiting.items() if not missing]
    return _prefetched(agreed, order) if ahead else tuple(order)


def _is_ready(agreed: Agreed, at: int) -> bool:
    """Whether a small sum can be started before any other collective is."""
    entry = agreed.entries[at]
    return entry.kind == "all_reduce" and entry.bytes <= _SMALL and not agreed.needs[at]


def is_free(agreed: Agreed, at: int) -> bool:
    """Whether a collective gathers parameters, which are there from the beginning."""
    entry = agreed.entries[at]
    return entry.kind == "all_gather" and bool(entry.parameter) and not agreed.needs[at]


def _prefetched(agreed: Agreed, order: Sequence[int]) -> Order:
    """Each gather of parameters behind the one before: it travels while that one is used.

    The first one for the backward comes behind all that the forward and the loss wait for: before
    them, it would have to live at the loss, where most else lives as well.
    """
    gathers = [at for at in order if is_free(agreed, at)]
    # Which gather starts right behind which: one is ahead of the one that is used.
    following = dict(pairwise(gathers))
    last = [at for at in order if agreed.entries[at].direction == "forward"][-1:]
    for one, other in pairwise(gathers):
        directions = agreed.entries[one].direction, agreed.entries[other].direction
        if directions == ("forward", "backward") and order.index(last[0]) < order.index(other):
            del following[one]
            following[last[0]] = other
    found: list[int] = []
    done: set[int] = set()
    for at in order:
        wanted = [at, following[at]] if at in following else [at]
        found += [one for one in wanted if one not in done]
        done.update(wanted)
    return tuple(found)


def by_size(agreed: Agreed, order: Order, caps: Mapping[int, int], *, exact: bool) -> Buckets:
    """Merge neighbours of one kind, group and dtype, up to a number of bytes.

    `caps`: these, by the number of members.
    """

    def cap(at: int) -> int:
        return caps[agreed.entries[at].members]

    return _merged(agreed, order, lambda at: _key(agreed.entries[at]), cap, exact=exact)


def by_parameters(
    agreed: Agreed, order: Order, plan: Sequence[str | Sequence[str]], *, exact: bool
) -> Buckets:
    """Merge the collectives of parameters that one entry of a plan names, by glob or module.

    Raises:
        GraphError: an entry that no collective's parameter matches.
    """
    chosen: dict[int, int] = {}
    for number, patterns in enumerate(plan):
        wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        for at, entry in enumerate(agreed.entries):
            if entry.parameter and any(_matches(entry.parameter, one) for one in wanted):
                chosen.setdefault(at, number)
        if number not in chosen.values():
            known = sorted({one.parameter for one in agreed.entries if one.parameter})
            raise GraphError(
                f"buckets: {list(wanted)} is no parameter, module or glob that the graph sums or "
                f"gathers{' first' if known else ''}; there are {', '.join(known[:8]) or 'none'}"
            )
    keys = {at: (number, _key(agreed.entries[at])) for at, number in chosen.items()}
    return _merged(agreed, order, keys.get, None, exact=exact)


def _matches(parameter: str, pattern: str) -> bool:
    return fnmatchcase(parameter, pattern) or parameter.startswith(f"{pattern}.")


def _key(entry: Entry) -> tuple[object, ...]:
    # Gathered for the forward and for the backward are apart: in between, memory is given back.
    gathers = entry.direction if entry.kind == "all_gather" else ""
    # What is equal here can travel as one message, and is equal on all ranks.
    return entry.kind, entry.how, entry.dtype, entry.group, gathers


def _merged(
    agreed: Agreed,
    order: Order,
    key_of: Callable[[int], object],
    cap: Callable[[int], int] | None,
    *,
    exact: bool,
) -> Buckets:
    """Fill buckets in order; a bucket goes where its last member was.

    One of gathers that need nothing goes where the first was.
    """
    # By what travels together, the bucket that is being filled. What does not fit starts another
    # one, so that buckets are runs of neighbours.
    open_: dict[object, list[int]] = {}
    filled: list[list[int]] = []
    place = {at: position for position, at in enumerate(order)}
    for at in order:
        key, entry = key_of(at), agreed.entries[at]
        # Without a key (no entry of the user's plan names it) it travels alone.
        bucket = open_.get(key) if key is not None and _can_travel(entry, exact) else None
        size = sum(agreed.entries[one].bytes for one in bucket or ()) + entry.bytes
        fits = cap is None or size <= cap(at)
        if bucket is not None and fits:
            free = all(is_free(agreed, one) for one in (*bucket, at))
            if free or _may_wait(agreed, order, place, bucket, at):
                bucket.append(at)
                continue
        bucket = [at]
        filled.append(bucket)
        if key is not None and _can_travel(entry, exact):
            open_[key] = bucket

    return in_place(agreed, order, filled)


def in_place(agreed: Agreed, order: Order, buckets: Sequence[Sequence[int]]) -> Buckets:
    """Buckets in the order in which they are started."""
    place = {at: position for position, at in enumerate(order)}

    def where(bucket: Sequence[int]) -> int:
        free = all(is_free(agreed, one) for one in bucket)
        return place[bucket[0] if free else bucket[-1]]

    return tuple(tuple(one) for one in sorted(buckets, key=where))


def halved(agreed: Agreed, order: Order, buckets: Buckets, at: Collection[int]) -> Buckets:
    """Cut some buckets in two; each half goes where a bucket of its members would be."""
    found: list[tuple[int, ...]] = []
    for number, bucket in enumerate(buckets):
        middle = (len(bucket) + 1) // 2 if number in at else len(bucket)
        found += [part for part in (bucket[:middle], bucket[middle:]) if part]
    return in_place(agreed, order, found)


def neighbours(agreed: Agreed, merged: Buckets, buckets: Buckets) -> list[tuple[Buckets, Buckets]]:
    """Pairs that one bucket of `merged` was cut into, and the buckets with a pair put together.

    What is in the way of a bound is one end of a bucket; halves of the rest may still travel
    together. Reductions come first, of each kind the small ones.
    """
    pairs: list[Buckets] = []
    for whole in merged:
        place = {at: position for position, at in enumerate(whole)}
        parts = sorted((one for one in buckets if one[0] in place), key=lambda one: place[one[0]])
        pairs += pairwise(parts)

    def worth(pair: Buckets) -> tuple[bool, int]:
        size = sum(agreed.entries[at].bytes for one in pair for at in one)
        return agreed.entries[pair[0][0]].kind == "all_gather", size

    return [
        (pair, (*(one for one in buckets if one not in pair), pair[0] + pair[1]))
        for pair in sorted(pairs, key=worth)
    ]


def _can_travel(entry: Entry, exact: bool) -> bool:
    """Whether a collective may be a part of a larger one."""
    if entry.kind not in BUCKETED or (entry.kind == "all_to_all" and not entry.even):
        return False
    # Where three or more floats are added, a backend's order of them may depend on their place.
    sums = entry.how in ("sum", "avg", "product") and "int" not in entry.dtype
    return not (exact and sums and entry.members > 2)


def _may_wait(
    agreed: Agreed, order: Order, place: dict[int, int], bucket: Sequence[int], last: int
) -> bool:
    """Whether all of a bucket may be started where the last one is: nobody before needs any."""
    members = {*bucket}
    between = order[place[bucket[0]] : place[last] + 1]
    return not any(agreed.needs[at] & members for at in between)
