"""Sums of subtrees, sent to the rank that needs them and added there in the order of the tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from vescale_comm import Group, SplitSizes, all_gather, all_to_all_single

from vescale_parallel._invariant.bundle import Bundle
from vescale_parallel._invariant.tree import Span, total


def exchange_sums(
    bundle: Bundle,
    own: Mapping[Span, Tensor],
    nodes: Sequence[Sequence[Span]],
    shards: int,
    group: Group | None,
) -> Tensor:
    """Return the sum over all shards, of this rank's part or of everything. Collective.

    Args:
        bundle: what is summed.
        own: the sums of this rank's nodes, each of all elements; a node may be missing, which
            counts as zeros.
        nodes: for each rank, the nodes that it sums, in order.
        shards: leaves of the tree.
        group: the ranks that share the batch; None: this one alone.
    """
    if group is None or group.size == 1:
        found = total(shards, own, torch.Tensor.add_)
        return _zeros(bundle, bundle.total) if found is None else found
    # A node in which no parameter of the bundle had a gradient is sent even so: sizes follow from
    # spans.
    mine = [_or_zeros(bundle, own.get(span)) for span in nodes[group.rank]]
    sent = [node[low:high] for low, high in bundle.parts for node in mine]
    low, high = bundle.parts[group.rank]
    # Known to all ranks from the tree, so no sizes are exchanged before.
    sizes = SplitSizes(
        [len(mine) * (end - start) for start, end in bundle.parts],
        [len(spans) * (high - low) for spans in nodes],
    )
    packed = torch.cat(sent) if sent else _zeros(bundle, 0)
    received = all_to_all_single(packed, group, sizes=sizes)
    # As the pieces arrive: by rank, and for each in the order of its nodes.
    spans = [span for of_rank in nodes for span in of_rank]
    pieces = [received[at * (high - low) :][: high - low] for at in range(len(spans))]
    # Into the buffer that was received, which nobody else holds.
    found = total(shards, dict(zip(spans, pieces, strict=True)), torch.Tensor.add_)
    part = _zeros(bundle, high - low) if found is None else found
    if not bundle.gathered:
        return part
    # The parts are of finished sums: nothing is added any more, so how they travel changes no bit.
    return all_gather(part, group, sizes=[end - start for start, end in bundle.parts])


def _or_zeros(bundle: Bundle, node: Tensor | None) -> Tensor:
    return _zeros(bundle, bundle.total) if node is None else node


def _zeros(bundle: Bundle, size: int) -> Tensor:
    return torch.zeros(size, dtype=bundle.dtype, device=bundle.device)
