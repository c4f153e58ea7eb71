"""A unit whose replays are not faster than its forward runs eagerly, on every rank or on none.

Times are made up, and differ from rank to rank; what decides is their sum. Until then both kinds of
calls take turns, and training has the bits of eager mode throughout: with dropout, accumulation,
evaluation in between, checkpoints around blocks and in the plan.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import simulate
from vescale_parallel import captured_units, mesh, no_sync, parallelize
from vescale_parallel._static import speed
from vescale_parallel._static.speed import ReplaySpeed
from zero_models import adamw, batch, gradients, make, plan_for, same

SIZES, STEPS = {"dp": 2}, 9
# Of a replay and of a forward, by rank.
SLOWER, FASTER = {0: (90, 50), 1: (20, 50)}, {0: (60, 50), 1: (20, 50)}


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """What calls take, by rank: to be filled."""
    found: dict[int, tuple[int, int]] = {}
    note = ReplaySpeed.note

    def told(self: ReplaySpeed, nanoseconds: int, *, eager: bool, is_sample: bool) -> None:
        assert nanoseconds >= 0
        note(self, 1000 * found[dist.get_rank()][eager], eager=eager, is_sample=is_sample)

    monkeypatch.setattr(ReplaySpeed, "note", told)
    # As early as there are programs, and late enough for some of either.
    monkeypatch.setattr(speed, "FIRST", 4)
    monkeypatch.setattr(speed, "LAST", 16)
    return found


def steps(model: nn.Module) -> list[Any]:
    """What training gives."""
    optimizer, found = adamw(model.parameters()), []
    for seed in range(STEPS):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        with no_sync(model):
            model(*batch(2 * seed)).backward()
        loss = model(*batch(2 * seed + 1))
        loss.backward()
        found += [loss.detach(), *(one.clone() for one in gradients(model).values())]
        optimizer.step()
        if seed % 3 == 0:
            model.eval()
            with torch.no_grad():
                found.append(model(*batch(seed)))
            model.train()
    return [*found, *(one.detach() for one in model.parameters()), torch.get_rng_state()]


def trained(rank: int, world_size: int, zero: int, options: dict[str, Any], plan: Any) -> Any:
    """Train with and without programs; what became of each unit."""
    over = mesh(device_type="cpu", **SIZES)
    how = plan_for(SIZES, zero, **plan)
    eager, static = (
        parallelize(make(blocks=2, **options), over, how, static=one) for one in (False, True)
    )
    same(steps(eager), steps(static))
    found = captured_units(static)
    same(steps(eager), steps(static))
    after = {one.name: one for one in captured_units(static)}
    return {one.name: (one, after[one.name].replays - one.replays) for one in found}


@pytest.mark.parametrize(
    ("is_slower", "zero", "options", "plan"),
    [
        (True, 0, {}, {}),
        (True, 3, {}, {}),
        (False, 3, {}, {}),
        (True, 3, {"around": True}, {}),
        (False, 3, {}, {"checkpoint": "full"}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # evaluation
def test_the_sum_over_ranks_decides(
    is_slower: bool, zero: int, options: Any, plan: Any, times: dict[int, tuple[int, int]]
):
    times.update(SLOWER if is_slower else FASTER)
    names = ["blocks.0", "blocks.1"] if zero else [""]
    for units in simulate(2)(trained, zero, options, plan):
        for name in names:
            unit, later = units[name]
            if is_slower:
                said = "its replay takes 55 µs of a rank's processor time, its forward 50 µs"
                assert unit.refusal == said
                assert str(unit).endswith(f"runs eagerly: {said}")
                assert unit.replays > 0
                assert later == 0
            else:
                assert unit.refusal is None
                # Two forwards a step, and evaluations; recomputations.
                assert later >= 2 * STEPS


def side_by_side(rank: int, world_size: int) -> str:
    """Two models on meshes of their own: one is trained for longer than the other."""
    over = [DeviceMesh("cpu", ranks, mesh_dim_names=("dp",)) for ranks in ([0, 1], [2, 3])]
    model = parallelize(make(blocks=1), over[rank // 2], plan_for({"dp": 2}, 0), static=True)
    for seed in range(17 if rank < 2 else 5):
        model(*batch(seed)).backward()
    return str(captured_units(model)[0])


def test_ranks_of_another_model_have_no_say(times: dict[int, tuple[int, int]]):
    times.update(SLOWER | {2: (1, 50), 3: (1, 50)})
    found = simulate(4)(side_by_side)
    assert all("runs eagerly: its replay takes 55 µs" in one for one in found[:2])
    assert not any("eagerly" in one for one in found[2:])
