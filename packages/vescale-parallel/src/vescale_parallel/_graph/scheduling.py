"""`schedule`: the collectives of a graph merged and reordered, alike on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, NamedTuple

from torch import fx
from vescale_comm.agreement import gather_numbers, gather_texts

from vescale_parallel._common.messages import human_bytes, table
from vescale_parallel._cost import Link
from vescale_parallel._errors import GraphError
from vescale_parallel._graph import collective_plan
from vescale_parallel._graph.agreement import Agreed, agreed
from vescale_parallel._graph.budget import Bytes, bytes_of
from vescale_parallel._graph.collectives import Collective, collectives, dependencies, needs
from vescale_parallel._graph.node_order import Waits
from vescale_parallel._graph.rewrite import rewrite_graph
from vescale_parallel._memory.tracing import Tracing

Wanted = Literal["auto"] | Sequence[str | Sequence[str]] | None
CAP_BYTES: Final = 25 * 2**20
_SHARE: Final = 0.1  # of a bucket's time that latency may take
_JOINS: Final = 16  # tries to put halves of buckets together again: each makes the graph anew


@dataclass(frozen=True)
class Schedule:
    """A graph whose communication is scheduled.

    Attributes:
        graph_module: it, for `Joint.running` or to be called; `graph_module` of the step stays.
        agreed: the collectives of the graph as it was, the same on all ranks.
        buckets: for each collective of the scheduled graph, in the order in which they are started,
            the indices of those that travel in it.
        peak: bytes that live at most while it runs, simulated, without inputs.
        peak_before: the same, of the graph as it was.
    """

    graph_module: fx.GraphModule
    agreed: Agreed
    buckets: collective_plan.Buckets
    peak: int
    peak_before: int

    def __str__(self) -> str:
        rows = []
        for bucket in self.buckets:
            members = [self.agreed.entries[at] for at in bucket]
            size = sum(one.bytes for one in members)
            names = [one.parameter for one in members if one.parameter]
            named = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
            first = members[0]
            rows.append(
                [first.kind, str(first.members), human_bytes(size), str(len(members)), named]
            )
        header = ["collective", "members", "bytes", "merged", "of"]
        return (
            f"{table(header, rows, right=header[1:4])}\n\n{len(self.agreed.entries)} collectives "
            f"in {len(self.buckets)}; most alive {human_bytes(self.peak)}, before "
            f"{human_bytes(self.peak_before)}"
        )


def schedule(
    graph: fx.GraphModule,
    *,
    buckets: Wanted = "auto",
    cap_bytes: Bytes = CAP_BYTES,
    link: Link | None = None,
    overlap: bool = True,
    ahead_bytes: Bytes | None = None,
    memory_bytes: Bytes | None = None,
    exact: bool = False,
) -> Schedule:
    """Merge and reorder the collectives of a graph. Collective: all ranks call it alike.

    All-reduces, all-gathers and reduce-scatters of one group, dtype and reduction may travel
    together where none needs another. Sums that nothing else waits for (those of gradients) start
    right after what they add up; everybody starts collectives in one order, which is decided from
    what all ranks tell each other, never from one rank's graph. Results are bitwise those of the
    graph as it was; where floats of three or more ranks are added, a backend may add the parts of a
    merged sum in another order (`exact`).

    Args:
        graph: of `vescale_dtensor.joint`, or of `make_fx` with functional collectives. It stays.
        buckets: `"auto"`: neighbours, up to a size; a list of modules, or of globs of parameters,
            each of them (or each list of them) a bucket; None: none.
        cap_bytes: of an automatic bucket. Bytes are numbers, or text such as "25MiB".
        link: in place of `cap_bytes`: buckets as small as the link carries them well, which is
            where latency takes a tenth of the time.
        overlap: start early and wait late. Without it, merged collectives stand where the last of
            them stood.
        ahead_bytes: of collectives that may be under way before anything needs them; None: one
            gather ahead of what is in use, about a unit.
        memory_bytes: what may live at most while the graph runs, without inputs. What is started
            early is started later where more would live; buckets of which something lives there are
            halved, until it fits on all ranks, and halves put together again that fit; then nothing
            is gathered ahead; and at last nothing is moved. "traced": as much as the graph as it
            was takes, or the least that is found with something moved. None: any number.
        exact: leave apart what is added up over three or more ranks in floating point.

    Raises:
        DisagreementError: on every rank, if their collectives, or these arguments, differ.
        GraphError: on every rank, if no schedule fits into `memory_bytes`; collectives of an
            unknown kind; `buckets` that match nothing; what says no number of bytes.
    """
    options: dict[str, object] = {"buckets": buckets, "cap_bytes": cap_bytes, "link": link}
    options |= {"overlap": overlap, "ahead_bytes": ahead_bytes, "exact": exact}
    options["memory_bytes"] = memory_bytes
    # A fault of this rank is raised in `agreement`, on all ranks: the others are on their way
    # there.
    limits, wrong = _limits(cap_bytes, ahead_bytes, memory_bytes)
    tracing = Tracing()
    found, waits, before, fault = _seen(graph, tracing)
    known = agreed(found, needs(found, waits), wrong or fault, options)
    orders = [tuple(range(len(known.entries)))]
    if overlap:
        orders = [collective_plan.early(known), collective_plan.early(known, ahead=False)]
    bound = before if memory_bytes == "traced" else limits.memory
    tried = [
        _Try(_buckets(known, order, buckets, limits.cap, link, exact), order, overlap)
        # Without a bound the first one is taken.
        for order in (orders if bound is not None else orders[:1])
    ]
    # The graph as it was: nothing merged, nothing moved. It may fit where no other order does.
    if limits.memory is not None:
        order = tuple(range(len(known.entries)))
        tried.append(_Try(tuple((at,) for at in order), order, moved=False))
    best, least = _least(graph, known, waits, before, tried, limits.ahead, bound, tracing)
    if least and limits.memory is not None:
        raise _too_little(limits.memory, least, _highest(before))
    return best


def _too_little(memory: int, least: int, before: int) -> GraphError:
    return GraphError(
        f"no schedule of the graph lives in {memory} bytes on all ranks: the least that was found "
        f"is {memory + least}, and the graph as it was takes {before}"
    )


class _Try(NamedTuple):
    """Buckets, the order of collectives that they were made of, and whether nodes may be moved."""

    buckets: collective_plan.Buckets
    order: collective_plan.Order
    moved: bool


def _least(
    graph: fx.GraphModule,
    known: Agreed,
    waits: Waits,
    before: int,
    tried: Sequence[_Try],
    ahead_bytes: int | None,
    bound: int | None,
    tracing: Tracing,
) -> tuple[Schedule, int]:
    """The first schedule within the bound, or the one that passes it least; and by how much.

    Of each that passes it, buckets that are in the way are halved until none is.

    Collective: all ranks take the same one.
    """

    def made_of(
        rest: collective_plan.Buckets, moved: bool
    ) -> tuple[Schedule, int, Collection[int]]:
        bounds = {"ahead_bytes": ahead_bytes, "memory_bytes": bound}
        made, peak, alive = rewrite_graph(
            graph, waits, rest, overlap=moved, tracing=tracing, **bounds
        )
        # Peaks differ over ranks. Each takes the number of the one that is worst off, so that
        # all stop at the same candidate, and none goes on to a collective alone.
        over = _highest(peak if bound is None else max(0, peak - bound))
        return Schedule(made, known, rest, peak, before), over, alive

    best: Schedule | None = None
    least = 0
    for one in tried:
        rest: collective_plan.Buckets | None = one.buckets
        while rest is not None:
            found, over, alive = made_of(rest, one.moved)
            if best is None or over < least:
                best, least = found, over
            if bound is None:
                return found, over
            if over == 0:
                return _joined(found, one, partial(made_of, moved=one.moved)), 0
            rest = _smaller(known, one.order, rest, alive)
    assert best is not None
    return best, least


def _joined(
    found: Schedule,
    of: _Try,
    made_of: Callable[[collective_plan.Buckets], tuple[Schedule, int, Collection[int]]],
) -> Schedule:
    """Put halves of buckets together again, as long as all ranks stay within the bound.

    Collective: ranks try the same, and keep what fits on all of them.
    """
    refused: set[collective_plan.Buckets] = set()
    for _ in range(_JOINS):
        pairs = collective_plan.neighbours(found.agreed, of.buckets, found.buckets)
        new = next((one for one in pairs if one[0] not in refused), None)
        if new is None:
            break
        pair, buckets = new
        made, over, _ = made_of(collective_plan.in_place(found.agreed, of.order, buckets))
        if over:
            # By the pair, which comes up again after each other one that is joined.
            refused.add(pair)
        else:
            found = made
    return found


def _smaller(
    known: Agreed,
    order: collective_plan.Order,
    buckets: collective_plan.Buckets,
    alive: Collection[int],
) -> collective_plan.Buckets | None:
    """Halve the buckets that are in the way on any rank; None if there are none. Collective."""
    # Of all ranks together: a bucket that fits here may be in the way elsewhere, and all have to
    # cut the same ones.
    told = gather_texts(json.dumps(sorted(alive)))
    every = {at for one in told for at in json.loads(one)}
    return collective_plan.halved(known, order, buckets, every) if every else None


@dataclass(frozen=True)
class _Limits:
    """Bytes: of an automatic bucket, of what is under way, and of all that lives."""

    cap: int = CAP_BYTES
    ahead: int | None = None
    memory: int | None = None


def _limits(
    cap_bytes: Bytes, ahead_bytes: Bytes | None, memory_bytes: Bytes | None
) -> tuple[_Limits, str]:
    """The limits that arguments say, and what is wrong with them."""
    try:
        ahead = None if ahead_bytes is None else bytes_of("schedule: ahead_bytes", ahead_bytes)
        memory = None
        if memory_bytes is not None and memory_bytes != "traced":
            memory = bytes_of("schedule: memory_bytes, which may be 'traced'", memory_bytes)
        return _Limits(bytes_of("schedule: cap_bytes", cap_bytes), ahead, memory), ""
    except GraphError as error:
        return _Limits(), str(error)


def _seen(graph: fx.GraphModule, tracing: Tracing) -> tuple[list[Collective], Waits, int, str]:
    """The collectives of this rank's graph, what nodes wait for, the peak, and what is wrong.

    A fault is told to the others: they would wait for this rank's list.
    """
    try:
        return collectives(graph.graph), *dependencies(graph, tracing)[:2], ""
    except GraphError as error:
        return [], {}, 0, str(error)


def _buckets(
    known: Agreed,
    order: collective_plan.Order,
    wanted: Wanted,
    cap_bytes: int,
    link: Link | None,
    exact: bool,
) -> collective_plan.Buckets:
    if wanted is None:
        return tuple((at,) for at in order)
    if not isinstance(wanted, str):
        return collective_plan.by_parameters(known, order, wanted, exact=exact)
    if wanted != "auto":
        raise GraphError(f"buckets={wanted!r}: 'auto', a list of modules or globs, or None")
    members = {one.members for one in known.entries}
    most = sum(one.bytes for one in known.entries)
    caps = {n: int(min(most, _saturating(link, n) if link else cap_bytes)) for n in members}
    return collective_plan.by_size(known, order, caps, exact=exact)


def _saturating(link: Link, members: int) -> float:
    """Bytes of a collective of which latency takes a tenth of the time."""
    if members < 2:
        # One rank sends nothing: any size will do.
        return CAP_BYTES
    # Time of a ring: latency + bytes * (n - 1) / n / bandwidth. Solved for the bytes at which the
    # first is `_SHARE` of the whole.
    latency = link.steps(members) * link.latency
    if not latency:
        return 1  # also where bandwidth is infinite
    return max(1.0, latency * (1 / _SHARE - 1) * link.bandwidth * members / (members - 1))


def _highest(peak: int) -> int:
    """The largest of all ranks. Collective: all of them have to decide alike."""
    return max(one for (one,) in gather_numbers([peak]))
