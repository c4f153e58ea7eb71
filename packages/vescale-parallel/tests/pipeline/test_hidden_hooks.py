"""What hooks within blocks collect is never missed in silence by a stage whose own have none."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_runs import accumulate, require_gradients, staged, step_both
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_parallel import PipelineError, forward_backward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


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


def in_stages(model: Model, world_size: int, schedule: str) -> None:
    staged(model, {"pp": world_size}, stages="blocks.*", microbatches=4, schedule=schedule)


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def on_a_rank(rank: int, world_size: int, hooked: Any, hook: Any, schedule: str) -> str:
    plain, model = make(hooked, hook), make(hooked, hook)
    in_stages(model, world_size, schedule)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(3):
            expected = accumulate(plain, 4, batch(step))
            try:
                found = forward_backward(model, batch(step))
            except PipelineError as error:
                return str(error)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    require_gradients(model, plain, atol=1e-6)
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


def register(model: Model, hook: Any, blocks: tuple[int, ...] = (0, 1, 2, 3)) -> list[Any]:
    return [
        model.blocks[at].inner.register_forward_hook(  # type: ignore[union-attr]
            lambda module, args, output: hook(model.kept, output)
        )
        for at in blocks
    ]


def hooked_later(rank: int, world_size: int, schedule: str, evaluates: bool) -> None:
    plain, model = make((), collects), make((), collects)
    in_stages(model, world_size, schedule)
    handles: list[Any] = []
    for step in range(6):
        if step == 2:
            # Of the first stage alone: the last one's blocks have none.
            handles = [one for each in (plain, model) for one in register(each, collects, (0,))]
        if step == 4:
            for one in handles:
                one.remove()
        if evaluates:
            with torch.no_grad():
                found, expected = model(batch(step)), plain(batch(step))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        step_both(model, plain, 4, batch(step), rtol=1e-5)
    require_gradients(model, plain, atol=1e-6)


@pytest.mark.parametrize("size_schedule", MESHES, ids=str)
@pytest.mark.parametrize("evaluates", [False, True], ids=["trains", "evaluates as well"])
def test_hooks_that_come_later_are_looked_for(size_schedule: tuple[int, str], evaluates: bool):
    size, schedule = size_schedule
    simulate(size).run(hooked_later, schedule, evaluates)


def watched_on_one(rank: int, world_size: int, watching: int) -> tuple[int, int]:
    plain, model = make((), watches), make((), watches)
    in_stages(model, world_size, "1f1b")
    calls, learned = 0, []

    def counts(kept: list[Any], output: Tensor) -> None:
        nonlocal calls
        calls += 1

    for step in range(5):
        if step == 2 and rank == watching:
            register(model, counts)
        before = calls
        step_both(model, plain, 4, batch(step), rtol=1e-5)
        learned.append(calls - before)
    # The first of these steps tries once more; then each microbatch calls its own two blocks.
    return learned[2], learned[4]


@pytest.mark.parametrize("watching", [0, 1])
def test_one_rank_may_watch(watching: int):
    found = simulate(2).run(watched_on_one, watching)
    assert found[1 - watching] == (0, 0)
    assert found[watching][0] > found[watching][1] == 8
