"""Orders by rules: list scheduling, program order under a bound, and operations run late.

None of them is trusted to be better than program order: `order_choice` keeps the best of all.
"""

import heapq
import time
from collections.abc import Iterable, Sequence
from typing import Final

from vescale_parallel._memory.program import Program
from vescale_parallel._memory.reach import makes
from vescale_parallel._memory.simulation import PrefixState

_CLOSURE: Final = 48  # operations that are looked ahead to free one storage


def list_scheduled(of: Program, deadline: float | None = None) -> tuple[int, ...] | None:
    """Always run what leaves the least alive, of what does not raise the peak; None if out of time.

    Where all raise it: what raises it least. This is the rule of Inductor's `lpmf` and of LESCEA.
    """
    running = PrefixState(of)
    while running.ready:
        # Now and then: to look at the clock takes as long as to choose in a small graph.
        if deadline is not None and len(running.order) % 64 == 0 and time.monotonic() > deadline:
            return None
        best = min(running.ready, key=lambda at: _rank(running, at))
        running.run(best)
    return tuple(running.order)


def _rank(running: PrefixState, operation: int) -> tuple[int, int, int]:
    rise, net = running.cost(operation)
    # The operation last: of equals the earlier one, so that each run, and each rank, finds one
    # order.
    return max(running.peak, running.live + rise), net, operation


def prompt(of: Program, base: Sequence[int]) -> tuple[int, ...]:
    """Let what makes nothing run as soon as it can; that never raises a peak."""
    running = PrefixState(of)
    rank = {operation: at for at, operation in enumerate(base)}
    # A heap of places in `base`, and not of operations: what runs early there is asked for early.
    waiting: list[int] = []

    def ready_after(operations: Iterable[int]) -> None:
        for at in operations:
            if at in running.ready and not makes(of, at):
                heapq.heappush(waiting, rank[at])

    ready_after(range(len(of)))
    for operation in base:
        while waiting:
            free = base[heapq.heappop(waiting)]
            running.run(free)
            ready_after(of.after[free])
        if not running.has_run(operation):
            running.run(operation)
            ready_after(of.after[operation])
    while waiting:
        free = base[heapq.heappop(waiting)]
        running.run(free)
        ready_after(of.after[free])
    return tuple(running.order)


def bounded(
    of: Program, base: Sequence[int], bound: int, deadline: float | None = None
) -> tuple[int, ...] | None:
    """Follow `base`, pull forward what frees memory, and deviate where `bound` would be passed.

    What frees at least what it makes runs as soon as it can. So does a group of operations that
    together free a storage, as an optimizer's update frees its gradient, if it stays below the
    bound. What would pass the bound waits while anything else is ready. None if out of time.
    """
    running = PrefixState(of)
    rank = [0] * len(of)
    for at, operation in enumerate(base):
        rank[operation] = at
    step, blocked = 0, set[int]()
    while step < len(base):
        if deadline is not None and time.monotonic() > deadline:
            return None
        if running.has_run(base[step]):
            step += 1
            continue
        # What the bound has forbidden can fit only once something was freed, and to ask costs a
        # walk.
        level = running.live
        ran = _safe(running, rank, bound)
        if not ran:
            operation = base[step]
            if running.live + running.cost(operation)[0] > bound:
                operation = min(running.ready, key=lambda at: (*running.cost(at), rank[at]))
            running.run(operation)
            ran = [operation]
        asked = _perhaps_freed(running, ran)
        if running.live < level:
            asked |= blocked
        blocked = _pulled(running, asked, rank, bound) | (blocked - asked)
    return tuple(running.order)


