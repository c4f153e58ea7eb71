"""State that forwards write, attributes and buffers, is one device's after steps in stages."""

import copy
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from stage_runs import Chain, accumulate, require_gradients, step_both
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_parallel import (
    DisagreementError,
    Pipeline,
    PipelineError,
    Plan,
    forward_backward,
    parallelize,
)
from vescale_parallel import mesh as make_mesh
from zero_models import whole

PARTS = 4


def in_blocks(schedule: str) -> Plan:
    return Plan(pipeline=Pipeline(schedule, stages="blocks.*"), microbatches=PARTS)


X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """Keeps state in every way, some of which the next microbatch computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("load", torch.zeros(8)[::2])
        # NaN, until there is something to know.
        self.register_buffer("first", torch.full((4,), torch.nan))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.register_buffer("late", None)
        self.calls, self.counted = 0, torch.zeros(())
        self.kept: dict[str, Any] = {"sizes": [], "sum": torch.zeros(4)}
        self.array = numpy.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach()
        self.load.add_(seen.abs().sum(0))
        self.first.copy_(torch.where(self.first.isnan(), seen[0], self.first))
        self.rows = self.rows + len(x)
        self.late = seen.sum() if self.late is None else self.late * 0.5 + seen.sum()
        self.calls += 1
        self.counted = self.counted + 1
        self.array += 1
        self.kept["sizes"].append(len(x))
        self.kept["sum"].add_(1)
        self.mean.lerp_(seen.mean(0), 0.3)
        return self.norm(self.layer(x + self.mean / self.calls)).tanh()


class Model(nn.Module):
    """Code outside of the blocks keeps state before them, behind them, and both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(4, 2)
        self.register_buffer("begun", torch.zeros(()))
        self.register_buffer("ended", torch.zeros(()))
        self.calls = 0
        self.log = self.same_log = {"rows": 0, "sum": torch.zeros(())}
        self.reads = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log["rows"] += len(x)
        self.log["sum"].add_(1)
        self.begun.add_(1)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        self.ended = self.ended * 0.9 + x.detach().mean()
        loss: Tensor = self.head(x).square().mean()
        return loss + self.blocks[0].load.sum() if self.reads else loss


def in_stages(sizes: dict[str, int], schedule: str, **fields: Any) -> Any:
    mesh = make_mesh(device_type="cpu", **sizes)
    return parallelize(Model(), mesh, in_blocks(schedule) | Plan(**fields))


def own_blocks(model: Any) -> list[str]:
    """The names of blocks that this rank has run."""
    return [name for name, one in model.named_modules() if isinstance(one, Block) and one.calls]


def require_state(model: Any, plain: Any) -> None:
    """Buffers are one device's on every rank, attributes where the block runs."""
    names = [name for name, _ in plain.named_buffers()]
    assert names == [name for name, _ in model.named_buffers()]
    for name in names:
        found, expected = whole(model.get_buffer(name)), plain.get_buffer(name)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)
    assert model.calls == plain.calls
    assert model.log == plain.log
    assert model.same_log is model.log
    assert own_blocks(model)
    for name in own_blocks(model):
        one, other = model.get_submodule(name), plain.get_submodule(name)
        assert one.calls == other.calls
        assert whole(one.counted) == other.counted
        assert one.kept["sizes"] == other.kept["sizes"]
        torch.testing.assert_close(whole(one.kept["sum"]), other.kept["sum"])
        assert one.array.tolist() == other.array.tolist()


