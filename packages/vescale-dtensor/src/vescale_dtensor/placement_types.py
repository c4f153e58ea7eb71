"""The placements, under the name of torch's module of them."""

from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.placements import (
    InterleavedShard,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
)

__all__ = [
    "InterleavedShard",
    "Partial",
    "Placement",
    "RaggedShard",
    "Replicate",
    "Shard",
    "StridedShard",
]
