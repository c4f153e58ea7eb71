"""`p.data = values` between forwards: the former memory stays as it was, on every level."""

import pytest
import torch
from program_ways import batch, distributed, make, values
from torch import nn
from vescale_comm import simulate


def between_forward_and_backward(model: nn.Module, at: int) -> list[torch.Tensor]:
    loss = model(*batch(0))
    one = list(model.parameters())[at]
    one.data = one.data * 2
    loss.backward()
    return [one.grad for one in model.parameters()]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_backward_has_the_values_of_its_forward_or_is_an_error(zero: int):
    """At level 3 the first block is gathered again in backward."""
    expected = between_forward_and_backward(make(), 2)

    def on_a_rank(rank: int, world_size: int) -> None:
        if zero == 3:
            with pytest.raises(RuntimeError, match=r"'blocks\.0\.0\.weight' is at version"):
                between_forward_and_backward(distributed(make(), "zero3"), 2)
            return
        found = between_forward_and_backward(distributed(make(), f"zero{zero}"), 2)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)

    simulate(2).run(on_a_rank)


def test_one_of_a_unit_is_taken_out():
    """The others train on, and what was taken out comes back as it was."""

    def run(model: nn.Module) -> list[float]:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        saved = model.head.bias.data
        model.head.bias.data = torch.zeros_like(saved)
        for step in range(3):
            optimizer.zero_grad()
            model(*batch(step)).backward()
            optimizer.step()
        model.head.bias.data = saved
        return [*values(model), float(model(*batch(3)).detach())]

    expected = torch.tensor(run(make()))

    def on_a_rank(rank: int, world_size: int) -> list[list[float]]:
        return [run(distributed(make(), f"zero{zero}")) for zero in (1, 3)]

    for ways in simulate(2).run(on_a_rank):
        for found in ways:
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-5)
