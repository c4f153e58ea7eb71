"""Rows of tokens to the ranks that hold the experts they chose, and back.

Everything here is about the local tensors of one rank and a group; gradients go the same ways back,
as the collectives of vescale-comm have true adjoints. Nothing is padded: a row is sent once for
each expert that its token chose, and ranks with no row, or no expert, take part like all others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from vescale_comm import Group, SplitSizes, all_to_all_single

from vescale_parallel._errors import ParallelError
from vescale_parallel._experts.rows import Order, taken

Compute = Callable[[Tensor, Tensor], Tensor]
"""Rows (n, width) and the local experts (n,) that they are for, to their results (n, width)."""

_NO_EXPERT = (
    "a router chose an expert that there is not{where}: there are {experts}, from 0; {experts} "
    "itself stands for a choice that is dropped."
)


@dataclass(frozen=True)
class Shares:
    """Which experts are where.

    Attributes:
        group: of the ranks that share the experts.
        counts: how many experts each of them holds, in their order.
    """

    group: Group
    counts: tuple[int, ...]

    @property
    def experts(self) -> int:
        """How many experts there are."""
        return sum(self.counts)

    @property
    def own(self) -> int:
        """How many of them this rank holds."""
        return self.counts[self.group.rank]


@dataclass(frozen=True)
class _Routes:
    """Where the rows of one call go.

    Attributes:
        out: pairs of a token and an expert that it chose, in the order of the experts.
        back: the same pairs in the order of the tokens.
        sizes: rows to and from each member.
        ids: of each row that arrives, the local expert that it is for.
    """

    out: Order
    back: Order
    sizes: SplitSizes
    ids: Tensor


def exchange_tokens(
    compute: Compute, hidden: Tensor, index: Tensor, weights: Tensor, shares: Shares, ordered: bool
) -> Tensor:
    """Return for each local token the weighted sum of what its experts say. Collective.

    Args:
        compute: what the local experts say about rows.
        hidden: (tokens, width), of this rank.
        index: (tokens, k): the experts that each chose; the number of experts, one behind the last,
            is no choice (a dropped one).
        weights: (tokens, k).
        shares: which experts are where.
        ordered: whether results are added in the order of the experts, else over the choices.

    Raises:
        ParallelError: on every rank of the group: an expert that there is not was chosen.
    """
    routes = _routes(index, shares)
    # A row for each pair, so a token that chose two experts of one rank is sent twice: results need
    # not be told apart there.
    rows = _sent(taken(hidden, routes.out), shares.group, routes.sizes)
    # In the dtype in which they came: autocast inside of experts must not double what is sent back.
    said = compute(rows, routes.ids).to(rows.dtype)
    # The same rows the other way: nothing has to be asked again.
    back = SplitSizes(routes.sizes.receive, routes.sizes.send)
    pairs = taken(_sent(said, shares.group, back), routes.back)
    return combined(
        pairs.view(*index.shape, hidden.shape[1]), index, weights, shares.experts, ordered
    )


def combined(said: Tensor, index: Tensor, weights: Tensor, experts: int, ordered: bool) -> Tensor:
    """Return the weighted sum over the choices (tokens, width), in one device's order.

    Args:
        said: (tokens, k, width), zeros for what was dropped.
        index: (tokens, k).
        weights: (tokens, k); those of dropped choices count as zero, whatever they are.
        experts: how many there are.
        ordered: as for `exchange_tokens`.
    """
    # Weights of what was dropped may be NaN, as of a softmax over nothing, and 0 * NaN is NaN.
    weighed = said * weights.masked_fill(index == experts, 0).unsqueeze(-1)
    if not ordered:
        return weighed.sum(dim=1).to(said.dtype)
    # As a loop over the experts adds them to zeros, each rounded to the dtype of the result.
    slots = index.argsort(dim=1, stable=True).unsqueeze(-1).expand(-1, -1, said.shape[2])
    total = torch.zeros_like(said[:, 0])
    for one in weighed.to(said.dtype).gather(1, slots).unbind(1):
        total = total + one
    return total


def _routes(index: Tensor, shares: Shares) -> _Routes:
    """Find out, together, which rows go where. Collective, and waits for the device."""
    experts, own, members = shares.experts, shares.own, len(shares.counts)
    choices = index.reshape(-1)
    wrong = (choices < 0) | (choices > experts)
    # Beyond the range `bincount` would raise on this rank alone, before the exchange.
    choices = choices.masked_fill(wrong, experts)
    counts = _counted(choices, experts)
    # Every member hears, beside how many rows it gets for each of its experts, of a wrong choice:
    # a rank that raised before this would be waited for.
    told = [
        torch.cat([part, wrong.any().view(1)]) for part in torch.split(counts, list(shares.counts))
    ]
    send = [count + 1 for count in shares.counts]
    heard = all_to_all_single(
        torch.cat(told), shares.group, sizes=SplitSizes(send, [own + 1] * members)
    ).view(members, own + 1)
    # The one wait for the device: both lists in one copy to the host.
    numbers = torch.cat([counts, heard.reshape(-1)]).tolist()
    arriving = [numbers[at : at + own + 1] for at in range(experts, len(numbers), own + 1)]
    _require_experts([part[-1] > 0 for part in arriving], shares)
    starts = [sum(shares.counts[:member]) for member in range(members + 1)]
    sent = [sum(numbers[a:b]) for a, b in itertools.pairwise(starts)]
    # Rows arrive by member, and within each by expert, as they were sorted before they left.
    local = torch.arange(own, device=index.device).repeat(members)
    came = [sum(part[:-1]) for part in arriving]
    # Told how many rows that makes, it need not ask the device.
    ids = torch.repeat_interleave(local, heard[:, :own].reshape(-1), output_size=sum(came))
    out, back = _orders(choices, sum(sent), index.shape[1])
    return _Routes(out, back, SplitSizes(sent, came), ids)


def ordered_pairs(index: Tensor, experts: int) -> tuple[Order, Order, list[int]]:
    """Return the order of pairs by expert, that of their return, and how many each expert has.

    For one rank that holds all experts. Waits for the device.

    Args:
        index: (tokens, k); `experts` stands for a choice that is dropped.
        experts: how many there are.

    Raises:
        ParallelError: an expert that there is not was chosen.
    """
    choices = index.reshape(-1)
    wrong = ((choices < 0) | (choices > experts)).any().view(1)
    # Clamped on one rank as well: the error is raised below, in words.
    counts = _counted(choices.clamp(0, experts), experts)
    *numbers, is_wrong = torch.cat([counts, wrong]).tolist()
    if is_wrong:
        raise ParallelError(_NO_EXPERT.format(experts=experts, where=""))
    out, back = _orders(choices, sum(numbers), index.shape[1])
    return out, back, numbers


def _counted(choices: Tensor, experts: int) -> Tensor:
    """Return how often each expert was chosen; `experts` stands for none."""
    if choices.is_cpu:
        return torch.bincount(choices, minlength=experts + 1)[:experts]
    # `bincount` asks the device for the largest choice, and waits.
    return _added_up(choices, experts)


def _added_up(choices: Tensor, experts: int) -> Tensor:
    found = torch.zeros(experts + 1, dtype=torch.int64, device=choices.device)
    return found.scatter_add_(0, choices, torch.ones_like(choices, dtype=torch.int64))[:experts]


def _orders(choices: Tensor, kept: int, k: int) -> tuple[Order, Order]:
    """Return the order in which pairs leave, by expert and then by token, and that of their return.

    `kept` of the choices, all of those that are not dropped, leave.
    """
    # Stable, and dropped ones are behind all others.
    by_expert = choices.argsort(stable=True)
    # The inverse of a permutation, by scattering: cheaper than a second sort.
    places = torch.empty_like(by_expert)
    places[by_expert] = torch.arange(len(choices), device=choices.device)
    gaps = kept < len(choices)
    leaving = by_expert[:kept]
    # All dropped ones point behind the last row, where a row of zeros is taken.
    places = places.clamp(max=kept) if gaps else places
    return (
        Order(leaving // k, places, times=k, gaps=gaps),
        Order(places, leaving, times=1, gaps=gaps),
    )


def _sent(rows: Tensor, group: Group, sizes: SplitSizes) -> Tensor:
    """Exchange rows, as many with each member as `sizes` says."""
    width = rows.shape[1]
    # In elements, as rows have no dim of their own in a flat exchange; widths are equal everywhere.
    flat = SplitSizes([n * width for n in sizes.send], [n * width for n in sizes.receive])
    return all_to_all_single(rows.reshape(-1), group, sizes=flat).view(sizes.total, width)


def _require_experts(wrong: Sequence[bool], shares: Shares) -> None:
    if any(wrong):
        # Everyone has heard it in the same exchange, so every rank raises.
        members = [member for member, one in enumerate(wrong) if one]
        where = f", on members {members} of {shares.group.name}"
        raise ParallelError(_NO_EXPERT.format(experts=shares.experts, where=where))
