"""Models on parts of the ranks, each at its own pace: nothing of a step asks the other ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import SimulationError, simulate
from vescale_parallel import Plan, forward_backward, parallelize

WORDS = 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
            for _ in range(4)
        )
        self.head = nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        made: Tensor = self.head(hidden)
        return made


def loss_of(made: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(made.flatten(0, 1), x.flatten())


def batch(number: int) -> Tensor:
    return (torch.arange(32).view(8, 4) * 7 + number) % WORDS


def trained(mesh: DeviceMesh, seed: int, steps: int, **words: Any) -> list[float]:
    torch.manual_seed(seed)
    if "pp" in (mesh.mesh_dim_names or ()):
        stages = {"stages": "blocks.*", "schedule": "1f1b", "microbatches": 4}
        words["pipeline"] = stages | words.get("pipeline", {})
    model = parallelize(Model(), mesh, Plan(**words))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(steps):
        x = batch(number)
        losses.append(float(forward_backward(model, x, loss=(loss_of, x))))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(float(model(batch(0)).sum()))
    return losses


CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "pp2": (("pp",), {}),
    "pp2, its schedule chosen": (("pp",), {"pipeline": {"schedule": "auto"}}),
    "pp2 dp2": (("pp", "dp"), {"batch": "dp:0"}),
    "pp2 zero3": (("pp", "dp"), {"batch": "dp:0", "zero": 3}),
    # Without stages, and on meshes that are rearranged as those of stages are.
    "zero3 beside an inner axis": (("dp", "tp"), {"batch": "dp:0", "zero": 3}),
    "logical shards": (("dp",), {"batch": "dp:0", "deterministic": "dp-invariant", "shards": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_two_models_at_their_own_pace(name: str) -> None:
    axes, words = CASES[name]
    size = 2 ** len(axes)

    def program(pace: Callable[[int], int]) -> Callable[[int, int], list[float]]:
        def run(rank: int, world_size: int) -> list[float]:
            which = rank // size
            # Both are made on all ranks, as groups of processes are.
            meshes = [
                DeviceMesh(
                    "cpu",
                    torch.arange(first, first + size).view(*[2] * len(axes)),
                    mesh_dim_names=axes,
                )
                for first in range(0, world_size, size)
            ]
            return trained(meshes[which], which, pace(which), **dict(words))

        return run

    together = simulate(2 * size)(program(lambda which: 3 + 2 * which))
    for which in (0, 1):
        alone = simulate(2 * size)(program(lambda _, steps=3 + 2 * which: steps))
        here = slice(which * size, (which + 1) * size)
        assert together[here] == alone[here]
        assert len({tuple(one) for one in together[here]}) == 1


def test_what_fails_in_one_is_told_to_its_own_ranks() -> None:
    def run(rank: int, world_size: int) -> str:
        which = rank // 2
        meshes = [DeviceMesh("cpu", [one, one + 1], mesh_dim_names=("pp",)) for one in (0, 2)]
        torch.manual_seed(0)
        stages = {"stages": "blocks.*", "schedule": "1f1b", "microbatches": 4}
        model = parallelize(Model(), meshes[which], Plan(pipeline=stages))
        said = ""
        for number in range(3):
            # The other ranks of the second pipeline pass another batch, in one call.
            x = batch(number + (rank == 3 and number == 1))
            try:
                forward_backward(model, x, loss=(loss_of, x))
            except Exception as error:
                said += str(error)
        return said

    said = simulate(4)(run)
    assert said[:2] == ["", ""]
    assert all("on rank 3" in one and "rank 0" not in one for one in said[2:])


def test_a_stage_that_raises_is_named_by_its_rank() -> None:
    def run(rank: int, world_size: int) -> None:
        which = rank // 2
        meshes = [DeviceMesh("cpu", [one, one + 1], mesh_dim_names=("pp",)) for one in (0, 2)]
        torch.manual_seed(0)
        stages = {"stages": "blocks.*", "schedule": "1f1b", "microbatches": 4}
        model = parallelize(Model(), meshes[which], Plan(pipeline=stages))
        x = batch(0)

        def loss(made: Tensor, x: Tensor) -> Tensor:
            if which and made.device.type != "meta":
                raise ValueError("no loss today")
            return loss_of(made, x)

        forward_backward(model, x, loss=(loss, x))

    with pytest.raises(SimulationError) as raised:
        simulate(4)(run)
    assert "raised on rank(s) 2, 3 of 4" in str(raised.value)
    assert "failed on rank 3, stage 1" in str(raised.value)
