"""Lets users choose how ranks share attention of sharded sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

from vescale_dtensor._errors import DTensorError

AttentionWay = Literal["auto", "ring", "ulysses", "gather"]
"""Which ranks send what: blocks of keys in turns, rows for heads, or all keys to everyone."""

_current: ContextVar[AttentionWay] = ContextVar("vescale_dtensor_attention_way", default="auto")


def attention_way() -> AttentionWay:
    """What `sequence_attention` asks for here."""
    return _current.get()


@contextmanager
def sequence_attention(way: AttentionWay) -> Iterator[None]:
    """Choose how `scaled_dot_product_attention` of sharded sequences runs inside the `with` block.

    It is about calls whose query, key and value are sharded along their rows by the same axis.
    Results, and where they lie, are those of one device in every way. What runs in the block
    counts: a recomputation in backward has to be in such a block too, as that of
    `vescale_parallel.Plan(sequence=)` is. All ranks choose alike.

    Args:
        way: `"ring"`: each rank gets the keys and values of one other rank at a time, and leaves
            out those that its rows do not look at; nothing as large as a whole sequence is kept.
            `"ulysses"`: all rows of some heads on each rank, by all-to-alls; the ranks have to
            divide the heads. `"gather"`: all keys and values on each rank. `"auto"`, the default:
            what costs least, of rows for heads (a ring, where ranks do not divide heads) and keys
            gathered.

    Raises:
        DTensorError: there is no such way.

    Examples:
        with sequence_attention("ring"):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    """
    if way not in get_args(AttentionWay):
        known = ", ".join(map(repr, get_args(AttentionWay)))
        raise DTensorError(f"sequence_attention({way!r}): there is no such way; there are {known}")
    token = _current.set(way)
    try:
        yield
    finally:
        _current.reset(token)
