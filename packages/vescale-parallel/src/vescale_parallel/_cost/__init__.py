"""Estimates a training step on a cluster: bytes per rank, flops, and seconds by part.

Pure functions of shapes: no processes, no tensors. Top to bottom (imports point down):

- `step`: `estimate`, which puts the parts together to a `Cost`.
- `memory`, `traffic`, `compute`: bytes per rank; collectives by mesh axis; flops and seconds.
- `pieces`: parameters as the parts see them. `settings`: batch, precision, and what is recomputed.
- `context`: what attention of a sharded sequence sends and keeps, by the way ranks share it.
- `links`: alpha-beta links, the clusters that are made of them, and the time of a collective.
"""

from vescale_parallel._cost.links import (
    CLUSTERS,
    Cluster,
    Link,
    collective_seconds,
    require_rates,
)
from vescale_parallel._cost.memory import Memory, activation_bytes, packed_bytes
from vescale_parallel._cost.pieces import Piece, piece_of
from vescale_parallel._cost.settings import Precision, Workload
from vescale_parallel._cost.step import Cost, StepPlace, estimate, waited
from vescale_parallel._cost.traffic import Transfer

__all__ = [
    "CLUSTERS",
    "Cluster",
    "Cost",
    "Link",
    "Memory",
    "Piece",
    "Precision",
    "StepPlace",
    "Transfer",
    "Workload",
    "activation_bytes",
    "collective_seconds",
    "estimate",
    "packed_bytes",
    "piece_of",
    "require_rates",
    "waited",
]
