"""Compares the collectives of all ranks, and unites what those need on any rank.

Ranks may have different graphs: where a gradient is masked on some of them, one has a `zeros_like`
more, sizes of shards differ, and what depends on what does as well. So a rank that decided from its
own graph could start collectives in another order than the others, and all would wait for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, Final

from vescale_comm.agreement import Facts, gather_texts, require_alike

from vescale_parallel._errors import DisagreementError, GraphError
from vescale_parallel._graph.collectives import Collective

_HEAD: Final = "graphs of ranks would start different collectives:"
_ADVICE: Final = {
    "option": "Pass the same on all ranks (of memory that is free: the least of all).",
    "collective": "Trace the same step, for batches of the same layout, on all ranks.",
}


@dataclass(frozen=True)
class Entry:
    """A collective, as all ranks see it.

    Attributes:
        kind, how, dtype, parameter, direction: see `Collective`.
        group: a number, by the order in which groups are first used.
        members: of the group.
        bytes: the most that any rank has.
        even: of an exchange, whether every rank sends equal parts.
    """

    kind: str
    how: str
    dtype: str
    parameter: str
    direction: str
    group: int
    members: int
    bytes: int
    even: bool = False

    def __str__(self) -> str:
        what = f"{self.kind}({self.how})" if self.how else self.kind
        of = f" of '{self.parameter}'" if self.parameter else ""
        return f"{what}{of} over group {self.group} of {self.members}, {self.dtype}"


@dataclass(frozen=True)
class Agreed:
    """The same on all ranks.

    Attributes:
        entries: collectives in the order in which they are started.
        needs: for each, those that it waits for on any rank, by index, transitively.
    """

    entries: tuple[Entry, ...]
    needs: tuple[frozenset[int], ...]


def agreed(
    found: Sequence[Collective],
    needs: Sequence[frozenset[int]],
    fault: str = "",
    options: Mapping[str, object] | None = None,
) -> Agreed:
    """Compare the collectives of all ranks, and unite what they need. Collective.

    Args:
        found: of this rank, in order.
        needs: of each of them, by index.
        fault: why there are none to be told.
        options: what else ranks decide by: compared as `repr` writes it.

    Raises:
        GraphError: on every rank, if one has a fault.
        DisagreementError: on every rank, if ranks have different collectives, or other options.
    """
    # By number, since ranks of other groups have other members: rank 0 says (0, 1), rank 2 (2, 3),
    # and it is the same collective. `_check_groups` looks at the members.
    groups: dict[tuple[int, ...], int] = {}
    own = []
    for one in found:
        dtype = str(one.dtype).removeprefix("torch.")
        group = groups.setdefault(one.ranks, len(groups)), len(one.ranks)
        what = one.kind, one.how, dtype, one.parameter, one.direction
        own.append(Entry(*what, *group, one.bytes, one.even))
    mine = {
        "entries": [asdict(one) for one in own],
        "elements": [prod(one.shape) for one in found],
        "needs": [sorted(one) for one in needs],
        "groups": [*groups],
    }
    given = {name: repr(one) for name, one in (options or {}).items()}
    # Without bytes and shapes, in which ranks with uneven shards differ.
    told = compare_reports(mine, given, [f"{one.direction} {one}".lstrip() for one in own], fault)
    _check_groups(told)
    every = [[Entry(**one) for one in rank["entries"]] for rank in told]
    # The most of all ranks: where shards are uneven, each would fill buckets to another size.
    entries = tuple(
        replace(same[0], bytes=max(one.bytes for one in same), even=all(one.even for one in same))
        for same in zip(*every, strict=True)
    )
    # What one rank waits for, all do: an order that suits them all suits each.
    united = tuple(
        frozenset(need for one in told for need in one["needs"][at]) for at in range(len(entries))
    )
    return Agreed(entries, united)


def compare_reports(
    mine: Mapping[str, Any],
    options: Mapping[str, str],
    starts: Sequence[str],
    fault: str,
    by: str = "",
) -> list[dict[str, Any]]:
    """What each rank tells, if all have the same options and start the same. Collective.

    Args:
        mine: what this rank tells besides.
        options: what ranks decide by.
        starts: the collectives of this rank, in words.
        fault: why there are none.
        by: the beginning of an error about a fault.

    Raises:
        GraphError: on every rank, if one has a fault.
        DisagreementError: on every rank, if ranks have different collectives, or other options.
    """
    held = {
        "option": options,
        "collective": {f"number {at}": one for at, one in enumerate(starts)},
    }
    told = gather_reports({**mine, "facts": held, "fault": fault})
    # Only now, although this rank knew its own fault before: all have to come to the exchange.
    for rank, one in enumerate(told):
        if one["fault"]:
            raise GraphError(f"{by}rank {rank}: {one['fault']}")
    facts = Facts(held, _HEAD, _ADVICE, DisagreementError)
    require_alike(facts, [one["facts"] for one in told])
    return told


def gather_reports(mine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each rank says. Collective."""
    # What this rank says comes back by way of JSON, too: tuples of its own would differ from the
    # lists of others.
    return [json.loads(one) for one in gather_texts(json.dumps(mine))]


def _check_groups(told: Sequence[dict[str, Any]]) -> None:
    """Members of a group mean the same group, and give equally much, where a collective asks it."""
    for rank, one in enumerate(told):
        for number, ranks in enumerate(one["groups"]):
            others = [other for other in ranks if told[other]["groups"][number] != ranks]
            if others or rank not in ranks:
                raise DisagreementError(
                    f"group {number} of the graph has the ranks {ranks} on rank {rank}, and others "
                    f"on rank {(others or [rank])[0]}. Make meshes in the same way on all ranks"
                )
        for at, (entry, count) in enumerate(zip(one["entries"], one["elements"], strict=True)):
            # Beside the first member of this rank's own group: others have shards of other sizes.
            first = told[one["groups"][entry["group"]][0]]["elements"][at]
            if entry["kind"] != "all_to_all" and count != first:
                raise DisagreementError(
                    f"collective number {at} of the graph ({Entry(**entry)}) has {count} "
                    f"elements on rank {rank}, and {first} on another member of its group"
                )
