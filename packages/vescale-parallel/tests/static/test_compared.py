"""`static=True` notices what guards do not see: units are compared, in turn, with their forwards.

Guards are blinded here, so that what changes is outside of what they see. Every rank raises and
names the unit: for what forward gives, for a flag that detaches, and for what backward alone gives.
Compared or not, training has the same bits: dropout, batch norm, ZeRO, accumulation, stages.
"""

from collections import Counter
from typing import Any

import pytest
import stage_runs
import torch
from stage_runs import ROWS
from torch import Tensor, nn
from vescale_comm.testing import on_ranks
from vescale_dtensor import CaptureError
from vescale_parallel import Plan, captured_units, forward_backward, mesh, no_sync, parallelize
from vescale_parallel._static.units import _forwards
from zero_models import gradients, same


class Doubled(torch.autograd.Function):
    """The same values; a gradient times a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return cotangent * ctx.scale, None


class Block(nn.Module):
    """Reads numbers that are no part of the model."""

    def __init__(self, box: dict[str, float]) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 8)
        self.dropout, self.box = nn.Dropout(0.2), box

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.dropout(torch.relu(self.norm(self.up(x)))))
        if self.box["hook"] != 1:
            y.register_hook(lambda cotangent, scale=self.box["hook"]: cotangent * scale)
        return x + (y.detach() if self.box["frozen"] else y) * self.box["scale"]


class Net(nn.Module):
    def __init__(self, box: dict[str, float], blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(box) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def made(zero: int, check: Any, box: dict[str, float] | None = None, blocks: int = 3) -> nn.Module:
    torch.manual_seed(0)
    model = Net(box or {"scale": 0.5, "frozen": 0, "hook": 1}, blocks)
    plan = Plan(parameters={"*": "replicate"}, zero=zero)
    return parallelize(model, mesh(device_type="cpu", dp=2), plan, static=True, check=check)


def rows(seed: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def blinded(model: nn.Module) -> None:
    """Let the programs of all units stand for any call of their key."""
    for _, forward in _forwards(model):
        for program in forward.captured.programs:
            if "stands_for" not in vars(program):
                guards, free = program.stands_for, program.free

                def stands(call: Any, guards: Any = guards, free: Any = free) -> Any:
                    return guards(call) or [one._local_tensor for one in free.wrappers]

                program.stands_for = stands  # type: ignore[method-assign]


@pytest.mark.parametrize("zero", [0, 3])
@on_ranks(2, simulated=True)
def test_training_has_the_bits_of_a_run_that_compares_nothing(zero: int):
    found = []
    for check in (None, "sampled", True)[: 3 if zero else 2]:
        model = made(zero, check)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        values: list[Any] = []
        turns: Counter[int] = Counter()
        for seed in range(40):
            torch.manual_seed(seed)
            before = sum(one.compared for one in captured_units(model))
            loss = model(rows(seed))
            loss.backward()
            turns[sum(one.compared for one in captured_units(model)) - before] += 1
            values += [loss.detach(), *gradients(model).values()]
            optimizer.step()
            optimizer.zero_grad()
        values += [*model.state_dict().values(), torch.get_rng_state()]
        found.append(values)
        units = [one for one in captured_units(model) if one.refusal is None and one.replays]
        assert len(units) == (3 if zero else 1)
        assert all(one.uncompared is None for one in units)
        if check == "sampled":
            # No two in one step.
            assert set(turns) == {0, 1}
            assert all(one.compared >= 3 for one in units)
        elif check is None:
            assert set(turns) == {0}
        else:
            assert all(one.compared == one.replays for one in units)
    for other in found[1:]:
        same(found[0], other)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("scale", 0.25, "the output"),
        ("frozen", 1, "gets none from the function"),
        ("hook", 2.0, "the gradient of"),
    ],
)
@on_ranks(2, simulated=True)
def test_what_changes_is_noticed(name: str, value: float, words: str, zero: int):
    box: dict[str, float] = {"scale": 0.5, "frozen": 0, "hook": 0.5}
    model = made(zero, "sampled", box)
    number, told = 0, ""
    for number in range(1, 20):
        if number == 12:
            box[name] = value
        try:
            model(rows(number)).backward()
        except CaptureError as error:
            told = str(error)
            break
        blinded(model)
    # Without `zero` the model is one unit, the first in turn; with it, it is no unit that replays.
    assert number == (17 if zero else 16)
    assert words in told
    assert ("Block.forward of blocks.0" if zero else "Net.forward of the model") in told


@on_ranks(2, simulated=True)
def test_a_model_goes_on_after_a_difference():
    box: dict[str, float] = {"scale": 0.5, "frozen": 0, "hook": 0.5}
    model, other = made(3, "sampled", box), made(3, None, box)
    for number in range(1, 7):
        if number == 4:
            box["hook"] = 2.0
        try:
            model(rows(number)).backward()
        except CaptureError:
            assert number in (5, 6)  # the turns of two blocks
        blinded(model)
    for one in (model, other):
        one.zero_grad()
        for _, forward in _forwards(one):
            forward.captured._keep_programs([])
        torch.manual_seed(0)
        one(rows(0)).backward()
    same(gradients(model).values(), gradients(other).values())


@on_ranks(2, simulated=True)
def test_accumulation_evaluation_and_double_use():
    found = []
    for check in (None, True):
        model, values = made(3, check, blocks=2), []
        for seed in range(6):
            torch.manual_seed(seed)
            with no_sync(model):
                (model(rows(seed)) * 2).backward()
            # Two forwards before a backward, one of which is dropped.
            first, _ = model(rows(seed + 1)), model(rows(seed + 2))
            first.backward(retain_graph=True)
            first.backward()
            values += [first.detach(), *(one.clone() for one in gradients(model).values())]
            model.eval()
            with torch.no_grad():
                values.append(model(rows(seed)))
            model.train()
            model.zero_grad()
        found.append([*values, *model.state_dict().values(), torch.get_rng_state()])
    same(*found)


class Pair(nn.Module):
    """Returns what it has computed its result from, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.first(x)
        return self.second(inner.tanh()), inner


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x, inner = block(x)
            x = x + inner
        return x.square().mean(), x


@pytest.mark.parametrize("zero", [0, 3])
@on_ranks(2, simulated=True)
def test_an_output_in_the_history_of_another(zero: int):
    torch.manual_seed(0)
    plan = Plan(parameters={"*": "replicate"}, zero=zero)
    over = mesh(device_type="cpu", dp=2)
    model = parallelize(Pairs(), over, plan, static=True, check=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(5):
        loss, _ = model(rows(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    units = [one for one in captured_units(model) if one.replays]
    assert len(units) == (2 if zero else 1)
    assert all(one.compared == one.replays and not one.uncompared for one in units)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@on_ranks(4, simulated=True)
def test_stages(schedule: str):
    found = []
    for check in (None, "sampled"):
        model = stage_runs.make(True, 4)
        how = stage_runs.plan(schedule, 4)
        sizes = mesh(device_type="cpu", pp=2, tp=2)
        parallelize(model, sizes, how, static=True, check=check)
        values: list[Any] = []
        for step in range(5):
            torch.manual_seed(step)
            values.append(forward_backward(model, *stage_runs.batch(step, ROWS)))
            values += [one.clone() for one in gradients(model).values()]
            model.zero_grad()
        found.append([*values, torch.get_rng_state()])
        units = [one for one in captured_units(model) if one.refusal is None and one.replays]
        assert len(units) == 2
        assert all(bool(one.compared) is (check is not None) for one in units)
    same(*found)
