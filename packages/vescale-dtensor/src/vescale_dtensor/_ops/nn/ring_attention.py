"""Attention with blocks of keys and values that come from one rank after another.

One node of autograd on local tensors: what it keeps is this rank's query, keys, values, result and
a number for each row. Backward has the blocks sent again, and sends their gradients back.

Source: Liu et al., arXiv 2310.01889; causal balance by layouts of several intervals, as in Brandon
et al., arXiv 2311.09431.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vescale_comm import Pending

from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._ops.nn.ring_tiles import (
    Block,
    Terms,
    add_block,
    block_gradients,
    finished,
    no_sums,
)
from vescale_dtensor._ops.nn.ring_turns import (
    Ring,
    Turn,
    Uses,
    agreed_uses,
    blocks,
    of_places,
    sent_back,
    turns,
)
from vescale_dtensor._torch.opmath import autocast_off, to_opmath
from vescale_dtensor._torch.overridable import overridable


class Extras(NamedTuple):
    """What a call may have beside query, keys and values.

    Attributes:
        mask: of this rank's rows, (batch or 1, heads or 1, rows or 1, all keys or 1).
        kept: which weights dropout keeps, (batch, heads, rows, all keys).
    """

    mask: Tensor | None
    kept: Tensor | None


# Overridable, so that capture records it as one call: what is sent may depend on a mask's values.
@overridable
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kept: Tensor | None,
    ring: Ring,
    scale: float,
    boost: float,
) -> Tensor:
    """The attention of this rank's rows. Collective; differentiable once.

    Args:
        query: (batch, heads, rows, features), local.
        key: (batch, key heads, keys, features), local; heads are a multiple of key heads.
        value: likewise, perhaps of other features.
        mask: see `Extras`.
        kept: see `Extras`.
        ring: who has which rows and keys.
        scale: of scores.
        boost: of weights that dropout keeps.
    """
    result: Tensor = _Ring.apply(query, key, value, mask, kept, ring, scale, boost)  # type: ignore[no-untyped-call]
    return result


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        kept: Tensor | None, ring: Ring, scale: float, boost: float,
    ) -> Tensor:  # fmt: skip
        uses = ring.uses()
        if mask is not None and ring.group.size > 1:
            uses = agreed_uses(mask, ring, uses)
        terms = Terms(ring.rows[ring.group.rank], ring.causal, scale, boost)
        wide, extras = to_opmath(query), Extras(mask, kept)
        sums = no_sums(wide, value.shape[-1])
        # What autocast rounds has been rounded; the products in here are not to be.
        with autocast_off(query.device.type):
            for came in blocks(key, value, ring, turns(uses, ring.group.rank)):
                if came is not None:
                    add_block(sums, wide, _block(*came, extras, ring), terms)
        result, logs = finished(sums)
        result = result.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, kept, result, logs)
        ctx.ring, ctx.uses, ctx.terms = ring, uses, terms
        return result

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        wants = tuple(ctx.needs_input_grad[:4])
        found = _Backward.apply(cotangent, *ctx.saved_tensors, ctx.ring, ctx.uses, ctx.terms, wants)  # type: ignore[no-untyped-call]
        return (*found, None, None, None, None)


class _Backward(torch.autograd.Function):
    """The backward, as a node that refuses to be differentiated."""

    @staticmethod
    def forward(
        ctx: Any, cotangent: Tensor, query: Tensor, key: Tensor, value: Tensor,
        mask: Tensor | None, kept: Tensor | None, result: Tensor, logs: Tensor,
        ring: Ring, uses: Uses, terms: Terms, wants: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        wide = to_opmath(query)
        given = to_opmath(cotangent)
        # What a softmax takes off its cotangent, for each row; with dropout as well.
        taken = (given * to_opmath(result)).sum(-1, keepdim=True)
        given = torch.cat([given, -taken], -1)
        into = torch.zeros_like(wide)
        extras, own = Extras(mask, kept), (key, value)
        masks: list[tuple[int, Tensor]] = []

        def gradient(member: int, keys: Tensor, values: Tensor) -> Tensor:
            block = _block(member, keys, values, extras, ring)
            found = block_gradients(wide, block, terms, logs, given, into)
            if found.mask is not None:
                masks.append((member, found.mask))
            return torch.cat([found.key.reshape(-1), found.value.reshape(-1)])

        schedule = turns(uses, ring.group.rank)
        with autocast_off(query.device.type):
            total = _returned(gradient, own, ring, schedule, sends=any(wants[1:3]))
        parts = torch.split(total, [key.numel(), value.numel()])
        found = (
            into.to(query.dtype),
            parts[0].view(key.shape).to(key.dtype),
            parts[1].view(value.shape).to(value.dtype),
            _whole_mask(mask, masks, ring) if wants[3] else None,
        )
        return tuple(one if wanted else None for one, wanted in zip(found, wants, strict=True))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        raise UnsupportedError(
            "the gradient of attention in a ring was differentiated: it has no second derivative. "
            'Call attention in sequence_attention("gather") (of a plan: sequence="gather"), which '
            "has those that torch has"
        )


def _returned(
    gradient: Callable[[int, Tensor, Tensor], Tensor],
    own: tuple[Tensor, Tensor],
    ring: Ring,
    schedule: list[Turn],
    *,
    sends: bool,
) -> Tensor:
    """The gradient of this rank's keys and values, flat, from all members. Collective.

    Args:
        gradient: of a block, flat.
        own: this rank's keys and values.
        ring: who has what.
        schedule: as in forward.
        sends: whether gradients are wanted by anyone; alike on every member.
    """
    total = own[0].new_empty(0)
    under_way: list[Pending[Tensor]] = []
    for came, turn in zip(blocks(*own, ring, schedule), [None, *schedule], strict=True):
        found = own[0].new_empty(0) if came is None else gradient(*came)
        if turn is None:
            total = found
        elif sends:
            # One at a time: each is under way while the next block is worked on.
            _add(total, under_way)
            under_way = [sent_back(found.to(own[0].dtype), own, ring, turn)]
    _add(total, under_way)
    return total


def _add(total: Tensor, under_way: list[Pending[Tensor]]) -> None:
    for one in under_way:
        came = one.wait()
        if came.numel():
            total += came


def _block(member: int, key: Tensor, value: Tensor, extras: Extras, ring: Ring) -> Block:
    places = ring.keys[member]
    mask, kept = (None if one is None else of_places(one, places) for one in extras)
    if mask is not None and mask.is_floating_point():
        mask = to_opmath(mask)
    return Block(to_opmath(key), to_opmath(value), places, mask, kept)


def _whole_mask(mask: Tensor | None, parts: list[tuple[int, Tensor]], ring: Ring) -> Tensor:
    """The gradient of this rank's mask, from those of its parts by member."""
    assert mask is not None
    whole = to_opmath(torch.zeros_like(mask))
    for member, part in parts:
        if mask.shape[-1] == 1:
            whole += part
            continue
        start = 0
        for low, high in ring.keys[member]:
            whole[..., low:high] = part[..., start : start + high - low]
            start += high - low
    return whole.to(mask.dtype)
