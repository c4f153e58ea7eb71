"""Ways to train that scripts have in common: what they do to a model, and what a step is.

A recipe takes a model that is laid out already (or not) and trains it for some steps; it knows
nothing of meshes. `compare` runs it on one device and on a mesh.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from model_runs import LAYOUTS, share, whole
from model_zoo import MODELS
from model_zoo_more import automatic
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations
from torch.optim import swa_utils
from vescale_comm.testing import device_mesh
from vescale_parallel import Plan, parallelize

Parameters = Iterator[nn.Parameter]
Recipe = Callable[[nn.Module, Callable[[int], dict[str, Tensor]]], dict[str, Tensor]]
RECIPES: dict[str, Recipe] = {}
STEPS = 3


def named(name: str, recipe: Recipe) -> Recipe:
    RECIPES[name] = recipe
    return recipe


def losses(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**inputs).loss
    return loss


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def with_optimizer(make: Callable[[Parameters], optim.Optimizer]) -> Recipe:
    """Forward, backward, step."""

    def train(model: nn.Module, batch: Callable[[int], dict[str, Tensor]]) -> dict[str, Tensor]:
        optimizer = make(p for p in model.parameters() if p.requires_grad)
        for step in range(STEPS):
            optimizer.zero_grad()
            losses(model, batch(step)).backward()
            optimizer.step()
        return parameters_of(model)

    return train


def sgd(parameters: Parameters) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


OPTIMIZERS: dict[str, Callable[[Parameters], optim.Optimizer]] = {
    "SGD": sgd,
    "Adagrad": lambda ps: optim.Adagrad(ps, lr=0.01, eps=1e-3),
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=1e-3, momentum=0.5, eps=1e-3),
    "Adafactor": lambda ps: optim.Adafactor(ps, lr=1e-3),
    "NAdam": lambda ps: optim.NAdam(ps, lr=1e-3, eps=1e-3),
    "AdamW, amsgrad": lambda ps: optim.AdamW(ps, lr=1e-3, eps=1e-3, amsgrad=True),
}
for name, make in OPTIMIZERS.items():
    named(name, with_optimizer(make))
if hasattr(optim, "Muon"):
    # Matrices only; what it does to a matrix is no pointwise op.
    named("Muon", with_optimizer(lambda ps: optim.Muon([p for p in ps if p.ndim == 2], lr=1e-2)))


def lbfgs(model: nn.Module, batch: Callable[[int], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The step calls for losses, several times; their values decide how far it goes."""
    model.eval()
    optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = losses(model, batch(0))
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return parameters_of(model)


def checkpointed(model: nn.Module, batch: Callable[[int], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Activations are made again in backward, with the dropout that they had."""
    enable: Any = model.gradient_checkpointing_enable
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return with_optimizer(sgd)(model, batch)


def accumulated(model: nn.Module, batch: Callable[[int], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Two batches for each step, and clipping in between."""
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        for half in range(2):
            (losses(model, batch(2 * step + half)) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model)


def averaged(model: nn.Module, batch: Callable[[int], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Exponential and plain averages of the parameters, beside the training."""
    kinds = {
        "ema": swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.7)),
        "swa": swa_utils.AveragedModel(model),
    }
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        losses(model, batch(step)).backward()
        optimizer.step()
        for average in kinds.values():
            average.update_parameters(model)
    found = parameters_of(model)
    for kind, average in kinds.items():
        found |= {f"{kind}.{name}": p for name, p in average.module.named_parameters()}
    return found


def parametrized(model: nn.Module, batch: Callable[[int], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Weight norm on one layer, spectral norm on another, after they were laid out."""
    first, second = model.model.layers  # type: ignore[union-attr]
    parametrizations.weight_norm(first.mlp.up_proj)
    torch.manual_seed(5)
    parametrizations.spectral_norm(second.self_attn.o_proj)
    return with_optimizer(sgd)(model, batch)


class LowRank(nn.Module):
    """A linear layer that is left alone, and what is learned beside it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.3)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.3)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's result, and what was learned."""
        found: Tensor = self.base(x) + self.dropout(x) @ self.down.T @ self.up.T
        return found


def adapted(model: nn.Module) -> None:
    """Low-rank matrices beside all projections; nothing else learns."""
    model.requires_grad_(False)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "_proj" in n]
    for name in names:
        model.set_submodule(name, LowRank(model.get_submodule(name)))  # type: ignore[arg-type]


RECIPES |= {
    "LBFGS": lbfgs,
    "checkpointing": checkpointed,
    "accumulation": accumulated,
    "averages": averaged,
    "parametrizations": parametrized,
    "low rank": with_optimizer(sgd),
}
# What is done to a model before it is laid out.
BEFORE: dict[str, Callable[[nn.Module], None]] = {"low rank": adapted}


def compare(rank: int, world_size: int, recipe: str, layout: str) -> dict[str, float]:
    """How far the parameters of a mesh are from those of one device, by name."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(action="ignore"):
        return compared(recipe, LAYOUTS[layout])


def compared(recipe: str, sizes: dict[str, int]) -> dict[str, float]:
    model = MODELS["Llama"]
    torch.manual_seed(0)
    dense = model.make().train()
    BEFORE.get(recipe, lambda _: None)(dense)
    plan = automatic(dense) if recipe in BEFORE else model.plan
    mesh = device_mesh(tuple(sizes.values()), tuple(sizes))
    ours = parallelize(copy.deepcopy(dense), mesh, Plan(batch="dp:0", parameters=plan))
    first = {name: whole(p).clone() for name, p in dense.named_parameters()}
    found: list[dict[str, Tensor]] = []
    for each in (dense, ours):
        torch.manual_seed(11)
        found.append(RECIPES[recipe](each, lambda step: model.inputs(5 + step % 2)))
    wanted, got = found
    assert got.keys() == wanted.keys()
    moved = [
        name for name in first if name in wanted and not torch.equal(first[name], wanted[name])
    ]
    assert moved, "nothing was learned"
    return {name: share(got[name], wanted[name], 1e-2) for name in wanted}
