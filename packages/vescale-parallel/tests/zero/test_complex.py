"""Complex parameters, which optimizers step as pairs of numbers, train as on one device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_parallel import Plan, parallelize
from vescale_parallel import mesh as make_mesh

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda own: torch.optim.Adam(own, lr=0.05, amsgrad=True),
    "AdamW, one by one": lambda own: torch.optim.AdamW(own, lr=0.05, foreach=False),
    "RMSprop": lambda own: torch.optim.RMSprop(own, lr=0.05, momentum=0.9, centered=True),
    "Adadelta": lambda own: torch.optim.Adadelta(own),
    "NAdam": lambda own: torch.optim.NAdam(own, lr=0.05),
    "RAdam": lambda own: torch.optim.RAdam(own, lr=0.05),
}


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.last((x.to(torch.complex64) @ self.matrix).abs())
        return (found + self.bias.abs()).square().mean()


def train(model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> list[float]:
    optimizer, found = make(model.parameters()), []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Spectral()


@pytest.mark.parametrize("zero", [1, 3])
def test_the_losses_of_one_device(zero: int):
    def on_a_rank(rank: int, world_size: int) -> list[list[float]]:
        mesh, plan = make_mesh(device_type="cpu", dp=2), Plan(zero=zero, axes=("dp",))
        return [train(parallelize(make_model(), mesh, plan), one) for one in OPTIMIZERS.values()]

    expected = [train(make_model(), one) for one in OPTIMIZERS.values()]
    for found in simulate(2).run(on_a_rank):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-4, atol=1e-5)