def _safe(running: PrefixState, rank: Sequence[int], bound: int) -> list[int]:
    """Run what only frees; no order below the bound is lost by it."""
    # A list first: to run one changes what is ready.
    found = [
        at
        for at in running.ready
        if running.cost(at)[1] <= 0 and running.live + running.cost(at)[0] <= bound
    ]
    ran = []
    for operation in sorted(found, key=lambda at: (running.cost(at)[1], rank[at])):
        rise, net = running.cost(operation)
        # Asked again: those that ran in this loop have changed what it frees, and how much lives.
        if net <= 0 and running.live + rise <= bound:
            running.run(operation)
            ran.append(operation)
    return ran


def _perhaps_freed(running: PrefixState, ran: Sequence[int]) -> set[int]:
    """Storages that a few operations more or less may free now."""
    of, found = running.of, set[int]()
    for operation in ran:
        found.update(of.touched[operation])
        for later in of.after[operation]:
            if not running.has_run(later):
                found.update(of.touched[later])
    return found


def _pulled(running: PrefixState, asked: set[int], rank: Sequence[int], bound: int) -> set[int]:
    """Run groups that free a storage; returns those that the bound forbids for now."""
    blocked = set[int]()
    # Sorted, as sets have no order that two runs share.
    for at in sorted(asked):
        storage = running.of.storages[at]
        # Never freed, freed already, or not there yet.
        if storage.kept or not running.left[at] or not running.has_run(storage.maker):
            continue
        group = _closure(running, at)
        if group is None:
            continue
        # In an order that is valid: `base` is one, and a part of it keeps it.
        group.sort(key=rank.__getitem__)
        rise, net = _cost_of(running, group)
        # It leaves no less alive than there is: nothing is gained by running it early.
        if net >= 0:
            continue
        if running.live + rise > bound:
            blocked.add(at)
            continue
        for operation in group:
            running.run(operation)
    return blocked


def _closure(running: PrefixState, storage: int) -> list[int] | None:
    """All that has to run for a storage to be freed; None if it is more than a few."""
    of = running.of
    found = {user for user in of.storages[storage].users if not running.has_run(user)}
    stack = list(found)
    while stack:
        # So large a group adds much before it frees anything, and to find it costs a walk at each
        # step.
        if len(found) > _CLOSURE:
            return None
        for one in of.before[stack.pop()]:
            if one not in found and not running.has_run(one):
                found.add(one)
                stack.append(one)
    return list(found)


def _cost_of(running: PrefixState, group: Sequence[int]) -> tuple[int, int]:
    """What a group adds at most while it runs, and once it has ended."""
    of, used = running.of, dict[int, int]()
    live = rise = 0
    for operation in group:
        live += of.made[operation]
        rise = max(rise, live + of.operations[operation].temporary)
        for at in of.touched[operation]:
            # The group frees it where it takes up all uses that are left.
            used[at] = used.get(at, 0) + 1
            if used[at] == running.left[at] and not of.storages[at].kept:
                live -= of.storages[at].bytes
    return rise, live


def delayed(of: Program, base: Sequence[int]) -> tuple[int, ...]:
    """Move operations to just before their first user where they make more than they free."""
    order = list(base)
    step = [0] * len(of)
    for at, operation in enumerate(order):
        step[operation] = at
    # From the end: its users have moved by then, so that it can follow them.
    for operation in reversed(base):
        here = step[operation]
        there = min((step[later] for later in of.after[operation]), default=here + 1) - 1
        # What it reads lives on until it runs, which may be more than what it makes.
        if there <= here or of.made[operation] <= _held(of, operation, step, there):
            continue
        order[here:there] = order[here + 1 : there + 1]
        order[there] = operation
        for at in range(here, there + 1):
            step[order[at]] = at
    return tuple(order)


def _held(of: Program, operation: int, step: Sequence[int], there: int) -> int:
    """Bytes that would live longer if an operation ran at step `there`."""
    held = 0
    for at in of.touched[operation]:
        storage = of.storages[at]
        if storage.kept or storage.maker == operation:
            continue
        if all(step[user] < there for user in storage.users if user != operation):
            held += storage.bytes
    return held
