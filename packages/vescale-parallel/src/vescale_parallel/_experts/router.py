"""A router: which experts each token is for, and how much each of them counts."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from vescale_dtensor import DTensor

Scores = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """What a router decided about the tokens of one call.

    Attributes:
        logits: (tokens, experts).
        chosen: (tokens, k), the experts of each token; the number of experts stands for a choice
            that was dropped, as its expert was full.
        weights: (tokens, k), how much each of them counts.
    """

    logits: Tensor
    chosen: Tensor
    weights: Tensor

    def load(self) -> Tensor:
        """Return how many tokens each expert gets, and behind the last, how many were dropped."""
        experts = self.logits.shape[-1]
        return functional.one_hot(self.chosen, experts + 1).sum(dim=(0, 1))


class Router(nn.Module):
    """Chooses the `top_k` experts with the highest scores.

    Args:
        width: of a token.
        experts: how many there are.
        top_k: how many are chosen.
        scores: "softmax" over all experts, or "sigmoid" of each.
        normalize: whether the weights of the chosen ones are divided by their sum.
        scale: factor of the weights.
        capacity: how many tokens an expert takes, as a multiple of what it would have if all had
            as many. Later choices, in the order of the tokens, are dropped. None: all are taken.
        device: as for `torch.nn.Linear`.
        dtype: as for `torch.nn.Linear`.
    """

    balance: Tensor

    def __init__(
        self,
        width: int,
        experts: int,
        top_k: int,
        *,
        scores: Scores = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        capacity: float | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k={top_k} of {experts} experts: choose 1 to {experts}.")
        if scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores={scores!r}: 'softmax' or 'sigmoid'.")
        if capacity is not None and not 0 < capacity < math.inf:
            raise ValueError(f"capacity={capacity}: a positive multiple, or None.")
        self.top_k, self.experts, self.scores = top_k, experts, scores
        self.normalize, self.scale, self.capacity = normalize, scale, capacity
        self.weight = nn.Parameter(torch.empty(experts, width, device=device, dtype=dtype))
        self.register_buffer("balance", torch.zeros(experts, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Routing:
        """Route x (tokens, width)."""
        # In float32: in half precision ties are common, and which expert wins a tie may differ
        # between kernels.
        logits = functional.linear(x.float(), self.weight.float())
        scores = logits.softmax(dim=-1) if self.scores == "softmax" else logits.sigmoid()
        # `balance` has a say in what is chosen, and none in how much it counts.
        index = (scores + self.balance).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, index)
        if self.normalize:
            # Of sigmoids all may be zero.
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        if self.capacity is not None:
            index = self._within_capacity(index)
        return Routing(logits, index, weights * self.scale)

    @torch.no_grad()
    def update_balance(self, load: Tensor, rate: float = 1e-3) -> None:
        """Let experts with fewer tokens than the mean be chosen more often, and others less.

        In place of a loss: `balance`, which is added to the scores where experts are chosen, grows
        or falls by `rate`. Called after a step, on every rank.

        Args:
            load: tokens of each expert, as `Routing.load` counts them; of several microbatches, or
                layers' calls, their sum.
            rate: of the change.
        """
        counts = load.full_tensor() if isinstance(load, DTensor) else load
        counts = counts[: self.experts].to(self.balance.dtype)
        # By the sign, not by the distance: a few overloaded steps must not outweigh all others
        # (DeepSeek-V3, 2.1.2).
        self.balance += rate * torch.sign(counts.mean() - counts)

    def _within_capacity(self, index: Tensor) -> Tensor:
        """Return the choices, with those that find their expert full dropped."""
        assert self.capacity is not None
        # Of the global batch: `index` is a distributed tensor on a mesh, and its shape the global
        # one.
        room = math.ceil(self.capacity * index.shape[0] * self.top_k / self.experts)
        chosen = functional.one_hot(index, self.experts).flatten(0, 1)
        # Counted over all tokens of the batch in their order, wherever these are.
        before = chosen.cumsum(dim=0) - chosen
        full = ((before * chosen).sum(dim=-1) >= room).view(index.shape)
        return index.masked_fill(full, self.experts)
