"""A step that raises leaves no gradients: the next one is as if it had never been made."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vescale_comm import SimulationError, execution_log, simulate
from vescale_comm.testing import on_ranks
from vescale_dtensor import DTensor
from vescale_parallel import Pipeline, PipelineError, Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._step.forward_backward import step_of


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("not today")


class Block(nn.Module):
    """Fails in its `when`-th call, if at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.where, self.when = "", 0

    def forward(self, x: Tensor) -> Tensor:
        self.when -= 1
        if self.where == "forward" and not self.when:
            raise ValueError("not today")
        x = self.layer(x).tanh()
        return Fails.apply(x) if self.where == "backward" and not self.when else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(4, 1)
        self.fails_in_loss = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        if self.fails_in_loss:
            raise ValueError("not today")
        return self.head(x).square().mean()


class Hook:
    """A hook of modules that fails in its second call; each rank has its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: Any, given: Any, result: Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("not today")


STAGES = {"pipeline": "1f1b", "microbatches": 2}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "microbatches": ({"dp": 2}, {"batch": "dp:0", "microbatches": 2}),
    "zero": ({"dp": 2}, {"batch": "dp:0", "microbatches": 2, "zero": 3}),
    "1f1b": ({"pp": 2}, {"pipeline": "1f1b", "microbatches": 3}),
    "halves": ({"pp": 2}, {"pipeline": "zb-h1", "microbatches": 3}),
    "everywhere": ({"pp": 2}, STAGES | {"pipeline": Pipeline(everywhere="embed")}),
    "stages of two": ({"pp": 2, "dp": 2}, {"batch": "dp:0", **STAGES}),
}


def spoil(model: Model, where: str) -> Any:
    """Let the model fail, here; returns what mends it."""
    blocks = [model.blocks[1], model.blocks[3]]
    handles = []
    if where == "hook":
        hook = Hook()
        handles = [block.register_forward_hook(hook) for block in blocks]
    for block in blocks:
        block.where, block.when = where, 2
    model.fails_in_loss = where == "loss"

    def mend() -> None:
        for handle in handles:
            handle.remove()
        for block in blocks:
            block.where = ""
        model.fails_in_loss = False

    return mend


@pytest.mark.parametrize("where", ["forward", "loss", "backward", "hook"])
@pytest.mark.parametrize("name", MESHES)
def test_the_next_step_is_as_if_it_had_not_been(name: str, where: str):
    sizes, options = MESHES[name]
    count = torch.Size(sizes.values()).numel()
    batch = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))

    def on_a_rank(rank: int, world_size: int, failing: tuple[int, ...]) -> bool:
        torch.manual_seed(0)
        model = Model()
        parallelize(model, make_mesh(device_type="cpu", **sizes), Plan(**options))
        forward_backward(model, batch)
        model.zero_grad()
        mend = spoil(model, where) if rank in failing else lambda: None
        try:
            forward_backward(model, batch)
            raised = False
        except Exception:
            raised = True
        mend()
        assert all(one.grad is None for one in model.parameters())
        forward_backward(model, batch)
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            gradient = found.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            if whole is not None and whole.shape == wanted.shape:
                torch.testing.assert_close(whole, wanted.grad, rtol=1e-5, atol=1e-6)
        return raised

    torch.manual_seed(0)
    plain = Model()
    plain(batch).backward()
    every = tuple(range(count))
    # Ranks that compute together with one that fails alone wait for it. Stages do not.
    # The first stage has no loss that could fail.
    first = () if where == "loss" else ((0,),)
    for failing in (every, *first, every[-1:]) if "pp" in sizes else (every,):
        assert all(simulate(count)(on_a_rank, failing))


@on_ranks(1, simulated=True)
def test_parameters_that_came_later_are_dropped_as_well(rank: int, world_size: int):
    model = Model()
    plan = Plan(batch="dp:0", microbatches=2)
    parallelize(model, make_mesh(device_type="cpu", dp=world_size), plan)
    model.scale = nn.Parameter(torch.ones(()))  # which is no distributed one
    model.head.register_forward_hook(lambda module, given, result: result * model.scale)
    spoil(model, "backward")
    with pytest.raises(ValueError, match="not today"):
        forward_backward(model, torch.randn(12, 3))
    assert all(one.grad is None for one in model.parameters())


class Interrupted:
    """The `when`-th wait of a model for a message is interrupted behind it, as by Ctrl-C."""

    def __init__(self, model: nn.Module, when: int) -> None:
        lines = step_of(model)._lines
        self.left, self._start = when, lines.start_recv
        lines.start_recv = self

    def __call__(self, *args: Any) -> Any:
        coming, interrupted = self._start(*args), self

        class Coming:
            def wait(self) -> Any:
                found = coming.wait()
                interrupted.left -= 1
                if not interrupted.left:
                    raise KeyboardInterrupt
                return found

            def drop(self) -> None:
                coming.drop()

        return Coming()


@pytest.mark.parametrize("name", ["1f1b", "halves", "stages of two"])
def test_an_interrupt_while_a_rank_waits_for_another(name: str):
    sizes, options = MESHES[name]
    batch = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))

    def on_a_rank(rank: int, world_size: int, when: int, failing: int) -> str:
        torch.manual_seed(0)
        model = Model()
        parallelize(model, make_mesh(device_type="cpu", **sizes), Plan(**options))
        loss = forward_backward(model, batch)
        model.zero_grad()
        if rank == failing:
            Interrupted(model, when)
        with pytest.raises((KeyboardInterrupt, PipelineError)) as raised:
            forward_backward(model, batch)
        assert all(one.grad is None for one in model.parameters())
        # What one rank has not come to in the interrupted step is no drift.
        assert forward_backward(model, batch) == loss
        return repr(raised.value)

    count = torch.Size(sizes.values()).numel()
    for failing, when in ((0, 1), (0, 2), (count - 1, 1), (count - 1, 2)):
        told = simulate(count)(on_a_rank, when, failing)
        assert all("KeyboardInterrupt" in one for one in told), told


def test_ranks_of_a_stage_that_differ_are_named_in_a_trial_run():
    def on_a_rank(rank: int, world_size: int) -> None:
        sizes, options = MESHES["stages of two"]
        model = Model()
        parallelize(model, make_mesh(device_type="cpu", **sizes), Plan(**options))
        if rank == 3:
            execution_log([2, 3]).record("alone")
        forward_backward(model, torch.ones(12, 3))

    with pytest.raises(SimulationError) as raised:
        simulate(4)(on_a_rank)
    # And not that some wait for the vote, and others in the trial run.
    assert str(raised.value).count(": CommMismatchError") == 4
