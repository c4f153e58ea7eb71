"""Compares the collectives of all ranks, and unites what those need on any rank.

Ranks may have different graphs: where a gradient is masked on some of them, one has a `zeros_like`
more, sizes of shards differ, and what depends on what does as well. So a rank that decided from its
own graph could start collectives in another order than the others, and all would wait for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from vescale_comm.agreement import gather_texts

from vescale_parallel._common.agreement import require_alike
from vescale_parallel._errors import DisagreementError, GraphError
from vescale_parallel._graph.collectives import Collective

HEAD: Final = "graphs of ranks would start different collectives:"
ADVICE: Final = {
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
    rows = [
        [
            *(one.kind, one.how, str(one.dtype).removeprefix("torch."), one.parameter),
            one.direction,
            *(groups.setdefault(one.ranks, len(groups)), len(one.ranks)),
            *(one.bytes, prod(one.shape), one.even),
        ]
        for one in found
    ]
    mine: dict[str, object] = {
        "rows": rows,
        "needs": [sorted(one) for one in needs],
        "groups": [*groups],
    }
    # Told, and not raised: the others would wait for this rank.
    mine["fault"] = fault
    mine["facts"] = {
        "option": {name: repr(one) for name, one in (options or {}).items()},
        # Without bytes and shapes, in which ranks with uneven shards differ.
        "collective": {
            f"number {at}": f"{row[4]} {_entry(row, 0)}".lstrip() for at, row in enumerate(rows)
        },
    }
    told = [json.loads(one) for one in gather_texts(json.dumps(mine))]
    # Only now, although this rank knew its own fault before: all have to come to the exchange.
    for rank, one in enumerate(told):
        if one["fault"]:
            raise GraphError(f"rank {rank}: {one['fault']}")
    require_alike([one["facts"] for one in told], head=HEAD, advice=ADVICE)
    _check_groups(told)
    # The most of all ranks: where shards are uneven, each would fill buckets to another size.
    entries = tuple(
        _entry(
            row,
            max(one["rows"][at][7] for one in told),
            even=all(one["rows"][at][9] for one in told),
        )
        for at, row in enumerate(told[0]["rows"])
    )
    # What one rank waits for, all do: an order that suits them all suits each.
    united = tuple(
        frozenset(need for one in told for need in one["needs"][at]) for at in range(len(entries))
    )
    return Agreed(entries, united)


def _entry(row: Sequence[Any], size: int, *, even: bool = False) -> Entry:
    kind, how, dtype, parameter, direction, group, members = row[:7]
    return Entry(kind, how, dtype, parameter, direction, group, members, size, even)


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
        for at, row in enumerate(one["rows"]):
            # Beside the first member of this rank's own group: others have shards of other sizes.
            first = told[one["groups"][row[5]][0]]["rows"][at]
            if row[0] != "all_to_all" and row[8] != first[8]:
                raise DisagreementError(
                    f"collective number {at} of the graph ({_entry(row, 0)}) has {row[8]} "
                    f"elements on rank {rank}, and {first[8]} on another member of its group"
                )