def trained(rank: int, world_size: int, sizes: dict[str, int], how: str, zero: int) -> None:
    plain, model = Model(), in_stages(sizes, how, zero=zero)
    held = model.blocks[0].load
    for step in range(2):
        # The second batch has a microbatch of another shape.
        rows = X if not step else torch.cat([X, X[:3]])
        step_both(model, plain, PARTS, rows, rtol=1e-5)
        require_gradients(model, plain, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            accumulate(plain, PARTS, X)
            forward_backward(model, X)
            torch.testing.assert_close(whole(model(X[:5])), plain(X[:5]), rtol=1e-5, atol=1e-6)
        require_state(model, plain)
    assert model.blocks[0].load is held


SCHEDULES = ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-greedy", "zbv", "dualpipev"]


@pytest.mark.parametrize(
    ("sizes", "zero"), [({"pp": 2}, 0), ({"pp": 2, "dp": 2}, 0), ({"dp": 2, "pp": 2}, 3)], ids=str
)
@pytest.mark.parametrize("how", SCHEDULES)
def test_every_schedule(how: str, sizes: dict[str, int], zero: int):
    simulate(torch.Size(sizes.values()).numel()).run(trained, sizes, how, zero)


class Counting(nn.Module):
    """Counts in a buffer and in an attribute, before what backward needs and behind all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("load", torch.zeros(3))
        self.before = self.behind = 0
        self.reads = True

    def forward(self, x: Tensor) -> Tensor:
        self.before += 1
        self.load.add_(x.detach().abs().sum(0))
        found: Tensor = self.layer(x + self.load if self.reads else x).tanh()
        self.behind += 1
        return found


def counting(*, recomputes: bool = False) -> Any:
    torch.manual_seed(0)
    model = Chain(*(Counting() for _ in range(4)))
    for block in model.blocks if recomputes else ():
        # As torch recomputes, what it read would be what schedules have left there by then.
        block.reads = False
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def counts(model: Any, blocks: list[int]) -> list[tuple[int, int]]:
    return [(model.blocks[at].before, model.blocks[at].behind) for at in blocks]


@pytest.mark.parametrize("how", ["1f1b", "zb-h1", "zbv"])
@on_ranks(2, simulated=True)
def test_recomputing_counts_as_torch_does_and_a_plan_leaves_what_is_counted_alone(how: str):
    kept, again = counting(), counting(recomputes=True)
    planned, own = counting(), counting(recomputes=True)
    for model, kind in ((planned, "full"), (own, None)):
        plan = in_blocks(how).with_(checkpoint=kind)
        parallelize(model, make_mesh(device_type="cpu", pp=2), plan)
        forward_backward(model, X)
    for plain in (kept, again):
        accumulate(plain, PARTS, X)
    # What a plan recomputes reads what the forward has read, and leaves it alone.
    require_gradients(planned, kept)
    for model, plain in ((planned, kept), (own, again)):
        for name, one in plain.named_buffers():
            torch.testing.assert_close(model.get_buffer(name), one, rtol=1e-5, atol=1e-6)
        ran = [at for at, block in enumerate(model.blocks) if block.before]
        runs = 1 if plain is kept else 2
        assert counts(model, ran) == counts(plain, ran) == 2 * [(runs * PARTS, PARTS)]
    assert not torch.equal(kept.blocks[0].load, again.blocks[0].load)


@on_ranks(2, simulated=True)
def test_what_only_another_stage_writes_is_not_read():
    model, plain = in_stages({"pp": 2}, "1f1b"), Model()
    before = copy.deepcopy(plain.state_dict())
    model.reads = True
    for rows in (X, torch.cat([X, X[:3]])):  # also where two kinds of microbatches are tried
        with pytest.raises(PipelineError, match=r"stage 1 reads 'blocks\.0\.load'"):
            forward_backward(model, rows)
    # A trial run that fails takes back what it has written, too.
    for name, one in before.items():
        found = whole(model.state_dict()[name])
        torch.testing.assert_close(found, one, rtol=0, atol=0, equal_nan=True, msg=name)
    model.reads = False
    step_both(model, plain, PARTS, X, rtol=1e-5)
    require_state(model, plain)


@pytest.mark.parametrize("how", ["1f1b", "zbv"])
@on_ranks(2, simulated=True)
def test_blocks_of_several_stages_do_not_write_to_one_tensor(how: str):
    model = Chain(*(nn.Linear(3, 3) for _ in range(4)))
    norm = nn.BatchNorm1d(3)
    for block in model.blocks:
        block.norm = norm
        block.register_forward_hook(lambda module, args, output: module.norm(output))
    parallelize(model, make_mesh(device_type="cpu", pp=2), in_blocks(how))
    with pytest.raises(PipelineError, match=r"blocks of several stages hold 'blocks\.0\.norm\."):
        forward_backward(model, X)


@pytest.mark.parametrize("how", ["1f1b", "zbv"])
@on_ranks(2, simulated=True)
def test_a_forward_that_began_early_is_taken_back(rank: int, world_size: int, how: str):
    model, plain = in_stages({"pp": 2}, how), Model()
    for step in range(4):
        step_both(model, plain, PARTS, X, rtol=1e-5)
        # Ranks hear of both when they have begun with a forward, which is run again, or is not.
        if step == 1 and rank == 1:
            model.blocks[2].register_forward_hook(lambda module, args, output: None)
        if step == 2:
            with pytest.raises(DisagreementError):
                forward_backward(model, torch.ones(8 + 4 * rank, 3))
    require_state(model, plain)


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("rows", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.rows = torch.cat([self.rows, x.detach().sum(1)])
        return self.layer(x)


@on_ranks(2, simulated=True)
def test_a_buffer_that_grows_is_refused_on_every_rank():
    model = Chain(*(Grows() for _ in range(2)))
    parallelize(model, make_mesh(device_type="cpu", pp=2), in_blocks("1f1b"))
    with pytest.raises(PipelineError, match="a buffer that forwards write to keeps its shape"):
        forward_backward(model, X)
