"""What would not be invariant is refused with words, on every rank; the sums' order is a tree."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import vescale_parallel as vp
from invariant_runs import batch, build
from torch import nn
from vescale_comm import simulate
from vescale_parallel._invariant.tree import TreeSum, nodes_within, present, rows_of, shares, total

WORDS: dict[str, Any] = {"deterministic": "dp-invariant"}


@pytest.mark.parametrize("shards", [1, 2, 5, 8, 12])
@pytest.mark.parametrize("rows", [1, 3, 8, 29])
def test_every_number_of_ranks_adds_in_one_order(shards: int, rows: int):
    sizes = rows_of(rows, shards)
    assert sum(sizes) == rows
    leaves = {(n, n + 1): f"{n}" for n in range(shards) if sizes[n]}

    def add(left: str, right: str) -> str:
        return f"({left}+{right})"

    expected = total(shards, leaves, add)
    for ranks in range(1, shards + 1):
        sums: dict[Any, str] = {}
        for low, high in shares(shards, ranks):
            mine = TreeSum(shards, add)
            for shard in range(low, high):
                mine.put(shard, leaves.get((shard, shard + 1)))
            found = mine.take()
            assert list(found) == present(nodes_within((0, shards), (low, high)), sizes)
            sums |= found
        assert total(shards, sums, add) == expected


REFUSED_PLANS = [
    ({"deterministic": "yes"}, "'dp-invariant', for the same bits"),
    ({"shards": 0}, "a number of logical shards"),
    ({"shards": 3}, "4 ranks share the batch, and there are 3 logical shards"),
    (WORDS | {"batch": None}, "the batch has no rows to cut"),
    (WORDS | {"batch_is": "local"}, "would depend on the number of ranks"),
    (WORDS | {"parameters": {"0.weight": "dp:0", "*": "replicate"}}, "over an axis of the ba"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED_PLANS, ids=lambda one: str(one)[:40])
def test_plans_that_cannot_be_invariant(words: Any, message: str):
    with pytest.raises(vp.PlanError, match=message):
        vp.Plan().with_(**words).check(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), {"dp": 4})


def test_synchronised_batch_norms_are_refused_in_training():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4))
    with pytest.raises(vp.PlanError, match=r"batch norms in training mode: '1'.*GroupNorm"):
        vp.Plan(**WORDS).check(model, {"dp": 2})
    assert vp.Plan(**WORDS).check(model.eval(), {"dp": 2}).invariant is not None


def test_explain_prints_the_cost():
    text = str(vp.Plan(**WORDS).check(nn.Sequential(nn.Linear(256, 256, bias=False)), {"dp": 3}))
    assert "8 logical shards, 3 shards on a rank one after another; 1 turns stay idle" in text
    assert "2 sums sent: 341.3 KiB in place of 170.7 KiB" in text
    four = vp.Invariant(4)
    assert vp.Plan.from_json(vp.Plan(deterministic=four).to_json()).deterministic == four


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x.shape[0]
        return self.lin(x).mean()


def counting(rank: int) -> None:
    torch.manual_seed(0)
    model = vp.parallelize(Counting(), vp.mesh(device_type="cpu", dp=2), vp.Plan(**WORDS))
    vp.forward_backward(model, torch.ones(8, 2))


def other_seeds(rank: int) -> None:
    model = build({"dp": 2}, 3)
    torch.manual_seed(rank)
    vp.forward_backward(model, *batch(0))


def other_batches(rank: int) -> None:
    vp.forward_backward(build({"dp": 2}), *batch(rank))


def other_rows(rank: int) -> None:
    model = build({"dp": 2})
    for step in range(3):  # the first two are compared as a whole
        vp.forward_backward(model, *batch(step, 11 + rank * (step == 2)))


def drifting_batches(rank: int) -> None:
    """The same up to the one that is looked at next."""
    model = vp.parallelize(nn.Linear(2, 1), vp.mesh(device_type="cpu", dp=2), vp.Plan(**WORDS))
    for step in range(1, 17):
        x = torch.ones(8, 2) + rank * (step == 16)
        vp.forward_backward(model, x, loss=lambda out: out.mean())


def raising(rank: int) -> None:
    """The rows of one rank are refused by the model: all ranks hear of it."""
    model = vp.parallelize(Picky(), vp.mesh(device_type="cpu", dp=2), vp.Plan(**WORDS))
    vp.forward_backward(model, torch.arange(16.0).view(8, 2))


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 14:
            raise vp.ParallelError("see the error of rank 1: too large")
        return self.lin(x).mean()


class Sometimes(nn.Module):
    """Its norm is not called for some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        return self.norm(x).mean() if x.sum() > 0 else x.mean()


def sometimes(rank: int) -> None:
    torch.manual_seed(0)
    model = vp.parallelize(Sometimes(), vp.mesh(device_type="cpu", dp=2), vp.Plan(**WORDS))
    vp.forward_backward(model, torch.randn(16, 2))


def not_a_sum(rank: int) -> None:
    vp.sum_over_shards(build({"dp": 2}), lambda x: {"name": "text", "n": len(x)}, torch.ones(8))


def uneven_rows(rank: int) -> None:
    tokens, targets = batch(0)
    vp.forward_backward(build({"dp": 2}), tokens, targets[: len(targets) - rank])


def own_backward(rank: int) -> None:
    build({"dp": 2}, 3)(*batch(0)).backward()


def evaluated_backward(rank: int) -> None:
    build({"dp": 2}, 3).eval()(*batch(0)).backward()


def hooked(rank: int) -> None:
    model = build({"dp": 2})
    next(model.parameters()).register_hook(lambda gradient: None)
    vp.forward_backward(model, *batch(0))


def copied(rank: int) -> None:
    vp.forward_backward(copy.deepcopy(build({"dp": 2}, 3)), *batch(0))


def captured_norms(rank: int) -> None:
    mesh = vp.mesh(device_type="cpu", dp=2)
    vp.parallelize(Sometimes().eval(), mesh, vp.Plan(**WORDS), static=True)


REFUSED_PROGRAMS = [
    (counting, vp.ParallelError, "forward has written to 'seen'"),
    (other_seeds, vp.DisagreementError, "different seeds for the logical shards"),
    (other_batches, vp.DisagreementError, "forward_backward differ between ranks"),
    (other_rows, vp.DisagreementError, "different numbers of rows"),
    (drifting_batches, vp.DisagreementError, "rows of other values"),
    (uneven_rows, vp.DisagreementError, "forward_backward differ between ranks"),
    (raising, vp.ParallelError, "see the error of rank 1"),
    (sometimes, vp.ParallelError, "batch norms are called|see the error"),
    (captured_norms, vp.PlanError, "batch norms 'norm' keep running statistics"),
    (not_a_sum, vp.ParallelError, "returned a str"),
    (own_backward, vp.ParallelError, "trained by forward_backward"),
    (evaluated_backward, vp.ParallelError, "a backward outside of forward_backward"),
    (hooked, vp.ParallelError, "parameters have hooks: 'embed.weight'"),
    (copied, vp.ParallelError, "a copy of a parallelised one"),
]


@pytest.mark.parametrize(
    ("program", "error", "message"), REFUSED_PROGRAMS, ids=lambda one: getattr(one, "__name__", "")
)
def test_programs_that_would_not_be(program: Callable[[int], None], error: type, message: str):
    def run(rank: int, world_size: int) -> bool:
        with pytest.raises(error, match=message):
            program(rank)
        return True

    assert simulate(2).run(run) == [True, True]
