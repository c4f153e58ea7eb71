"""The caches of the fast path: compiled calls by function and operand specs.

There is one table per autograd state of a call: grad mode off; on with nothing to record; recorded.
Tables are bounded; an entry that was dropped is compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from vescale_dtensor._dispatch.plain_operands import on_reset
from vescale_dtensor._dispatch.registry import on_change
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._torch.bounded_cache import BoundedCache
from vescale_dtensor._torch.worlds import on_world_change

CompiledCall = Callable[..., Any]
Key = tuple[Any, ...]
_MOST_CALLS = 32768


class CallTable(BoundedCache[Key, CompiledCall]):
    """Compiled calls by their keys.

    Attributes:
        exact_keys: some of the same compiled calls, by keys that are cheaper to build: the
            arguments themselves instead of a description of each.
    """

    __slots__ = ("exact_keys",)

    def __init__(self) -> None:
        super().__init__(_MOST_CALLS)
        self.exact_keys: BoundedCache[Key, CompiledCall] = BoundedCache(_MOST_CALLS)

    def clear(self) -> None:
        """Drop all entries of both dicts: that costs time only."""
        super().clear()
        self.exact_keys.clear()


class IdleCalls:
    """Calls of one or two DTensors and nothing else, of those that `GRAD_IDLE` holds.

    Attributes:
        ones: function -> spec -> the call. Two dicts cost half of one whose key is a tuple of the
            two, which has to be made and hashed.
        pairs: function -> spec of the first -> spec of the second -> the call.
    """

    __slots__ = ("_count", "ones", "pairs")

    def __init__(self) -> None:
        self._count = 0
        self.ones: dict[Any, dict[Spec, CompiledCall]] = {}
        self.pairs: dict[Any, dict[Spec, dict[Spec, CompiledCall]]] = {}

    def store(self, func: Callable[..., Any], specs: Sequence[Spec], call: CompiledCall) -> None:
        """Store the call of DTensors with these specs, after making room for it."""
        if self._count >= _MOST_CALLS:
            self.clear()
        self._count += 1
        if len(specs) == 1:
            self.ones.setdefault(func, {})[specs[0]] = call
        else:
            self.pairs.setdefault(func, {}).setdefault(specs[0], {})[specs[1]] = call

    def clear(self) -> None:
        """Drop all entries: that costs time only."""
        self.ones.clear()
        self.pairs.clear()
        self._count = 0


# Grad mode off; on, and no operand requires grad; on, and autograd records. The state is a table,
# not a part of the key: compiled calls are made for one state, and check nothing when they run.
NO_GRAD, GRAD_IDLE, GRAD_RECORDED = CallTable(), CallTable(), CallTable()
IDLE_CALLS = IdleCalls()
# Functions of lists, with grad mode off -> specs of the results; None if it writes to its first
# list; `REDUCES_GRADIENTS` if it is such a call once gradients of leaves in it hold their totals.
ListResult = tuple[Spec, ...] | None | Literal["reduces gradients"]
REDUCES_GRADIENTS: Final = "reduces gradients"
list_cache: BoundedCache[Key, ListResult] = BoundedCache(4096)

for _cache in (NO_GRAD, GRAD_IDLE, GRAD_RECORDED, IDLE_CALLS, list_cache):
    on_change(_cache.clear)  # every entry followed from a rule
    on_reset(_cache.clear)  # a compiled call skips the comparison of plain operands
    on_world_change(_cache.clear)  # specs, in keys and calls, hold meshes


def compiled_call_count() -> int:
    """How many compiled calls the tables hold: for tests that count misses."""
    return len(NO_GRAD) + len(GRAD_IDLE) + len(GRAD_RECORDED)
