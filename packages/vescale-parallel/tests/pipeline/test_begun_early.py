"""A first forward that runs while ranks tell how they call leaves nothing behind if they differ."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stage_runs import accumulate, require_gradients, staged
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_comm.testing import run
from vescale_parallel import DisagreementError, PipelineError, forward_backward


class Block(nn.Linear):
    """Counts its forwards, and fails when it is told to."""

    fails = False

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        # Not the module's own, which is taken back with a forward.
        self.begun = SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        self.begun.calls += 1
        if self.fails:
            raise ValueError("this block fails")
        return super().forward(x)


class Model(nn.Module):
    """Draws between its blocks."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4, 4) for _ in range(2))
        self.p = p

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(block(x), self.p)
        return x.square().mean() * scale


def make(p: float) -> Model:
    torch.manual_seed(3)
    return Model(p)


def batch(seed: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))


def state(model: Model) -> list[Any]:
    gradients = [p.grad is None for p in model.parameters()]
    return [torch.get_rng_state().tolist(), gradients, [*map(id, model.parameters())]]


def step(model: Model, reference: Model, seed: int) -> None:
    """One step of both, on the same numbers."""
    for one in (model, reference):
        one.zero_grad()
    torch.manual_seed(seed)
    accumulate(reference, 2, batch(seed))
    torch.manual_seed(seed)
    forward_backward(model, x=batch(seed))
    require_gradients(model, reference)


def refused(rank: int, world_size: int, p: float) -> list[Any]:
    plain = make(p)
    model = make(p)
    staged(model, {"pp": 2}, microbatches=2, stages="blocks.*")
    said: list[list[str]] = []
    begun, first = [], model.blocks[0]
    for early in (False, True):
        for _ in range(3 if early else 0):
            step(model, plain, 5)
        model.zero_grad()
        calls = first.begun.calls
        for differs in ({"scale": 1.0 + rank}, {"x": batch(0)[: 2 + 2 * rank]}):
            given = {"x": batch(0), **differs}
            for fails in (False, True):
                before, first.fails = state(model), fails
                with pytest.raises(DisagreementError) as caught:
                    forward_backward(model, **given)
                # Values are compared in the first calls only.
                said.append([one for one in str(caught.value).split("\n") if "checksum" not in one])
                first.fails = False
                assert state(model) == before
        begun.append(first.begun.calls - calls)
        step(model, plain, 6)
    # What is wrong in a forward that all ranks want is said as ever.
    first.fails = True
    with pytest.raises(PipelineError if rank else ValueError, match="this block fails"):
        forward_backward(model, x=batch(0))
    first.fails = False
    step(model, plain, 7)
    return [said[:4] == said[4:], begun]


# Nobody begins with what is new, as a call of other shapes is; and the last stage has to wait.
EXPECTED = [[True, [0, 2]], [True, [0, 0]]]


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_refused_call_has_not_been(p: float):
    assert simulate(2).run(refused, p) == EXPECTED


def test_a_refused_call_has_not_been_over_gloo():
    assert run(refused, 2, 0.5) == EXPECTED
