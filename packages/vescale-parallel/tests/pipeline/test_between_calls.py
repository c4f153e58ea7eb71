"""What a user changes between two steps of a model in stages: followed, or refused everywhere."""

from typing import Any

import pytest
import torch
from stage_runs import Chain, require_gradients, staged, step_both
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_parallel import DisagreementError, PipelineError, forward_backward

PARTS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(4), nn.Linear(4, 4)
        self.drop: nn.Module = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.drop(torch.tanh(self.inner(self.norm(x))))
        return found


def make() -> Any:
    torch.manual_seed(0)
    return Chain(*(Block() for _ in range(8)))


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def in_stages(schedule: str, world_size: int) -> Any:
    words = {"stages": "blocks.*", "microbatches": PARTS, "schedule": schedule}
    return staged(make(), {"pp": world_size}, **words)


def require_one_device(model: Any, plain: Any, step: int) -> None:
    """A step of both: losses, gradients, and where the generator stands afterwards."""
    step_both(model, plain, PARTS, batch(step), rtol=1e-5)
    require_gradients(model, plain, atol=1e-6)


def drops(p: float) -> Any:
    def change(model: Any) -> None:
        for block in model.blocks:
            block.drop.p = p

    return change


def identity(model: Any) -> None:
    for block in model.blocks:
        block.drop = nn.Identity()


CHANGES = {"0.1": drops(0.1), "0": drops(0.0), "1": drops(1.0), "identity": identity}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("name", CHANGES)
@on_ranks(2, simulated=True)
def test_how_much_is_dropped_may_change(rank: int, world_size: int, schedule: str, name: str):
    plain, model = make(), in_stages(schedule, world_size)
    torch.manual_seed(7)
    for step in range(6):
        for one in (plain, model) if step in (2, 4) else ():
            (CHANGES[name] if step == 2 or name == "identity" else drops(0.5))(one)
        require_one_device(model, plain, step)


def dropped_on_one(rank: int, world_size: int, who: int) -> str:
    model = in_stages("1f1b", world_size)
    forward_backward(model, batch(0))
    if rank == who:
        model.zero_grad()
    with pytest.raises(DisagreementError) as told:
        forward_backward(model, batch(1))
    return str(told.value)


@pytest.mark.parametrize("who", [0, 1])
def test_gradients_are_dropped_on_all_ranks_or_none(who: int):
    for words in simulate(2).run(dropped_on_one, who):
        assert "'parameters with gradients'" in words
        assert f"0 of 32, digest 190a55ad on rank {who}" in words
        assert f"on rank {1 - who}" in words


def first_blocks(rank: int, world_size: int, schedule: str) -> str:
    model = in_stages(schedule, world_size)
    for block in model.blocks:
        block.register_full_backward_hook(lambda module, given, back: None)
    with pytest.raises(PipelineError) as told:
        forward_backward(model, batch(0))
    with torch.no_grad():  # where no hook of autograd is called
        torch.testing.assert_close(model.eval()(batch(0)), make().eval()(batch(0)))
    return str(told.value)


@pytest.mark.parametrize(
    ("schedule", "blocks"), [("1f1b", ("'blocks.4'",)), ("zbv", ("'blocks.2'", "'blocks.6'"))]
)
def test_backward_hooks_that_would_miss_their_gradient(schedule: str, blocks: tuple[str, ...]):
    for words in simulate(2).run(first_blocks, schedule):
        assert "have backward hooks" in words
        assert all(name in words for name in blocks)
        assert "'blocks.1'" not in words


def halve(module: Any, given: Any, back: Any) -> Any:
    return tuple([one * 0.5 for one in given])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv", "dualpipev"])
@on_ranks(2, simulated=True)
def test_backward_hooks_change_what_they_change_on_one_device(
    rank: int, world_size: int, schedule: str
):
    plain, model = make(), in_stages(schedule, world_size)
    for one in (plain, model):
        for at, block in enumerate(one.blocks):
            block.inner.register_full_backward_hook(halve)
            if at % 2:  # no stage of these schedules begins there
                block.register_full_backward_hook(halve)
    torch.manual_seed(7)
    for step in range(3):
        require_one_device(model, plain, step)
