"""Estimates what attention of a sharded sequence sends and keeps, by way to share it.

Of one layer and one training step, on the rank with the most. `vescale_dtensor` takes the one that
sends less of keys gathered and of rows exchanged for heads, or of a ring where ranks do not divide
the heads; a byte of a causal mask counts as one that is sent. A ring where they do has to be asked
for: its products are tiles in plain torch, and those of the others are torch's own kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from vescale_parallel._cost.links import Link, collective_seconds
from vescale_parallel._errors import PlanError

EXCHANGE: Final = "heads for rows"
GATHER: Final = "keys gathered"
RING: Final = "ring"


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention of one layer.

    Attributes:
        tokens: of a sequence.
        heads, kv_heads: of the query, and of keys and values.
        head_dim: features of a head.
        batch: sequences of a batch.
        itemsize: bytes of an element.
        causal: whether rows see the keys before them only.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    itemsize: int = 2
    causal: bool = True

    def __post_init__(self) -> None:
        numbers = (self.tokens, self.heads, self.kv_heads, self.head_dim, self.batch, self.itemsize)
        if min(numbers) < 1 or self.heads % self.kv_heads:
            raise PlanError(
                f"{self}: every number is at least 1, and heads are a multiple of kv_heads."
            )

    def bytes_of(self, heads: int) -> int:
        """Bytes of a tensor of the whole batch with so many heads."""
        return self.batch * self.tokens * heads * self.head_dim * self.itemsize


@dataclass(frozen=True)
class Way:
    """One way to share attention.

    Attributes:
        name: of the way.
        sent: bytes that a rank sends in a forward and its backward.
        collectives: of both; of a ring, turns of messages.
        seconds: of both, none of it hidden.
        kept: bytes from forward to backward beside the rank's shards of query, key, value, result.
        mask: part of them that is a causal mask of the rank's rows.
        lacks: why it is not taken, whatever it costs; None where it may be.
    """

    name: str
    sent: float
    collectives: int
    seconds: float
    kept: float
    mask: float = 0.0
    lacks: str | None = None


def attention_ways(attention: Attention, ranks: int, link: Link) -> list[Way]:
    """Every way to share attention among ranks.

    Raises:
        PlanError: there are more ranks than tokens, or none.
    """
    if not 1 <= ranks <= attention.tokens:
        raise PlanError(
            f"{attention.tokens} tokens cannot be sharded over {ranks} ranks: take 1 to "
            f"{attention.tokens}."
        )
    exchange = _exchange(attention, ranks, link)
    ring = _ring(attention, ranks, link, may_be=exchange.lacks is not None)
    return [exchange, _gather(attention, ranks, link), ring]


def chosen(ways: list[Way]) -> Way:
    """The way that is taken: of those that may be, the one that costs a forward least."""
    # By a forward, half of what is sent; a byte of the mask counts like one that is sent.
    return min((way for way in ways if way.lacks is None), key=lambda way: way.sent / 2 + way.mask)


def _exchange(attention: Attention, ranks: int, link: Link) -> Way:
    heads, keys = attention.heads, attention.kv_heads
    if heads % ranks:
        why = f"{ranks} ranks do not divide {heads} heads"
        return Way(EXCHANGE, 0.0, 0, 0.0, 0.0, lacks=why)
    # Keys and values of fewer heads are repeated until ranks divide them: as few times as will do.
    repeats = ranks // math.gcd(keys, ranks)
    # Query and result, keys and values; and the gradient of each.
    moved = [attention.bytes_of(count) / ranks for count in (heads, heads, keys * repeats)]
    moved.append(moved[-1])
    seconds = 2 * sum(collective_seconds("all_to_all", size, ranks, link) for size in moved)
    more = 2 * attention.bytes_of(keys) * (repeats - 1) / ranks
    return Way(EXCHANGE, 2 * _sent(sum(moved), ranks), 8, seconds, more)


def _gather(attention: Attention, ranks: int, link: Link) -> Way:
    whole = attention.bytes_of(attention.kv_heads)
    # Gathered once, and their gradients reduced and scattered.
    seconds = 4 * collective_seconds("all_gather", whole, ranks, link)
    rows = -(-attention.tokens // ranks)
    mask = rows * attention.tokens * attention.itemsize if attention.causal and ranks > 1 else 0
    return Way(GATHER, 4 * _sent(whole, ranks), 4, seconds, _sent(2 * whole, ranks) + mask, mask)


def _ring(attention: Attention, ranks: int, link: Link, *, may_be: bool) -> Way:
    block = 2 * attention.bytes_of(attention.kv_heads) / ranks
    # Keys and values come, in backward once more, and their gradients go back. Blocks that a mask
    # removes are not sent, which is not counted: some rank has all of them, unless it is a window.
    turns = 3 * (ranks - 1)
    seconds = turns * (link.latency + block / link.bandwidth)
    why = None if may_be else "asked for by sequence='ring'"
    return Way(RING, turns * block, turns, seconds, 0.0, lacks=why)


def _sent(size: float, ranks: int) -> float:
    return size * (ranks - 1) / ranks
