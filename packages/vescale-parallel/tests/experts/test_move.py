"""Experts move between ranks with their optimizer states, and training goes on as on one device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from expert_models import ROWS, TOKENS, Net, made, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import SimulationError, simulate
from vescale_dtensor import DTensor, Partial
from vescale_parallel import DisagreementError, Plan, balance_experts, parallelize
from vescale_parallel._experts.partition import partition


def test_partitions_are_the_best_of_all():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        ranks = int(torch.randint(1, 5, (), generator=generator))
        loads = torch.randint(9, (int(torch.randint(1, 8, (), generator=generator)),)).tolist()
        most = -(-len(loads) // ranks) + int(torch.randint(3, (), generator=generator))
        found = partition(loads, ranks, most)
        assert sum(found) == len(loads)
        assert len(found) == ranks
        assert max(found) <= most
        best = min(
            busiest(loads, counts)
            for counts in itertools.product(range(most + 1), repeat=ranks)
            if sum(counts) == len(loads)
        )
        assert busiest(loads, found) == best


def busiest(loads: list[int], counts: tuple[int, ...]) -> int:
    ends = list(itertools.accumulate(counts, initial=0))
    return max(sum(loads[a:b]) for a, b in itertools.pairwise(ends))


def train(layout: str | None) -> tuple[list[float], list[tuple[int, ...]], list[Tensor]]:
    model = made(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, shares = [], []
    for step in range(3):
        tokens = torch.randint(32, (ROWS, TOKENS))
        loss = model(tokens, tokens.roll(1, 1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.item()]
        if layout is not None and step < 2:
            loads: dict[str, Any] = dict(
                zip(("blocks.0.experts", "blocks.1.experts"), model.loads[-2:], strict=True)
            )
            if step == 1:
                loads = {"blocks.0.experts": [50, 1, 1, 1, 1, 1], "blocks.1.experts": [1] * 6}
            before = {name: model.get_parameter(f"{name}.down_proj") for name in loads}
            shares += balance_experts(model, loads, most=5).values()
            assert all(old.numel() == 0 for old in before.values())
    states = [
        whole(state[name])
        for state in (optimizer.state[p] for p in model.parameters())
        for name in ("exp_avg", "exp_avg_sq")
    ]
    return losses, shares, [whole(p) for p in model.parameters()] + states


@pytest.mark.parametrize("layout", ["ep4", "ep2 tp2", "ep2 dp2"])
def test_training_goes_on(layout: str):
    losses, _, values = train(None)
    for found, shares, own in simulate(4).run(lambda rank, world_size: train(layout)):
        assert found == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(own, values, rtol=1e-3, atol=1e-6)
        assert shares[2] == ((1, 5) if layout != "ep4" else (1, 5, 0, 0))
        assert len(set(shares)) > 1


WRONG = [
    ("ep4", {"blocks.0": [1] * 6}, None, "is no module of experts"),
    ("ep4", {"blocks.0.experts": [1] * 4}, None, "Pass one load"),
    ("ep4", {"blocks.0.experts": [1] * 6}, 1, "Pass one load"),
    ("ep2 zero3", {"blocks.0.experts": [1] * 6}, None, "cannot be moved"),
    ("dp2 ep2 as one", {"blocks.0.experts": [1] * 6}, None, "not shared over one axis"),
]


@pytest.mark.parametrize(("layout", "loads", "most", "message"), WRONG, ids=str)
def test_what_cannot_be_moved_says_why(layout: str, loads: Any, most: Any, message: str):
    def run(rank: int, world_size: int) -> None:
        balance_experts(made(layout), loads, most=most)

    with pytest.raises(SimulationError, match=message):
        simulate(4).run(run)


def test_loads_that_differ_are_told():
    def run(rank: int, world_size: int) -> None:
        loads = [1] * 6 if rank else [50, 1, 1, 1, 1, 1]
        balance_experts(made("ep4"), {"blocks.0.experts": loads})

    with pytest.raises(SimulationError, match="was not given the same on all ranks"):
        simulate(4).run(run)


@pytest.mark.parametrize("mine", [{}, {"blocks.0": [1] * 6}, {"blocks.0.experts": [1]}], ids=str)
def test_what_one_rank_asks_otherwise_is_told_on_every_rank(mine: dict[str, Any]):
    def run(rank: int, world_size: int) -> str:
        with pytest.raises(DisagreementError) as told:
            balance_experts(made("ep4"), {"blocks.0.experts": [1] * 6} if rank else mine)
        return str(told.value)

    assert all("rank 0" in one for one in simulate(4).run(run))


@pytest.mark.parametrize("mine", [{}, {"blocks.0": None}, {"blocks.0.experts": [1] * 6}], ids=str)
def test_loads_that_ranks_sum_are_not_summed_before_all_ask_alike(mine: dict[str, Any]):
    def run(rank: int, world_size: int) -> None:
        model = made("ep4")
        mesh = model.get_parameter("blocks.0.experts.down_proj").device_mesh
        load = DTensor.from_local(torch.ones(6), mesh, [Partial()])
        loads = {name: load if one is None else one for name, one in mine.items()}
        with pytest.raises(DisagreementError, match="was not given the same"):
            balance_experts(model, {"blocks.0.experts": load} if rank else loads)

    simulate(4).run(run)


def test_meshes_side_by_side_move_their_experts_by_themselves():
    """Another mesh holds another model, and may be busy with something else."""

    def run(rank: int, world_size: int) -> tuple[int, ...]:
        meshes = [DeviceMesh("cpu", one, mesh_dim_names=("ep",)) for one in ([0, 1], [2, 3])]
        torch.manual_seed(rank // 2)
        model = parallelize(Net(), meshes[rank // 2], Plan(batch="ep:0", experts="ep"))
        if rank < 2:
            return ()
        return balance_experts(model, {"blocks.0.experts": [50, 1, 1, 1, 1, 1]})["blocks.0.experts"]

    assert simulate(4).run(run) == [(), (), (1, 5), (1, 5)]
