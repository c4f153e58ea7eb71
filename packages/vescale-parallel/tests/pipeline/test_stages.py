"""A model in stages trains as one device does that accumulates over the same microbatches.

Also by any schedule that the validator accepts: stages lie on any rank, microbatches come in any
order, and backwards whole or in halves.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_runs import batch, make, plan, train, whole
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_comm.testing import run
from vescale_parallel import forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel.schedules import Action, Schedule, check_schedule, schedule_of

ZERO = [
    ("1f1b", False, 7, {"zero": 3}),
    ("gpipe", True, 7, {"zero": 2}),
    ("interleaved", False, 7, {"zero": 1}),
    ("zbv", True, 7, {"zero": 3}),
    ("zb-h1", False, 7, {"zero": 2}),
    ("dualpipev", False, 7, {"zero": 1}),
]


IN_STAGES = [
    ({"pp": 2}, "gpipe", False, 8, {}),
    ({"pp": 2}, "1f1b", True, 7, {}),
    ({"pp": 4}, "1f1b", False, 8, {}),
    ({"pp": 4}, "gpipe", True, 7, {}),
    ({"pp": 2}, "interleaved", False, 8, {}),
    ({"pp": 2}, "interleaved", True, 7, {}),
    ({"pp": 2, "dp": 2}, "1f1b", False, 8, {}),
    ({"pp": 2, "dp": 2}, "1f1b", True, 7, {}),
    ({"pp": 2, "tp": 2}, "1f1b", False, 8, {}),
    ({"pp": 2, "tp": 2}, "gpipe", True, 7, {}),
    ({"dp": 2, "pp": 2}, "interleaved", False, 7, {}),
    ({"pp": 2}, "zb-h1", True, 7, {}),
    ({"pp": 4}, "zb-greedy", False, 8, {}),
    ({"pp": 2}, "zbv", False, 7, {}),
    ({"pp": 2}, "dualpipev", True, 8, {}),
    ({"pp": 2, "tp": 2}, "zbv", True, 7, {}),
    ({"pp": 2, "dp": 2}, "dualpipev", False, 7, {}),
    ({"pp": 2}, "1f1b", False, 8, {"checkpoint": "full"}),
    ({"pp": 2}, "1f1b", False, 8, {"checkpoint": "selective"}),
    *(({"pp": 2, "dp": 2}, *case) for case in ZERO),
]


@pytest.mark.parametrize(("sizes", "schedule", "tied", "rows", "words"), IN_STAGES, ids=str)
def test_a_model_in_stages_trains_like_one_device(
    sizes: dict[str, int], schedule: str, tied: bool, rows: int, words: dict[str, Any]
):
    ranks = torch.Size(sizes.values()).numel()
    simulate(ranks)(train, sizes, plan(schedule, 4, **words), tied, rows)


def test_processes_do_as_simulated_ranks():
    run(train, 2, {"pp": 2}, plan("1f1b", 4), True, 7)


def test_checkpoints_move_between_meshes(tmp_path: Path):
    ckpt = pytest.importorskip("vescale_ckpt")
    path = str(tmp_path / "saved")

    def state_of(sizes: dict[str, int], seed: int, **fields: Any) -> tuple[nn.Module, Any]:
        model = make(True)
        parallelize(model, make_mesh(device_type="cpu", **sizes), plan("1f1b", 4, **fields))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        forward_backward(model, *batch(seed))
        optimizer.step()
        return model, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def save(rank: int, world_size: int) -> list[Tensor]:
        model, state = state_of({"pp": 2, "dp": 2}, 0, zero=3)
        ckpt.save(path, state)
        return [whole(one).detach() for one in model.parameters()]

    def load(rank: int, world_size: int) -> list[Tensor]:
        model, state = state_of({"pp": 2, "tp": 2}, 1)
        ckpt.load(path, into=state)
        return [whole(one).detach() for one in model.parameters()]

    expected, found = simulate(4)(save), simulate(4)(load)
    assert all(map(torch.equal, expected[0], found[3]))


BLOCKS = 4


def any_schedule(seed: int, ranks: int, microbatches: int) -> Schedule:
    """A schedule by chance: whatever can come next, on any rank, until all is done."""
    draw = random.Random(seed)
    stages = draw.randint(ranks, BLOCKS)
    places = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    draw.shuffle(places)
    # Of each pair whether its backward comes whole.
    whole = {(s, m): draw.random() < 0.5 for s in range(stages) for m in range(microbatches)}
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    can = [Action("F", 0, m) for m in range(microbatches)]
    while can:
        action = can.pop(draw.randrange(len(can)))
        kind, stage, microbatch = action
        rows[places[stage]].append(action)
        if kind == "F" and stage + 1 < stages:
            can.append(Action("F", stage + 1, microbatch))
        if kind == "I":
            can.append(Action("W", stage, microbatch))
        back = stage - 1 if kind in "BI" else stage if (kind, stage) == ("F", stages - 1) else -1
        if back >= 0:
            can.append(Action("B" if whole[back, microbatch] else "I", back, microbatch))
    return schedule_of("any", rows)


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 3}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_it_runs(seed: int, sizes: dict[str, int]):
    schedule = any_schedule(seed, sizes["pp"], 4)
    check_schedule(schedule)
    world = sizes["pp"] * sizes.get("dp", 1)
    simulate(world)(train, sizes, plan(schedule.to_csv(), 4), bool(seed % 2), 7 + seed % 2)
