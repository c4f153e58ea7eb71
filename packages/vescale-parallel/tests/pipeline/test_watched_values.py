"""Values of other stages are told apart in every step, also where no mode watches functions.

A forward that passes what stands for them on, and does nothing else with it, is followed by ones in
which the tensors themselves tell of functions that take them. And hooks that come and go are called
with the same as ever, though units on which nobody has hooks are called without.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_parallel import Pipeline, PipelineError, Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import whole

X = torch.linspace(-1, 1, 32).reshape(8, 4)


class Changing(nn.Module):
    """Does something else between its blocks after a while."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.extra: Callable[[Tensor, list[Tensor]], Tensor] = lambda x, every: x

    def forward(self, x: Tensor) -> Tensor:
        every = []
        for block in self.blocks:
            x = block(x)
            every.append(x)
        return self.extra(x, every).square().mean()


def staged(blocks: int = 4) -> Changing:
    torch.manual_seed(3)
    model = Changing(blocks)
    how = Plan(pipeline=Pipeline(stages="blocks.*"), microbatches=4)
    return parallelize(model, make_mesh(device_type="cpu", pp=2), how)  # type: ignore[return-value]


def gradients(model: nn.Module) -> list[Tensor]:
    found = [whole(one.grad) for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    return found


def used_later(rank: int, world_size: int, use: Any, error: str) -> None:
    model = staged()
    losses = [forward_backward(model, X) for _ in range(3)]
    expected = gradients(model)
    model.extra = use
    if error:
        with pytest.raises(PipelineError, match=error):
            forward_backward(model, X)
    else:
        losses += [forward_backward(model, X) for _ in range(3)]
        assert all(map(torch.equal, gradients(model), expected))
    model.extra = lambda x, every: x
    model.zero_grad()
    losses += [forward_backward(model, X) for _ in range(3)]
    assert all(torch.equal(one, losses[0]) for one in losses)
    assert all(map(torch.equal, gradients(model), expected))


def added(x: Tensor, every: list[Tensor]) -> Tensor:
    return x + every[0]


def added_in_place(x: Tensor, every: list[Tensor]) -> Tensor:
    copy = torch.zeros_like(x)
    copy[:1] = every[0][:1]
    return x + copy


def read(x: Tensor, every: list[Tensor]) -> Tensor:
    return x if every[0].sum().item() > 0 else -x


LATER_USES = [
    (added, "the loss is computed from values that only earlier stages have"),
    (added_in_place, "the loss is computed from values that only earlier stages have"),
    (read, "reads a value that another stage"),
]


@pytest.mark.parametrize(("use", "error"), LATER_USES)
def test_a_later_use_of_other_stages_values_is_seen(use: Any, error: str):
    simulate(2)(used_later, use, error)


def kept_aside_detached(x: Tensor, every: list[Tensor]) -> Tensor:
    first = every[0].detach()
    (first.abs() + 1.0).mean()
    assert first.shape == (2, 4)
    assert every[0].device.type == "cpu"
    return x


def test_a_later_use_that_nothing_depends_on_changes_nothing():
    simulate(2)(used_later, kept_aside_detached, "")


@on_ranks(2, simulated=True)
def test_functions_are_not_watched_where_nothing_is_expected(rank: int, world_size: int):
    model = staged()
    seen: list[bool] = []

    def use(x: Tensor, every: list[Tensor]) -> Tensor:
        seen.append(torch.overrides._get_current_function_mode() is not None)
        return x

    model.extra = use
    for _ in range(2):
        forward_backward(model, X)
    # Tried, noted, and then followed by all others.
    assert not any(seen[2:]), seen
    assert bool(seen) == (rank == 1)


@on_ranks(2, simulated=True)
def test_hooks_that_come_and_go_see_what_has_come(rank: int, world_size: int):
    model = staged()
    expected = [forward_backward(model, X) for _ in range(2)]
    seen: dict[int, list[bool]] = {}
    handles = [
        block.register_forward_pre_hook(
            lambda module, args, at=at: seen.setdefault(at, []).append(args[0].isnan().any().item())
        )
        for at, block in enumerate(model.blocks)
        if at // 2 == rank
    ]
    expected += [forward_backward(model, X) for _ in range(2)]
    # Those of this stage: what has come from the stage before, and not what stood for it.
    assert {at: any(found) for at, found in seen.items()} == {2 * rank: False, 2 * rank + 1: False}
    assert all(len(found) == 8 for found in seen.values())
    for handle in handles:
        handle.remove()
    expected += [forward_backward(model, X) for _ in range(2)]
    assert all(len(found) == 8 for found in seen.values())
    assert not any(block._forward_pre_hooks for block in model.blocks)
    assert all(torch.equal(one, expected[0]) for one in expected)


@on_ranks(2, simulated=True)
def test_a_hook_that_comes_too_late_to_see_what_has_come_is_refused():
    model = staged()
    forward_backward(model, X)

    def register(module: nn.Module, args: Any) -> None:
        handles.append(model.blocks[2].register_forward_pre_hook(lambda module, args: None))

    handles: list[Any] = []
    model.blocks[0].register_forward_pre_hook(register)
    with pytest.raises(PipelineError, match=r"was registered on 'blocks\.2' while the model ran"):
        forward_backward(model, X)
