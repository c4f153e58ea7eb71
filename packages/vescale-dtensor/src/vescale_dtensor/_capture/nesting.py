"""Captured functions inside of others: who records, who compares, and who just runs."""

from __future__ import annotations

from contextvars import ContextVar
from typing import ClassVar

from vescale_dtensor._tensor.lineage import pause

# Context variables, as ranks of a simulation are threads of one process.
# Set where the function of a captured one runs: captured functions that it calls just run. They are
# part of the recording, or other ranks replay them as a part of this call.
_inside: ContextVar[bool] = ContextVar("vescale_dtensor_inside_captured", default=False)
# Set where a refused function runs, which other ranks may replay: captured functions that it calls
# are replayed, but nothing that ranks do together is counted, compared or voted on.
_alone: ContextVar[bool] = ContextVar("vescale_dtensor_alone_in_captured", default=False)

is_inside = _inside.get
"""Whether captured functions just run."""

is_alone = _alone.get
"""Whether what runs may run on this rank alone."""


class _Running:
    """A block in which a variable is set, and no lineage of writes is noted.

    Other ranks may replay what runs in it, and a replay notes none. Two Python calls, as every call
    that no program stands for comes here.
    """

    __slots__ = ("_token",)
    _variable: ClassVar[ContextVar[bool]]

    def __enter__(self) -> None:
        self._token = self._variable.set(True)
        pause.depth += 1

    def __exit__(self, *_: object) -> None:
        pause.depth -= 1
        self._variable.reset(self._token)


class running_inside(_Running):
    """Run captured functions as they are in the block."""

    __slots__ = ()
    _variable = _inside


class running_alone(_Running):
    """Run a refused function in the block, which other ranks may replay."""

    __slots__ = ()
    _variable = _alone
