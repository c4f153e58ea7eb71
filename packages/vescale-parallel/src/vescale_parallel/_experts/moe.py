"""A layer of experts for one device, which plans shard: a router, experts, and shared experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vescale_parallel._experts.exchange import combined, ordered_pairs
from vescale_parallel._experts.router import Router, Routing, Scores
from vescale_parallel._experts.rows import taken


class Experts(nn.Module):
    """Gated layers side by side: `down(activation(gate(x)) * up(x))`, one for each expert.

    Args:
        width: of a token.
        hidden: between the two products of an expert.
        experts: how many there are.
        activation: of the gate.
        device: as for `torch.nn.Linear`.
        dtype: as for `torch.nn.Linear`.
    """

    # As `use_experts_implementation` of Hugging Face says how stacks lie.
    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        *,
        activation: Callable[[Tensor], Tensor] = functional.silu,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.act_fn = experts, activation
        self.has_gate = self.is_concatenated = True
        self.has_bias = self.is_transposed = False
        options = {"device": device, "dtype": dtype}
        # All gates before all ups in one stack: one product for both.
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, width, **options))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden, **options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values, each expert as a `torch.nn.Linear` does."""
        for stack in (self.gate_up_proj, self.down_proj):
            # What `kaiming_uniform_(a=sqrt(5))`, as `nn.Linear` has it, comes to; a stack has no
            # fan that torch could read off its shape.
            bound = 1 / math.sqrt(stack.shape[2])
            nn.init.uniform_(stack, -bound, bound)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what the chosen experts say (tokens, width).

        Args:
            hidden: (tokens, width).
            index: (tokens, k), experts; `num_experts` is a choice that is dropped.
            weights: (tokens, k).
        """
        out, back, counts = ordered_pairs(index, self.num_experts)
        rows = torch.split(taken(hidden, out), counts)
        # All experts take part, also with no rows: they have gradients then, which are zeros.
        said = [
            self._one(x, *stacks)
            for x, *stacks in zip(
                rows, self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True
            )
        ]
        pairs = taken(torch.cat(said), back).view(*index.shape, hidden.shape[1])
        return combined(pairs, index, weights, self.num_experts, ordered=False)

    def _one(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
        return functional.linear(self.act_fn(gate) * up, down)


class MoE(nn.Module):
    """A layer of experts in place of a feed-forward layer; an ordinary module of one device.

    Args:
        width: of a token.
        hidden: between the two products of an expert.
        experts: how many there are.
        top_k: how many of them each token chooses.
        shared: width between the products of a gated layer that all tokens go through; 0: none.
        scores: as for the router: "softmax" or "sigmoid".
        normalize: whether the weights of the chosen ones are divided by their sum.
        scale: factor of the weights.
        capacity: how many tokens an expert takes, as a multiple of what it would have if all had
            as many; later ones are dropped. None: all are taken.
        activation: of the gates.
        device: as for `torch.nn.Linear`.
        dtype: as for `torch.nn.Linear`.

    Examples:
        >>> layer = MoE(16, 32, experts=8, top_k=2)
        >>> out, routing = layer(torch.randn(4, 10, 16), with_routing=True)
        >>> out.shape, routing.load().sum().item()
        (torch.Size([4, 10, 16]), 80)
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        shared: int = 0,
        scores: Scores = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        capacity: float | None = None,
        activation: Callable[[Tensor], Tensor] = functional.silu,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.router = Router(
            width,
            experts,
            top_k,
            scores=scores,
            normalize=normalize,
            scale=scale,
            capacity=capacity,
            **options,
        )
        self.experts = Experts(width, hidden, experts, activation=activation, **options)
        self.shared = Gated(width, shared, activation=activation, **options) if shared else None

    def forward(self, x: Tensor, *, with_routing: bool = False) -> Any:
        """Return what the experts say about x (..., width), and if asked for, the `Routing`."""
        tokens = x.reshape(-1, x.shape[-1])
        routing: Routing = self.router(tokens)
        # Routers compute in float32, and a factor of float32 would make the result one, too.
        weights = routing.weights.to(x.dtype)
        out = self.experts(tokens, routing.chosen, weights).view(x.shape)
        if self.shared is not None:
            out = out + self.shared(x)
        return (out, routing) if with_routing else out


class Gated(nn.Module):
    """One gated layer: `down(activation(gate(x)) * up(x))`.

    Args:
        width: of a token.
        hidden: between the two products.
        activation: of the gate.
        device: as for `torch.nn.Linear`.
        dtype: as for `torch.nn.Linear`.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: Callable[[Tensor], Tensor] = functional.silu,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        options = {"bias": False, "device": device, "dtype": dtype}
        self.act_fn = activation
        self.gate = nn.Linear(width, hidden, **options)
        self.up = nn.Linear(width, hidden, **options)
        self.down = nn.Linear(hidden, width, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer says about x (..., width)."""
        return self.down(self.act_fn(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]
