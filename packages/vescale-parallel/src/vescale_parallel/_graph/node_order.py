"""An order of a graph's nodes: collectives early, their results late, within a bound of memory.

In which order collectives start is decided before, and alike on all ranks. When each of them starts
is this rank's own: a rank that is short of memory starts one later than others do.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from vescale_parallel._graph.collectives import KINDS, is_view, is_wait, schema_name
from vescale_parallel._memory.program import Program
from vescale_parallel._memory.simulation import profile

aten: Any = torch.ops.aten
Waits = dict[fx.Node, set[fx.Node]]
BEHIND_BYTES: Final = 50 * 2**20
"""What is reduced at once, before the oldest is waited for."""
Chain = Sequence[tuple[fx.Node, int]]
"""What starts collectives, in their order, and the bytes of each."""


@dataclass(frozen=True)
class Memory:
    """What orders are judged by.

    Attributes:
        program: of the graph, with its operations in the order of `nodes`.
        nodes: in an order in which each comes after what it waits for.
        bound: bytes that may live at once; None: any number.
    """

    program: Program
    nodes: Sequence[fx.Node]
    bound: int | None


def order_nodes(waits: Waits, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """These nodes, in this order as far as each comes after what it waits for."""
    run = _NodeOrder(waits)
    run.all_of(nodes)
    return run.order


def overlapped(
    chain: Chain, waits: Waits, nodes: Sequence[fx.Node], ahead_bytes: int | None, memory: Memory
) -> tuple[list[fx.Node], int]:
    """An order that starts collectives early and waits for them late, and the bytes of its peak.

    Where more lives than the bound, what is under way at the peak is held back: gathers start
    behind it, and reductions are waited for before it.
    """
    waits = {node: set(before) for node, before in waits.items()}
    index = {node: at for at, node in enumerate(memory.nodes)}
    # The best of all rounds, not the last: what is held back may bring others together at another
    # place.
    best: list[fx.Node] = []
    least: int | None = None
    # Each round holds one collective back or ends; there is a start and a wait of each.
    for _ in range(2 * len(chain) + 1):
        run = _OverlappedOrder(chain, waits, ahead_bytes)
        run.all_of(nodes)
        # Judged by the whole order, not while it is made: what a start costs shows only where its
        # result is used at last.
        found = profile(memory.program, [index[node] for node in run.order])
        if least is None or found.peak < least:
            best, least = run.order, found.peak
        if memory.bound is None or found.peak <= memory.bound:
            break
        over = [at for at, size in enumerate(found.during) if size > memory.bound]
        if not _held_back(run.order, over, chain, waits):
            break
    return best, least or 0


def _held_back(order: Sequence[fx.Node], over: Sequence[int], chain: Chain, waits: Waits) -> bool:
    """Have what is under way where too much lives start after it, or be waited for before it.

    `over`: steps of the order, ascending. Returns whether anything has changed.
    """
    place = {node: at for at, node in enumerate(order)}
    following: Waits = {}
    for node, earlier in waits.items():
        for one in earlier:
            following.setdefault(one, set()).add(node)
    changed = False
    for start, _ in reversed(chain):
        wait = _wait_of(start)
        steps = over[bisect_right(over, place[start]) : bisect_left(over, place[wait])]
        if not steps:
            continue
        if _kind(start) == "all_gather":
            # Not behind what needs it, or a later one of them: they keep their order.
            after = _after(start, following)
            free = (order[at] for at in reversed(steps) if order[at] not in after)
            before, late = next(free, None), start
        else:
            # Not before the wait of another sum, which may be wanted earlier than this one.
            late = next((order[at] for at in steps if not is_wait(order[at])), start)
            before = None if wait in _after(late, following) else wait
        if before is not None and before not in waits[late]:
            waits[late].add(before)
            following.setdefault(before, set()).add(late)
            changed = True
    return changed


def _after(node: fx.Node, following: Waits) -> set[fx.Node]:
    """A node, and all that waits for it, at last."""
    seen, rest = {node}, [node]
    while rest:
        for one in following.get(rest.pop(), ()):
            if one not in seen:
                seen.add(one)
                rest.append(one)
    return seen


class _NodeOrder:
    """Nodes in an order in which each comes after what it waits for."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits
        self.order: list[fx.Node] = []
        self.done: set[fx.Node] = set()

    def all_of(self, nodes: Sequence[fx.Node]) -> None:
        """Emit all, in this order as far as it goes."""
        for node in nodes:
            self.pull(node)

    def pull(self, node: fx.Node) -> None:
        """Emit a node after what it waits for; no recursion, as graphs are deep."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self.done:
                stack.pop()
                continue
            missing = [one for one in self.waits[top] if one not in self.done]
            if missing:
                # By name: sets of nodes have the order of their addresses, which differs from rank
                # to rank.
                stack += sorted(missing, key=_name_of, reverse=True)
            else:
                stack.pop()
                self.emit(top)

    def emit(self, node: fx.Node) -> None:
        """Put a node next."""
        self.order.append(node)
        self.done.add(node)


def _name_of(node: fx.Node) -> str:
    return node.name


def _is_for_gather(node: fx.Node) -> bool:
    """Whether a node only casts what is gathered."""
    return getattr(node.meta.get("label"), "op", "") == "gather" and not is_wait(node)


class _OverlappedOrder(_NodeOrder):
    """Starts as soon as they are ready, waits and views of what arrives only where needed.

    One gather is ahead of those that are in use, or as many bytes of them as are given; where more
    than that is reduced at once, the oldest reduction is waited for, and what it updates is.
    """

    def __init__(self, chain: Chain, waits: Waits, ahead_bytes: int | None) -> None:
        super().__init__(waits)
        self.chain, self.next = chain, 0
        self.sizes = dict(chain)
        self.ahead = ahead_bytes
        self.gathers: dict[fx.Node, int] = {}  # that are under way
        self.others: dict[fx.Node, int] = {}
        self.updates: list[fx.Node] = []

    def all_of(self, nodes: Sequence[fx.Node]) -> None:
        """Emit all, in this order as far as it goes."""
        self.launch()
        self.updates = [node for node in nodes if _direction(node) == "update"]
        # Emitted only when something pulls them: a wait that stands early ends the overlap, and a
        # view of its result asks for it.
        late = [node for node in nodes if is_wait(node) or is_view(node)]
        rest = self.sizes.keys() | {*late, *self.updates}
        for node in nodes:
            if node not in rest:
                self.pull(node)
                self.launch()
        # What nobody has pulled: what the graph returns, and the updates that are left.
        for node in nodes:
            self.pull(node)

    def launch(self) -> None:
        """Emit the collectives that are next, while they are ready and not too much is sent."""
        while self.next < len(self.chain):
            node, size = self.chain[self.next]
            if node in self.done:
                self.next += 1
                continue
            if not all(self._soon(one) for one in self.waits[node]):
                return
            if _kind(node) == "all_gather":
                limit = 0 if self.ahead is None else self.ahead
                # Where none is under way one goes, however large it is: nothing computes without
                # it.
                if self.gathers and sum(self.gathers.values()) + size > limit:
                    return
            self.pull(node)
            limit = BEHIND_BYTES if self.ahead is None else self.ahead
            while len(self.others) > 1 and sum(self.others.values()) > limit:
                # The oldest: on one stream it has ended before the others.
                self.pull(_wait_of(next(iter(self.others))))
                self._update()

    def _update(self) -> None:
        """Emit the updates whose gradients have arrived: they free them."""
        for node in self.updates:
            if node not in self.done and all(self._seen(one) for one in self.waits[node]):
                self.pull(node)
        self.updates = [node for node in self.updates if node not in self.done]

    def _seen(self, node: fx.Node) -> bool:
        """Whether a node is there, or only looks at what is."""
        if node in self.done:
            return True
        return is_view(node) and all(self._seen(one) for one in self.waits[node])

    def _soon(self, node: fx.Node) -> bool:
        """Whether a node is there, or can be at little cost: a view, or a copy to be sent."""
        if node in self.done:
            return True
        free = is_view(node) or node.target is aten.cat.default or _is_for_gather(node)
        return free and all(self._soon(one) for one in self.waits[node])

    def emit(self, node: fx.Node) -> None:
        super().emit(node)
        if node in self.sizes:
            kept = self.gathers if _kind(node) == "all_gather" else self.others
            kept[node] = self.sizes[node]
        elif is_wait(node):
            given: Any = node.args[0]
            self.gathers.pop(given, None)
            self.others.pop(given, None)


def _kind(start: fx.Node) -> str:
    return KINDS[schema_name(start)]


def _wait_of(start: fx.Node) -> fx.Node:
    return next(iter(start.users))


def _direction(node: fx.Node) -> str:
    return str(getattr(node.meta.get("label"), "direction", ""))
