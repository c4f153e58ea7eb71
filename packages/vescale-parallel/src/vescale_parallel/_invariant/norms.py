"""Running statistics of batch norms: those of the whole batch, by the tree over its shards.

A norm in training mode takes the mean and the variance of the rows that it sees, which are those of
one logical shard, as they are those of one rank in data parallel training without synchronisation.
What is kept for evaluation is merged over all shards (Chan, Golub and LeVeque 1979, equation 2.1),
pair by pair in the order of the tree, and written once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from vescale_comm import Group
from vescale_dtensor import DTensor

from vescale_parallel._common.torch_compat import in_backward
from vescale_parallel._invariant.resolve import kept_norms
from vescale_parallel._invariant.shard_rows import rows_of_all
from vescale_parallel._invariant.tree import total

_BUFFERS: Final = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Moments:
    """Of some values by channel: how many, their mean, and the squares of what is left of them."""

    count: float
    mean: Tensor
    squares: Tensor

    def __add__(self, other: Moments) -> Moments:
        """Those of both."""
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        between = apart.square() * (self.count * other.count / count)
        return Moments(count, mean, self.squares + other.squares + between)


class RunningStatistics:
    """Takes what the norms of a model find in each shard, and updates them by all of it.

    Args:
        model: whose norms in training mode keep running statistics.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms: list[Any] = [model.get_submodule(name) for name in kept_norms(model)]
        self._calls: dict[int, list[Moments]] = {}
        self._by_shard: dict[int, Tensor] = {}
        self._forms: set[tuple[int, ...]] = set()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Let the norms write to other buffers, which are read behind each of their calls."""
        before = [
            (one, one.momentum, {n: one._buffers[n] for n in _BUFFERS}) for one in self._norms
        ]
        hooks = []
        try:
            for at, (norm, _, buffers) in enumerate(before):
                norm._buffers.update({n: torch.zeros_like(b) for n, b in buffers.items()})
                # Of zero and the new value, all of the latter: what is left is what was found.
                norm.momentum = 1.0
                hooks.append(norm.register_forward_hook(_Note(self._calls, at)))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for norm, momentum, buffers in before:
                norm.momentum = momentum
                norm._buffers.update(buffers)

    def put(self, shard: int | None) -> None:
        """Keep what the forward of a shard has found; None: only how often norms were called."""
        found = [self._calls.get(at, []) for at in range(len(self._norms))]
        self._calls.clear()
        self._forms.add(tuple(len(calls) for calls in found))
        if shard is not None:
            self._by_shard[shard] = _packed(found)

    def form(self) -> list[list[int]]:
        """How often each norm was called in a shard: one row, if it was the same in all."""
        return sorted(list(form) for form in self._forms)

    def problem(self) -> str:
        """Return what was wrong with this rank's shards; empty if nothing was."""
        if len(self._forms) < 2:
            return ""
        return (
            "batch norms are called more often in some logical shards than in others: their "
            "running statistics are means over all of them."
        )

    def update(
        self, shards: Sequence[Sequence[int]], group: Group | None, leaves: int, device: str
    ) -> None:
        """Write the statistics of the whole batch. Collective.

        Args:
            shards: for each rank, those of its shards that have rows.
            group: the ranks that share the batch; None: this one alone.
            leaves: of the tree.
            device: of a rank without rows, which has found nothing.
        """
        # One form in all shards, or `problem` has been raised on every rank.
        (form,) = self._forms
        if not sum(form):
            return
        # Of the global buffer: a norm whose channels are sharded has noted all of them.
        channels = [norm._buffers["running_mean"].numel() for norm in self._norms]
        width = sum(n * (1 + 2 * c) for n, c in zip(form, channels, strict=True))
        # Of the right width: the exchange takes equal rows of all ranks.
        nothing = torch.zeros(0, width, dtype=torch.float64, device=device)
        rows = rows_of_all(self._by_shard, nothing, shards, group)
        found = total(
            leaves,
            {(shard, shard + 1): _Calls.of(row, channels, form) for shard, row in rows.items()},
            _Calls.__add__,
        )
        assert found is not None
        calls = iter(found.calls)
        for norm, number in zip(self._norms, form, strict=True):
            for _ in range(number):
                _write(norm, next(calls))


@dataclass(frozen=True)
class _Calls:
    """What all norms have found in some shards, call by call."""

    calls: list[Moments]

    @classmethod
    def of(cls, row: Tensor, channels: Sequence[int], form: Sequence[int]) -> _Calls:
        calls, at = [], 0
        for number, each in zip(form, channels, strict=True):
            for _ in range(number):
                mean, squares = row[at + 1 : at + 1 + 2 * each].view(2, each)
                calls.append(Moments(float(row[at]), mean, squares))
                at += 1 + 2 * each
        return cls(calls)

    def __add__(self, other: _Calls) -> _Calls:
        return _Calls([a + b for a, b in zip(self.calls, other.calls, strict=True)])


class _Note:
    """The forward hook of a norm."""

    def __init__(self, calls: dict[int, list[Moments]], at: int) -> None:
        self._calls, self._at = calls, at

    def __call__(self, norm: Any, args: Any, output: Any) -> None:
        # A recomputation finds the same once more.
        if in_backward():
            return
        found = output[0] if isinstance(output, tuple) else output
        count = found.numel() // found.shape[1]
        mean, variance = (_plain(norm._buffers[n]).double() for n in _BUFFERS[:2])
        # Sums of squares and not variances: those of several shards can be added (Chan et al.
        # 1979).
        moments = Moments(float(count), mean, variance * (count - 1))
        self._calls.setdefault(self._at, []).append(moments)
        for name in _BUFFERS[:2]:
            norm._buffers[name].zero_()


def _plain(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.clone()


def _packed(found: Sequence[Sequence[Moments]]) -> Tensor:
    """What one shard has found, in a row of float64, which holds all floats and counts."""
    parts = [
        part
        for calls in found
        for one in calls
        for part in (one.mean.new_tensor([one.count]), one.mean, one.squares)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device="cpu")


@torch.no_grad()
def _write(norm: Any, found: Moments) -> None:
    """Update running statistics by those of a batch, as torch does behind a forward."""
    norm.num_batches_tracked.add_(1)
    factor = norm.momentum
    if factor is None:  # the mean of all batches so far
        factor = 1.0 / float(norm.num_batches_tracked)
    # torch normalises by the biased variance, and keeps the unbiased one.
    unbiased = found.squares / (found.count - 1)
    for buffer, new in ((norm.running_mean, found.mean), (norm.running_var, unbiased)):
        buffer.copy_(buffer.double() * (1 - factor) + new.to(buffer.device) * factor)
