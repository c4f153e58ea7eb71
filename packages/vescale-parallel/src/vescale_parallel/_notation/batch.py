"""Reads from the layout of a batch which dim holds its rows."""

from typing import Final

from vescale_parallel._errors import PlanError
from vescale_parallel._notation.layout import RuleLayout

TOKENS: Final = "cp"
"""The mesh axis that shards tokens of sequences, and never rows."""


def dim_of_rows(batch: RuleLayout | None, over: str) -> int:
    """Return the dim that holds the rows of a batch.

    Dim 0, but where only another one is sharded, over the axis of `zero`: of models that take
    (tokens, rows). Cut along its tokens a batch would be another one, with no error.

    Args:
        batch: its layout, or None.
        over: the axis that `zero` shards over.

    Raises:
        PlanError: it cannot be told.
    """
    named = dict(batch.dims) if batch is not None else {}
    dims = {dim for axis, dim in named.items() if dim is not None and axis != TOKENS}
    if not dims or 0 in dims:
        return 0
    found = named.get(over)
    if over == TOKENS or found is None:
        raise PlanError(
            f"plan: parts of a batch are rows of it, and batch='{batch}' does not tell which dim "
            f"has them. Call an axis that shards tokens '{TOKENS}', or name one that shards rows, "
            f"as in 'dp:0, {batch}' (it may have one rank); where dim 1 has the rows, 'dp:1'."
        )
    return found
