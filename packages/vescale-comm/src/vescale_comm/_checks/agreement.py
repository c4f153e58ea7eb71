"""`checked()`: the members of a group compare their calls before anything is sent."""

import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from vescale_comm._checks.p2p_checks import checked_message
from vescale_comm._engine.annotated_groups import BACKWARD_DIFFERS
from vescale_comm._engine.hooks import Proceed, with_hook
from vescale_comm._engine.primitives import Primitive
from vescale_comm._engine.waitable import Waitable
from vescale_comm._errors import CommMismatchError, CommTimeoutError
from vescale_comm._groups.group import default_process_group
from vescale_comm._torch.call_site import call_site
from vescale_comm._torch.compat import store_of

# How many calls of each group were compared: members have to count alike from its first on.
_compared: "weakref.WeakKeyDictionary[ProcessGroup, int]" = weakref.WeakKeyDictionary()
# Between two members only: the others do not come.
_PAIRWISE = frozenset({"send", "recv"})
_PREFIX = "vescale_comm"


@contextmanager
def checked(*, timeout: float = 60) -> Iterator[None]:
    """While entered, compares what the members call before anything is sent.

    A difference in op, order of calls, reduction, order of the fold, wire format, shape, dtype,
    sizes, or in whether the input requires a gradient, raises `CommMismatchError` on every member,
    with the call and the line of each. A member that does not come within `timeout` is named, with
    the last call that it made anywhere (`CommTimeoutError`). A message that is not what its
    receiver expects raises there, with both lines: its sender has gone on. All members enter it at
    the same point. They talk over the store that they found each other with, so it costs some
    tenths of a millisecond a call; outside it costs one test.

    Args:
        timeout: seconds to wait for the other members.
    """
    with with_hook(_Check(timeout)):
        yield


@dataclass(frozen=True, slots=True, eq=False)
class _Check:
    timeout: float

    def __call__(self, primitive: Primitive, proceed: Proceed) -> Waitable | None:
        process_group = primitive.group.process_group
        store = store_of(process_group)
        if store is not None and primitive.op in _PAIRWISE:
            return checked_message(primitive, proceed, store, self.timeout)
        if store is not None:
            # Counted apart for each group: groups of one rank are used in orders that others do not
            # share.
            number = _compared[process_group] = _compared.get(process_group, 0) + 1
            self._compare(primitive, number, store)
        return proceed()

    def _compare(self, primitive: Primitive, number: int, store: Store) -> None:
        group = primitive.group
        call = {
            "call": primitive.common(),
            "traffic": primitive.traffic(),
            "in_graph": primitive.in_graph,
            "site": call_site(),
        }
        here = f"{call['call']} over {group.name} at {call['site']}"
        everybody = store_of(default_process_group()) or store
        # Under the world's store as well: a member that waits elsewhere is looked up there by rank.
        everybody.set(f"{_PREFIX}/last/{dist.get_rank()}", here)
        keys = [f"{_PREFIX}/call/{number}/{member}" for member in range(group.size)]
        # Said before anything is waited for, so that two ranks that wait for each other both see
        # why.
        store.set(keys[group.rank], json.dumps(call))
        try:
            store.wait(keys, timedelta(seconds=self.timeout))
        except RuntimeError as error:
            missing = [m for m, key in enumerate(keys) if not store.check([key])]
            raise CommTimeoutError(
                f"{here}, number {number}: waited {self.timeout:g} s in vain for "
                + "; ".join(_whereabouts(everybody, group.ranks[member]) for member in missing)
            ) from error
        calls = [json.loads(store.get(key)) for key in keys]
        # Whoever is here has seen all calls of two numbers ago.
        store.delete_key(f"{_PREFIX}/call/{number - 2}/{group.rank}")
        wrong = _difference(calls, group.ranks)
        if wrong:
            lines = [
                f"rank {rank}: {each['call']} at {each['site']}"
                for rank, each in zip(group.ranks, calls, strict=True)
            ]
            head = f"the ranks disagree about collective {number} over {group.name}: {wrong}"
            raise CommMismatchError("\n  ".join([head, *lines]))


def _difference(calls: list[dict[str, Any]], ranks: Sequence[int]) -> str:
    if len({call["call"] for call in calls}) > 1:
        return "they call different things"
    with_node = [rank for rank, call in zip(ranks, calls, strict=True) if call["in_graph"]]
    if 0 < len(with_node) < len(ranks):
        return f"its input requires a gradient on rank(s) {with_node} only, {BACKWARD_DIFFERS}"
    # Equal on all members, and so compared as part of the call itself.
    if calls[0]["traffic"] is None:
        return ""
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            sent, expected = sender["traffic"][0][j], receiver["traffic"][1][i]
            if sent != expected:
                return f"member {i} sends {sent} elements to member {j}, which expects {expected}"
    return ""


def _whereabouts(store: Store, rank: int) -> str:
    key = f"{_PREFIX}/last/{rank}"
    if not store.check([key]):
        return f"rank {rank}, which has not called anything yet"
    return f"rank {rank}, whose last call was {store.get(key).decode()}"
