"""torch's parametrizations of sharded weights: orthogonal, weight_norm, spectral_norm, old and new.

Values and gradients are those of one device, on dp=2 x tp=2, in uneven layouts as well.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from one_device import check
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize
from vescale_comm.testing import on_ranks
from vescale_dtensor import Replicate, Shard

LAYOUTS = ((Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(1), Shard(0)))


def orthogonal(kind, trivial):
    return lambda module: parametrizations.orthogonal(
        module, orthogonal_map=kind, use_trivialization=trivial
    )


class Lower(nn.Module):
    """A parametrization of one's own."""

    def forward(self, x):
        return x.tril() + x.tril(-1)

    def right_inverse(self, x):
        return x.tril()


def removed(module):
    parametrizations.weight_norm(module)
    parametrize.remove_parametrizations(module, "weight")


PARAMETRIZATIONS = {
    "our own": lambda m: parametrize.register_parametrization(m, "weight", Lower(), unsafe=True),
    "removed": removed,
    "orthogonal": parametrizations.orthogonal,
    **{
        f"orthogonal, {kind}, {trivial}": orthogonal(kind, trivial)
        for kind in ("matrix_exp", "cayley", "householder")
        for trivial in (True, False)
    },
    "weight_norm": parametrizations.weight_norm,
    "weight_norm of all": lambda module: parametrizations.weight_norm(module, dim=None),
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": utils.weight_norm,
    "old spectral_norm": utils.spectral_norm,
}


def trained(place, parametrize, rows, columns, layout):
    torch.manual_seed(0)
    module = nn.Linear(columns, rows)
    weight = module.weight.detach()
    module.weight = nn.Parameter(weight) if place.mesh is None else place.parameter(weight, *layout)
    parametrize(module)
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for step in range(2):
        x = place(torch.linspace(-1, 1, 5 * columns).reshape(5, columns) + step, Shard(0))
        loss = module(x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [losses, [p.grad for p in module.parameters()], module.weight.detach()]


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
@on_ranks(4, simulated=True)
def test_as_on_one_device(name):
    for rows, columns in ((3, 5), (5, 3), (4, 4)):
        for layout in LAYOUTS:
            with warnings.catch_warnings(action="ignore"):
                check(
                    lambda place: trained(
                        place,
                        PARAMETRIZATIONS[name],
                        rows,  # noqa: B023
                        columns,  # noqa: B023
                        layout,  # noqa: B023
                    )
                )
