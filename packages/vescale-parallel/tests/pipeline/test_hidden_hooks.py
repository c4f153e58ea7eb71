"""What hooks within blocks collect is never missed in silence by a stage whose own have none."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_parallel import PipelineError, Plan, forward_backward, mesh, parallelize
from zero_models import whole


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.inner(x))
        return found


class Model(nn.Module):
    """Adds to its loss what hooks have put in a list, and nothing where it is empty."""

    def __init__(self, hooked: tuple[int, ...], hook: Callable[[list[Any], Tensor], None]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.kept: list[Any] = []
        for at in hooked:
            inner: Any = self.blocks[at].inner
            inner.register_forward_hook(lambda module, args, output: hook(self.kept, output))

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        for block in self.blocks:
            x = block(x)
        found = [one.square().mean() for one in self.kept if isinstance(one, Tensor)]
        return x.square().mean() + sum(found)


def collects(kept: list[Any], output: Tensor) -> None:
    kept.append(output)


def computes(kept: list[Any], output: Tensor) -> None:
    kept.append(output.abs())


def watches(kept: list[Any], output: Tensor) -> None:
    assert output.shape == (2, 4)


def reads(kept: list[Any], output: Tensor) -> None:
    kept.append(output.sum().item())


def make(hooked: tuple[int, ...], hook: Any) -> Model:
    torch.manual_seed(0)
    return Model(hooked, hook)


def on_a_rank(rank: int, world_size: int, hooked: Any, hook: Any, schedule: str) -> str:
    plain, model = make(hooked, hook), make(hooked, hook)
    words = {"stages": "blocks.*", "microbatches": 4, "schedule": schedule}
    parallelize(model, mesh(pp=world_size, device_type="cpu"), Plan(pipeline=words))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(3):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            expected = torch.zeros(())
            for one in x.split(2):
                loss = plain(one) / 4
                loss.backward()
                expected += loss.detach()
            try:
                found = forward_backward(model, x)
            except PipelineError as error:
                return str(error)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(one.grad), other.grad, rtol=1e-5, atol=1e-6)
    return "; ".join(str(one.message) for one in told)


HOOKED = [(0,), (0, 1), (1, 2), (0, 3), (3,)]
MESHES = [(2, "1f1b"), (4, "zb-h1"), (2, "zbv")]


@pytest.mark.parametrize("size_schedule", MESHES, ids=str)
@pytest.mark.parametrize("hooked", HOOKED, ids=str)
def test_what_hooks_collect_is_there(hooked: Any, size_schedule: tuple[int, str]):
    size, schedule = size_schedule
    assert simulate(size).run(on_a_rank, hooked, collects, schedule) == [""] * size


@pytest.mark.parametrize("hooked", HOOKED, ids=str)
def test_what_they_compute_of_it_is_refused(hooked: Any):
    for words in simulate(2).run(on_a_rank, hooked, computes, "1f1b"):
        assert "only earlier stages have" in words or "outside of the blocks, takes" in words


def test_hooks_that_collect_nothing_stay_as_they_are():
    assert simulate(2).run(on_a_rank, (0,), watches, "1f1b") == ["", ""]
    # What reads values cannot be called with what stands for them: the other stage is told so.
    first, second = simulate(2).run(on_a_rank, (0,), reads, "1f1b")
    for words in (first, second):
        assert "a forward hook on 'blocks.0.inner' on stage 1 failed" in words
        assert "called on the stages of these blocks only" in words
