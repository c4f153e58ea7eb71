"""Estimates what a layer of experts sends and stores, by way to share it.

Of one layer and one training step, of one rank of many with as many tokens each, whose tokens
choose evenly but for the longest expert. `Plan(experts=)` has tokens move; the others are priced
beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vescale_parallel._cost.links import Link, collective_seconds
from vescale_parallel._errors import PlanError

TOKENS: Final = "tokens move"
PADDED: Final = "tokens move, padded"
GATHERED: Final = "experts gathered"
EVERYWHERE: Final = "all experts everywhere"


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """One layer of experts.

    Attributes:
        experts: how many there are.
        top_k: how many each token chooses.
        tokens: of one rank.
        hidden, width: features of a token, and of an expert inside.
        matrices: of an expert; 3: gate, up, down.
        itemsize: bytes of an element.
        skew: tokens of the busiest expert, of the mean of all: what padding pads to.
    """

    experts: int
    top_k: int
    tokens: int
    hidden: int
    width: int
    matrices: int = 3
    itemsize: int = 2
    skew: float = 1.5

    def __post_init__(self) -> None:
        sizes = (self.experts, self.top_k, self.tokens, self.hidden, self.width, self.matrices)
        if min(*sizes, self.itemsize) < 1 or self.top_k > self.experts or self.skew < 1:
            raise PlanError(
                f"{self}: every number is at least 1, and tokens choose at most all experts."
            )

    @property
    def moved(self) -> int:
        """Bytes of a rank's tokens, once for each expert that they choose."""
        return self.tokens * self.top_k * self.hidden * self.itemsize

    @property
    def weights(self) -> int:
        """Bytes of all experts."""
        return self.experts * self.matrices * self.hidden * self.width * self.itemsize


@dataclass(frozen=True)
class Share:
    """One way to share a layer of experts.

    Attributes:
        name: of the way.
        sent: bytes that a rank sends in a forward and its backward.
        collectives: of both.
        seconds: of both, none of it hidden.
        stored: bytes of the experts that a rank stores.
        alive: bytes of them, and of tokens that came, while the layer runs.
    """

    name: str
    sent: float
    collectives: int
    seconds: float
    stored: float
    alive: float


def expert_shares(layer: ExpertLayer, ranks: int, link: Link) -> list[Share]:
    """Every way to share a layer among ranks; the first is that of a plan.

    Raises:
        PlanError: there are no ranks, or more of them than experts.
    """
    if not 1 <= ranks <= layer.experts:
        raise PlanError(
            f"{layer.experts} experts cannot be shared by {ranks} ranks: take 1 to {layer.experts}."
        )
    return [
        _moving(TOKENS, layer, ranks, link, 1.0),
        _moving(PADDED, layer, ranks, link, layer.skew),
        _of_weights(GATHERED, layer, ranks, link, ["all_gather"] * 3),
        _of_weights(EVERYWHERE, layer, ranks, link, ["all_reduce"]),
    ]


def chosen_share(shares: list[Share]) -> Share:
    """The way that sends least; of equal ones the earlier."""
    return min(shares, key=lambda share: share.sent)


def _moving(name: str, layer: ExpertLayer, ranks: int, link: Link, times: float) -> Share:
    moved = times * layer.moved
    # To the experts and back, and the gradients of both.
    seconds = 4 * collective_seconds("all_to_all", moved, ranks, link)
    # Of the rank with most: numbers of ranks need not divide those of experts.
    stored = layer.weights * -(-layer.experts // ranks) / layer.experts
    return Share(name, 4 * moved * (ranks - 1) / ranks, 4, seconds, stored, stored + 2 * moved)


def _of_weights(name: str, layer: ExpertLayer, ranks: int, link: Link, sends: list[str]) -> Share:
    # Gathered ones come in forward and in backward, and their gradients are reduced and scattered;
    # of those that are everywhere the gradients are summed.
    seconds = sum(collective_seconds(one, layer.weights, ranks, link) for one in sends)
    # A sum on all ranks is a reduce-scatter and an all-gather.
    rounds = sum(2 if one == "all_reduce" else 1 for one in sends)
    stored = layer.weights / (ranks if len(sends) > 1 else 1)
    sent = rounds * layer.weights * (ranks - 1) / ranks
    return Share(name, sent, len(sends), seconds, stored, layer.weights + 2 * layer.moved)
