"""Models on parts of the ranks, each at its own pace: nothing of a step asks the other ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import SimulationError, simulate
from vescale_parallel import Invariant, Pipeline, Plan, forward_backward, parallelize
from word_models import WORDS, WordModel, loss_of

STAGES = Plan(pipeline=Pipeline(stages="blocks.*"), microbatches=4)


def own_mesh(rank: int, axes: tuple[str, ...] = ("pp",), world_size: int = 4) -> DeviceMesh:
    """This rank's of the meshes that share the ranks: all of them are made on all ranks."""
    shape = [2] * len(axes)
    size = 2 ** len(axes)
    meshes = [
        DeviceMesh("cpu", ranks.view(shape), mesh_dim_names=axes)
        for ranks in torch.arange(world_size).split(size)
    ]
    return meshes[rank // size]


def batch(number: int) -> Tensor:
    return (torch.arange(32).view(8, 4) * 7 + number) % WORDS


def trained(mesh: DeviceMesh, seed: int, steps: int, **words: Any) -> list[float]:
    torch.manual_seed(seed)
    plan = STAGES if "pp" in (mesh.mesh_dim_names or ()) else Plan()
    model = parallelize(WordModel(), mesh, plan | Plan(**words))
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
    "pp2, its schedule chosen": (("pp",), {"pipeline": "auto"}),
    "pp2 dp2": (("pp", "dp"), {"batch": "dp:0"}),
    "pp2 zero3": (("pp", "dp"), {"batch": "dp:0", "zero": 3}),
    # Without stages, and on meshes that are rearranged as those of stages are.
    "zero3 beside an inner axis": (("dp", "tp"), {"batch": "dp:0", "zero": 3}),
    "logical shards": (("dp",), {"batch": "dp:0", "deterministic": Invariant(4)}),
}


@pytest.mark.parametrize("name", CASES)
def test_two_models_at_their_own_pace(name: str) -> None:
    axes, words = CASES[name]
    size = 2 ** len(axes)

    def together(rank: int, world_size: int) -> list[float]:
        which = rank // size
        mesh = own_mesh(rank, axes, world_size)
        return trained(mesh, which, 3 + 2 * which, **dict(words))

    found = simulate(2 * size)(together)
    for which in (0, 1):

        def alone(rank: int, world_size: int, which: int = which) -> list[float]:
            return trained(own_mesh(rank, axes, size), which, 3 + 2 * which, **dict(words))

        # Where nobody else is: what both would do wrong side by side would be alike there.
        assert found[which * size : (which + 1) * size] == simulate(size)(alone)


def test_what_fails_in_one_is_told_to_its_own_ranks() -> None:
    def run(rank: int, world_size: int) -> str:
        torch.manual_seed(0)
        model = parallelize(WordModel(), own_mesh(rank), STAGES)
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
        torch.manual_seed(0)
        model = parallelize(WordModel(), own_mesh(rank), STAGES)
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
