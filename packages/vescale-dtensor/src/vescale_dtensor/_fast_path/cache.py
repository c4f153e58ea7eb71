"""The caches of the fast path: compiled calls by function and operand specs.

One table for each way in which autograd looks at a call: no grad mode, grad mode with nothing to
record, and recorded. Tables are bounded; an entry that is dropped is compiled again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vescale_dtensor._dispatch.plain_operands import on_reset
from vescale_dtensor._dispatch.registry import on_change
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._torch.bounded_cache import BoundedCache

CompiledCall = Callable[..., Any]
Key = tuple[Any, ...]
_MOST_CALLS = 32768


class CallTable(BoundedCache[Key, CompiledCall]):
    """Compiled calls by their keys.

    Attributes:
        exact_keys: the same compiled calls by keys that are quicker to make.
    """

    __slots__ = ("exact_keys",)

    def __init__(self) -> None:
        super().__init__(_MOST_CALLS)
        self.exact_keys: BoundedCache[Key, CompiledCall] = BoundedCache(_MOST_CALLS)

    def clear(self) -> None:
        """Forget everything: that costs time only."""
        super().clear()
        self.exact_keys.clear()


# No grad mode; grad mode, and nothing to record; autograd records.
NO_GRAD, GRAD_IDLE, GRAD_RECORDED = CallTable(), CallTable(), CallTable()
# Of `GRAD_IDLE`: two DTensors, and the function itself; what comes out.
binary_cache: BoundedCache[Key, Spec] = BoundedCache(_MOST_CALLS)
# Of functions of lists, without grad mode: specs of the results, or None where it writes to its
# first list.
list_cache: BoundedCache[Key, tuple[Spec, ...] | None] = BoundedCache(4096)

for _cache in (NO_GRAD, GRAD_IDLE, GRAD_RECORDED, binary_cache, list_cache):
    on_change(_cache.clear)  # what is filed followed from a rule
    on_reset(_cache.clear)  # a compiled call leads past the comparison of plain operands


def compiled_call_count() -> int:
    """How many compiled calls the tables hold: for tests that count misses."""
    return len(NO_GRAD) + len(GRAD_IDLE) + len(GRAD_RECORDED)
