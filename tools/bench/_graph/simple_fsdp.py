"""The peer of the benchmark `graph`: FSDP as the compiler can see it (SimpleFSDP, 2411.00284).

Written from the paper's description, with public torch only: each parameter is a `DTensor` that is
sharded over dp; reading it gathers it, by a property of a class that stands in for the module's;
its gradient is scattered back by autograd; the gather is recomputed in the backward. The model is
compiled. The passes of the paper that merge and reorder collectives are not in torch: what they
became there (2.13) does not run without a GPU, so there is a collective for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tools.bench._train.model import Sizes, seeded
from tools.bench._train.training import adamw, mean_over, own_rows

_functional: Any = torch.ops._c10d_functional
_GATHERS = frozenset({_functional.all_gather_into_tensor.default, _functional.wait_tensor.default})


class SimpleFSDP:
    """The model with gathers as a part of it, compiled."""

    compiled = True

    def __init__(self, sizes: Sizes, mesh: DeviceMesh, *, backend: str = "inductor") -> None:
        self.mesh = mesh
        model = seeded(sizes)
        for module in list(model.modules()):
            _shard(module, mesh)
        self.model: Callable[..., Tensor] = torch.compile(model, backend=backend, fullgraph=True)
        self.optimizer: Optimizer = adamw(model.parameters())

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As users write it: every rank its own rows."""
        self.optimizer.zero_grad()
        loss = self.model(own_rows(tokens, self.mesh), own_rows(targets, self.mesh))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def value(self, loss: Tensor) -> float:
        """The mean over dp."""
        return mean_over(self.mesh, loss)


def _shard(module: nn.Module, mesh: DeviceMesh) -> None:
    own = {name: one for name, one in module._parameters.items() if one is not None}
    for name, whole in own.items():
        module._parameters[name] = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
    kind: Any = type(module)
    if own:
        module.__class__ = _parametrized(kind, tuple(own))


@cache
def _parametrized(kind: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """A class whose parameters are gathered whenever they are read."""
    properties = {name: property(partial(_read, name)) for name in names}
    return type(f"SimpleFSDP{kind.__name__}", (kind,), properties)


def _read(name: str, module: nn.Module) -> Tensor:
    stored = module._parameters[name]
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    found: Tensor = checkpoint(_whole, stored, use_reentrant=False, context_fn=contexts)
    return found


def _whole(stored: DTensor) -> Tensor:
    whole = stored.redistribute(placements=[Replicate()])
    local: Tensor = whole.to_local(grad_placements=[Partial("avg")])
    return local


def _policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    recomputed = func in _GATHERS
    return CheckpointPolicy.MUST_RECOMPUTE if recomputed else CheckpointPolicy.MUST_SAVE
