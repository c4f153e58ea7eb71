"""Gathers one row of numbers for each shard on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from vescale_comm import Group, all_gather


def rows_of_all(
    own: Mapping[int, Tensor],
    nothing: Tensor,
    shards: Sequence[Sequence[int]],
    group: Group | None,
) -> dict[int, Tensor]:
    """Return the row of each shard that has one. Collective.

    Args:
        own: this rank's rows, by shard.
        nothing: of no rows, as wide as they are.
        shards: for each rank, those of its shards that have a row.
        group: the ranks that share the batch; None: this one alone.
    """
    if group is None or group.size == 1:
        return dict(own)
    mine = [own[shard] for shard in shards[group.rank]]
    packed = torch.stack(mine) if mine else nothing
    found = all_gather(packed, group, sizes=[len(each) for each in shards])
    order = [shard for each in shards for shard in each]
    return dict(zip(order, found, strict=True))
