"""What a later stage does not use has no gradient, on the stages that made it as on one device.

An optimizer leaves parameters without gradients alone, and decays those that have zeros.
"""

import random
from itertools import product
from typing import Any

import pytest
import torch
from stage_runs import accumulate, require_gradients, staged, step_both, whole
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_parallel import PipelineError, Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._pipeline.trace.loss_dependence import LOSS, agreed_kinds, dependence_report
from vescale_parallel._pipeline.trace.microbatch_kinds import Entry, Kind
from vescale_parallel._pipeline.trace.tensor_specs import spec_of

BLOCKS, MICROBATCHES, WIDTH = 8, 4, 6


class Pair(nn.Module):
    """A block of two tensors that uses what `takes` says of them.

    Args:
        takes: for each result the numbers of the tensors that it is computed of.
    """

    def __init__(self, takes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        super().__init__()
        self.takes = takes
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.start = nn.Parameter(torch.randn(WIDTH))

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        base = given[0].detach() * 0 + self.start
        found = [sum((given[at] for at in takes), base) for takes in self.takes]
        return self.left(found[0]).tanh(), self.right(found[1]).tanh()


class Pairs(nn.Module):
    """Blocks of which a late one may use nothing, or a part, of what comes before it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        draw = random.Random(seed)

        def one() -> tuple[int, ...]:
            return draw.choice([(0, 1), (0, 1), (0,), (1,), ()])

        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Pair((one(), one())) for _ in range(BLOCKS))
        self.ends = draw.choice([(0, 1), (0,), (1,)])

    def forward(self, x: Tensor) -> Tensor:
        given = self.first(x), x
        for block in self.blocks:
            given = block(given)
        return torch.stack([given[at].square().mean() for at in self.ends]).sum()


def batch(step: int, rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def compare(model: nn.Module, plain: nn.Module, rows: int, count: int) -> None:
    both = model, plain
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.5) for m in both]
    for step in range(3):
        x = batch(step, rows)
        accumulate(plain, count, x)
        forward_backward(model, x)
        require_gradients(model, plain, rtol=1e-4, atol=1e-6)
        for one in optimizers:
            one.step()
            one.zero_grad()
        with torch.no_grad():  # an evaluation in between
            torch.testing.assert_close(forward_backward(model, x), plain(x), rtol=1e-4, atol=1e-5)
    for (name, one), other in zip(model.state_dict().items(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(one), other.data, rtol=1e-4, atol=1e-5, msg=name)


SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"]
MESHES: list[tuple[dict[str, int], int]] = [
    ({"pp": 2}, 0),
    ({"pp": 4}, 0),
    ({"pp": 2, "dp": 2}, 0),
    ({"pp": 2, "dp": 2}, 1),
    ({"pp": 2, "dp": 2}, 2),
    ({"pp": 2, "dp": 2}, 3),
    ({"pp": 2, "tp": 2}, 0),
]
PARAMETERS = {"blocks.*.left.*": "tp:0", "*": "replicate"}


def trained(schedule: str, sizes: dict[str, int], zero: int, seed: int, rows: int) -> None:
    # DualPipeV has no fewer than twice as many as ranks.
    count = 8 if schedule == "dualpipev" else MICROBATCHES

    def on_a_rank(rank: int, world_size: int) -> None:
        plain, model = Pairs(seed), Pairs(seed)
        how = Plan(pipeline=schedule, microbatches=count, zero=zero)
        how = how | Plan(parameters=PARAMETERS) if "tp" in sizes else how
        parallelize(model, make_mesh(device_type="cpu", **sizes), how)
        compare(model, plain, rows, count)

    world = sizes["pp"] * sizes.get("dp", 1) * sizes.get("tp", 1)
    simulate(world)(on_a_rank)


CASES = [(*case, seed) for seed, case in enumerate(product(SCHEDULES, MESHES))]


@pytest.mark.parametrize(("schedule", "where", "seed"), CASES, ids=str)
def test_gradients_are_there_where_one_device_has_them(schedule: str, where: Any, seed: int):
    trained(schedule, *where, seed, 16 if seed % 2 else 15)


def test_some_are_not_there():
    """The cases above would say little if each of them used everything."""
    found = []
    for seed in range(len(CASES)):
        model = Pairs(seed)
        model(batch(0, 2)).backward()
        found.append(any(one.grad is None for one in model.parameters()))
    assert len(CASES) // 3 < sum(found) < len(CASES)


class Choosing(nn.Module):
    """A block that looks at values to decide whether it uses what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.start = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.chooses = False

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:
        if self.chooses and float(marks.detach()[0, 0]) < 0:
            return self.own(self.start.expand_as(x))
        return self.own(x)


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Choosing() for _ in range(4))
        self.blocks[2].chooses = True

    def forward(self, x: Tensor) -> Tensor:
        marks = x
        for block in self.blocks:
            x = block(x, marks)
        return x.square().mean()


