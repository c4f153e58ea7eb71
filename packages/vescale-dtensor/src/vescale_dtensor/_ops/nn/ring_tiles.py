"""Attention of some rows to one block of keys, tile by tile, and the merging of what blocks say.

The sums over keys are kept unfinished while blocks come: for each row its largest score, the sum of
the exponentials below it, and the values weighed by them. A block that brings a larger score scales
down what was there. In the end one division gives the result, and the logarithm of the sum is all
that backward needs to have any block's weights again.

Everything is local, and in single precision at least. Tiles bound what is as large as rows times
keys. Source: Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vescale_dtensor._layout.intervals import Intervals

# Scores of a tile: 16 MiB in single precision, of which a few are alive at once.
_TILE = 2**22
# Rows of a tile that sees a part of its keys only: the rest of it is computed for nothing.
_ROWS = 256
_LOWEST = float("-inf")


class Block(NamedTuple):
    """Keys and values of one rank, and what is known of them.

    Attributes:
        key, value: (batch, key heads, keys, features).
        places: of the keys in their sequence, in order.
        mask: what of the mask is about them, (batch or 1, heads or 1, rows or 1, keys or 1):
            booleans that say what is seen, or numbers that are added; None: there is none.
        kept: which weights dropout keeps, (batch, heads, rows, keys); None: all.
    """

    key: Tensor
    value: Tensor
    places: Intervals
    mask: Tensor | None
    kept: Tensor | None


@dataclass(frozen=True)
class Terms:
    """What all blocks of a call have in common.

    Attributes:
        rows: places of the rows of the query, in order.
        causal: whether a row sees the keys up to its own place only.
        scale: what scores are multiplied by.
        boost: what weights that dropout keeps are multiplied by.
    """

    rows: Intervals
    causal: bool
    scale: float
    boost: float = 1.0


class Sums(NamedTuple):
    """Unfinished sums over keys: (batch, heads, rows, 1), the same, and (..., features)."""

    largest: Tensor
    total: Tensor
    weighed: Tensor


class Gradients(NamedTuple):
    """Gradients of one block: of its keys, its values and its part of the mask."""

    key: Tensor
    value: Tensor
    mask: Tensor | None


class _Tile(NamedTuple):
    """Local rows `first` to `end` and the first `keys` keys; `row` is the place of the first row.

    `whole`: whether every row of it sees every key of it.
    """

    first: int
    end: int
    row: int
    keys: int
    whole: bool


def no_sums(query: Tensor, features: int) -> Sums:
    """The sums over no keys."""
    lead = query.shape[:-1]
    return Sums(
        query.new_full((*lead, 1), _LOWEST),
        query.new_zeros((*lead, 1)),
        query.new_zeros((*lead, features)),
    )


def add_block(sums: Sums, query: Tensor, block: Block, terms: Terms) -> None:
    """Add what rows say about one more block of keys, in place.

    Args:
        sums: so far.
        query: (batch, heads, rows, features).
        block: in the dtype of the query.
        terms: of the call.
    """
    for tile in tiles(query, block, terms):
        rows, keys = slice(tile.first, tile.end), slice(0, tile.keys)
        scores = _scores(query[:, :, rows], block, tile, terms)
        largest, total, weighed = (one[:, :, rows] for one in sums)
        now = torch.maximum(largest, scores.amax(-1, keepdim=True))
        # Of rows that have seen nothing yet the largest is -inf, which no score is compared with.
        base = now.masked_fill(now == _LOWEST, 0)
        weights = scores.sub_(base).exp_()
        before = (largest - base).exp_()
        total.mul_(before).add_(weights.sum(-1, keepdim=True))
        if block.kept is not None:
            weights.mul_(block.kept[:, :, rows, keys])
        value = block.value[:, :, keys]
        weighed.mul_(before).add_(_by_group(weights, value), alpha=terms.boost)
        largest.copy_(now)


def finished(sums: Sums) -> tuple[Tensor, Tensor]:
    """The result, and the logarithm of the sum of exponentials: (batch, heads, rows, 1).

    Rows that see nothing are zeros; their logarithm is inf, so that their weights are zero again.
    """
    nothing = sums.total == 0
    result = sums.weighed / sums.total.masked_fill(nothing, 1)
    logs = sums.largest + sums.total.log()
    return result, logs.masked_fill(nothing, float("inf"))


def block_gradients(
    query: Tensor, block: Block, terms: Terms, logs: Tensor, cotangent: Tensor, into: Tensor
) -> Gradients:
    """The gradients of one block; that of the query is added to `into`.

    Args:
        query: as for `add_block`.
        block: as there.
        terms: as there.
        logs: from `finished`.
        cotangent: of the result, and behind its features the negative of its product with the
            result: (batch, heads, rows, features + 1).
        into: like the query.
    """
    into_key, into_value = torch.zeros_like(block.key), torch.zeros_like(block.value)
    into_mask = None
    if block.mask is not None and block.mask.is_floating_point():
        into_mask = torch.zeros_like(block.mask)
    for tile in tiles(query, block, terms):
        rows, keys = slice(tile.first, tile.end), slice(0, tile.keys)
        own, given = query[:, :, rows], cotangent[:, :, rows, :-1]
        key, value = block.key[:, :, keys], block.value[:, :, keys]
        weights = _scores(own, block, tile, terms).sub_(logs[:, :, rows]).exp_()
        wanted = _by_group(given, value.transpose(-2, -1))
        used = weights
        if block.kept is not None:
            kept = block.kept[:, :, rows, keys]
            used = (weights * kept).mul_(terms.boost)
            wanted.mul_(kept).mul_(terms.boost)
        into_value[:, :, keys] += _over_group(used, given, value.shape[1])
        change = wanted.add_(cotangent[:, :, rows, -1:]).mul_(weights)
        if into_mask is not None:
            _add_to_mask(into_mask, change, rows, keys)
        into[:, :, rows] += _by_group(change, key).mul_(terms.scale)
        into_key[:, :, keys] += _over_group(change, own, key.shape[1]).mul_(terms.scale)
    return Gradients(into_key, into_value, into_mask)


def tiles(query: Tensor, block: Block, terms: Terms) -> Iterator[_Tile]:
    """What there is to compute: whole blocks, and parts of them, that no row sees are left out."""
    keys = block.key.shape[-2]
    if not query.numel() or not keys:
        return
    # As many rows as fit, of all batches and heads.
    most = max(1, _TILE // (query.shape[0] * query.shape[1] * keys))
    most = min(most, _ROWS) if terms.causal else most
    start = 0
    for low, high in terms.rows:
        for row in range(low, high, most):
            end = min(high, row + most)
            seen = _before(block.places, end) if terms.causal else keys
            if seen:
                whole = not terms.causal or seen == _before(block.places, row + 1)
                yield _Tile(start + row - low, start + end - low, row, seen, whole)
        start += high - low


def _before(places: Intervals, end: int) -> int:
    """How many of these places are before `end`; they are in order."""
    return sum(max(0, min(end, high) - low) for low, high in places)


def places_tensor(places: Intervals, device: torch.device) -> Tensor:
    """These places as a tensor of integers."""
    parts = [torch.arange(low, high, device=device) for low, high in places]
    return torch.cat(parts) if parts else torch.arange(0, device=device)


def _scores(query: Tensor, block: Block, tile: _Tile, terms: Terms) -> Tensor:
    """Scores of a tile, -inf where a row does not see a key: new memory."""
    keys = slice(0, tile.keys)
    scores = _by_group(query, block.key[:, :, keys].transpose(-2, -1)).mul_(terms.scale)
    if not tile.whole:
        places = places_tensor(block.places, query.device)[keys]
        rows = torch.arange(tile.row, tile.row + tile.end - tile.first, device=query.device)
        scores.masked_fill_(places > rows[:, None], _LOWEST)
    if block.mask is not None:
        seen = _part_of_mask(block.mask, slice(tile.first, tile.end), keys)
        if seen.dtype == torch.bool:
            scores.masked_fill_(~seen, _LOWEST)
        else:
            scores.add_(seen)
    return scores


def _part_of_mask(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    mask = mask if mask.shape[-2] == 1 else mask[..., rows, :]
    return mask if mask.shape[-1] == 1 else mask[..., keys]


def _add_to_mask(mask: Tensor, change: Tensor, rows: slice, keys: slice) -> None:
    part = _part_of_mask(mask, rows, keys)
    part += change.sum_to_size(part.shape)


def _by_group(x: Tensor, shared: Tensor) -> Tensor:
    """`x @ shared`, of which each head serves a group of consecutive heads of `x`, uncopied."""
    batch, heads, rows, inner = x.shape
    groups = shared.shape[1]
    if groups == heads:
        return x @ shared
    # The heads of a group, one below the other, are rows of one product.
    found = x.reshape(batch, groups, -1, inner) @ shared
    return found.view(batch, heads, rows, shared.shape[-1])


def _over_group(x: Tensor, other: Tensor, groups: int) -> Tensor:
    """`x.T @ other`, summed over each group of consecutive heads."""
    batch, heads = x.shape[:2]
    if groups == heads:
        return x.transpose(-2, -1) @ other
    folded = x.reshape(batch, groups, -1, x.shape[-1])
    return folded.transpose(-2, -1) @ other.reshape(batch, groups, -1, other.shape[-1])
