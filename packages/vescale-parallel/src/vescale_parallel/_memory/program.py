"""Defines what a planner sees of a graph: operations, their storages, and dependencies.

Nothing here knows torch: a random program is as good as one that `tracing` reads from a graph.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from vescale_parallel._errors import MemoryPlanError


@dataclass(frozen=True)
class Operation:
    """One call of the graph.

    Attributes:
        name: of the node.
        temporary: bytes that it holds only while it runs, beside what it makes.
    """

    name: str
    temporary: int = 0


@dataclass(frozen=True)
class Storage:
    """Memory that one operation makes, however many tensors look at it.

    Attributes:
        name: of the node that makes it; `name.1` for a second result.
        bytes: its size.
        maker: index of the operation that makes it.
        users: indices of all operations that hold a tensor in it, the maker included, ascending.
        kept: whether it is a result of the graph: it lives to the end.
        device: where it lies.
    """

    name: str
    bytes: int
    maker: int
    users: tuple[int, ...]
    kept: bool = False
    device: str = "cpu"


@dataclass(frozen=True)
class Program:
    """Operations in program order, the storages they make, and what each operation waits for.

    Attributes:
        operations: in program order.
        storages: that are made by them. Inputs and constants of the graph are not among them.
        before: for each operation, those that have to run earlier.
    """

    operations: tuple[Operation, ...]
    storages: tuple[Storage, ...]
    before: tuple[frozenset[int], ...]

    def __len__(self) -> int:
        return len(self.operations)

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """For each operation, those that wait for it, ascending."""
        found: list[list[int]] = [[] for _ in self.operations]
        for at, earlier in enumerate(self.before):
            for one in earlier:
                found[one].append(at)
        return tuple(tuple(one) for one in found)

    @cached_property
    def touched(self) -> tuple[tuple[int, ...], ...]:
        """For each operation, the storages that it makes or holds a tensor of."""
        found: list[list[int]] = [[] for _ in self.operations]
        for at, storage in enumerate(self.storages):
            for user in storage.users:
                found[user].append(at)
        return tuple(tuple(one) for one in found)

    @cached_property
    def made(self) -> tuple[int, ...]:
        """Bytes that each operation makes."""
        found = [0] * len(self)
        for storage in self.storages:
            found[storage.maker] += storage.bytes
        return tuple(found)


def program(
    operations: Iterable[Operation],
    storages: Iterable[Storage],
    before: Iterable[Iterable[int]],
) -> Program:
    """Make a program; every operation also waits for the makers of what it touches.

    Raises:
        MemoryPlanError: an operation waits for itself or for a later one, or sizes are negative.
    """
    every, stores = tuple(operations), tuple(storages)
    waits = [set(one) for one in before]
    if len(waits) != len(every):
        raise MemoryPlanError(
            f"{len(every)} operations, but {len(waits)} entries of what is waited for."
        )
    for storage in stores:
        if storage.bytes < 0:
            raise MemoryPlanError(f"storage '{storage.name}' has {storage.bytes} bytes.")
        if storage.maker not in storage.users:
            raise MemoryPlanError(f"storage '{storage.name}': its maker is to be among its users.")
        for user in storage.users:
            if user != storage.maker:
                # Who takes a tensor waits for its maker already, as a user of the node; who takes
                # a view of it only for the view.
                waits[user].add(storage.maker)
    for at, earlier in enumerate(waits):
        # Program order has to be an order itself: it is the first candidate, and no plan is
        # worse.
        if earlier and max(earlier) >= at:
            raise MemoryPlanError(
                f"operation '{every[at].name}' ({at}) waits for operation {max(earlier)}, which "
                "does not come earlier in program order."
            )
    return Program(every, stores, tuple(frozenset(one) for one in waits))


def checked_order(of: Program, order: Sequence[int]) -> tuple[int, ...]:
    """Return the order, once it is sure that every operation runs once and after what it waits for.

    Raises:
        MemoryPlanError: it is no such order.
    """
    done: set[int] = set()
    for at in order:
        if not 0 <= at < len(of) or at in done:
            raise MemoryPlanError(f"an order names operation {at} twice, or there is none.")
        missing = of.before[at] - done
        if missing:
            # One of them is enough for a message, and the smallest is the same in each run.
            early = of.operations[min(missing)].name
            raise MemoryPlanError(
                f"an order runs '{of.operations[at].name}' before '{early}', for which it waits."
            )
        done.add(at)
    if len(done) != len(of):
        raise MemoryPlanError(f"an order has {len(done)} of {len(of)} operations.")
    return tuple(order)
