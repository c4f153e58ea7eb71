"""`p.data = values` leaves the former memory as it was, and `p.grad.data =` is not lost."""

from collections.abc import Callable

import pytest
import torch
from program_ways import batch, distributed, make, values
from torch import nn
from vescale_comm import simulate
from vescale_parallel import no_sync


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


def halved(p: nn.Parameter) -> None:
    p.grad.data = p.grad.data * 0.5


def halved_in_place(p: nn.Parameter) -> None:
    p.grad.data *= 0.5


def of_other_memory(p: nn.Parameter) -> None:
    p.grad.set_(p.grad * 2)


def put_back(p: nn.Parameter) -> None:
    saved = p.grad.data
    p.grad.data = torch.zeros_like(saved)
    p.grad.data = saved


@pytest.mark.parametrize("change", [halved, halved_in_place, of_other_memory, put_back])
def test_data_of_a_gradient_that_no_sync_keeps(change: Callable[[nn.Parameter], None]):
    def run(model: nn.Module, *, last: bool) -> list[float]:
        with no_sync(model):
            model(*batch(0)).backward()
            for one in model.parameters():
                held = one.grad
                change(one)
                assert one.grad is held
        if last:
            model(*batch(1)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return values(model)

    for last in (True, False):
        expected = torch.tensor(run(make(), last=last))

        def on_a_rank(rank: int, world_size: int, last: bool = last) -> list[float]:
            return run(distributed(make(), "zero3"), last=last)

        for found in simulate(2).run(on_a_rank):
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-5)


def test_what_one_rank_reads_alone():
    """By `detach()`: what is handed out by itself is gathered at each use, which ranks share."""

    def run(model: nn.Module, reads: bool) -> list[float]:
        adam = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            adam.zero_grad()
            model(*batch(step)).backward()
            adam.step()
            if reads:
                for one in model.parameters():
                    one.detach().to_local().norm()  # type: ignore[operator]
        return values(model)

    expected = torch.tensor(run(make(), False))
    for level in range(1, 4):

        def on_a_rank(rank: int, world_size: int, level: int = level) -> list[float]:
            return run(distributed(make(), f"zero{level}"), rank == 0)

        for found in simulate(2).run(on_a_rank):
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-5)