def marked(*signs: float) -> Tensor:
    """A batch of two rows for each microbatch; each sign says whether a late stage uses them."""
    x = batch(0, 2 * len(signs)).abs()
    x[::2, 0] *= torch.tensor(signs)
    return x


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@on_ranks(2, simulated=True)
def test_one_microbatch_that_uses_it_is_enough(schedule: str):
    plain, model = Chosen(), Chosen()
    staged(model, {"pp": 2}, schedule=schedule, microbatches=MICROBATCHES)
    step_both(model, plain, MICROBATCHES, marked(1, -1, 1, -1))
    require_gradients(model, plain)


USES = [
    ((1, 1, 1, 1), (-1, -1, -1, -1), "no gradient comes back from"),
    ((-1, 1, 1, 1), (-1, -1, -1, -1), "the loss did not depend on it"),
]


@pytest.mark.parametrize(("first", "then", "why"), USES)
@on_ranks(2, simulated=True)
def test_a_model_that_uses_other_things_than_before_is_refused_on_all_ranks(
    first: Any, then: Any, why: str
):
    model = Chosen()
    staged(model, {"pp": 2}, schedule="1f1b", microbatches=MICROBATCHES)
    is_first = "depend" in why
    if not is_first:
        forward_backward(model, marked(*first))
    model.zero_grad()
    with pytest.raises(PipelineError, match=why):
        forward_backward(model, marked(*(first if is_first else then)))
    assert all(one.grad is None for one in model.parameters())
    # What was learned is looked at again.
    forward_backward(model, marked(*then))
    assert all(one.grad is None for one in model.blocks[0].parameters())


def test_what_no_rank_uses_is_not_sent_back():
    spec = spec_of(torch.randn(2, requires_grad=True))
    entries = {1: Entry(("a", "b"), (spec, spec)), 2: Entry(("c", "d"), (spec, spec))}
    kind = Kind({}, entries, {0: (), 1: (), 2: ()})
    # By rank. The first two are a pipeline, of which the loss is computed from `d` alone, and `d`
    # from `a`; in another one from `c`, which comes from nothing.
    reaches = {
        0: ((0, "a", ()), (2, LOSS, ("d",))),
        1: ((1, "c", ("a", "b")), (1, "d", ("a",))),
        2: ((0, "a", ()), (2, LOSS, ("c",))),
        3: ((1, "c", ()), (1, "d", ("b",))),
    }
    told = {rank: dependence_report([kind._replace(reaches=one)]) for rank, one in reaches.items()}
    (alone,) = agreed_kinds([kind], {0: told[0], 1: told[1]}, (0, 1))
    assert alone.entries[2].backs == alone.entries[2].uses == (False, True)
    assert alone.entries[1].backs == alone.entries[1].uses == (True, False)
    assert alone.entries[1].wanting == (spec,)
    (both,) = agreed_kinds([kind], told, (0, 1))
    assert both.entries[2].backs == both.entries[1].backs == (True, True)
    assert both.entries[2].uses == (False, True)
    assert both.entries[1].uses == (True, False)
