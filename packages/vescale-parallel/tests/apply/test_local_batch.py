"""Ranks that pass their own rows, however many, train as one device does on all of them."""

import copy
import random
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import vescale_parallel as vp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import simulate, trace
from vescale_comm.testing import on_ranks
from vescale_dtensor import CaptureError, capture
from vescale_rng.torch_dtensor import consistent
from zero_models import batch, distributed, make, require_same_gradients

HALF = {"dp": 2, "tp": 2}
HYBRID = {"replica": 2, "dp": 2}


def my_shard(sizes: dict[str, int], rank: int) -> int:
    return rank // sizes.get("tp", 1)


def sharers(sizes: dict[str, int]) -> int:
    return torch.Size(sizes.values()).numel() // sizes.get("tp", 1)


def cut(rows: int, shards: int, seed: int) -> list[int]:
    """Any numbers of rows that add up, zeros among them."""
    draws = random.Random(seed)
    places = sorted(draws.randint(0, rows) for _ in range(shards - 1))
    return [b - a for a, b in zip([0, *places], [*places, rows], strict=True)]


def one_step(model: nn.Module, *inputs: Tensor) -> float:
    torch.manual_seed(7)
    loss = model(*inputs)
    loss.backward()
    return loss.item()


@pytest.mark.parametrize(
    ("sizes", "zero"), [({"dp": 3}, 0), ({"dp": 4}, 3), (HALF, 0), (HALF, 3), (HYBRID, 2)], ids=str
)
def test_any_rows_are_one_batch(sizes: dict[str, int], zero: int):
    def on_a_rank(rank: int, world_size: int) -> None:
        shards = sharers(sizes)
        model = distributed(make(), sizes, zero, batch_is="local")
        for counts in [cut(7, shards, seed) for seed in range(3)] + [[0] * (shards - 1) + [7]]:
            plain = make()
            model.zero_grad()
            expected = one_step(plain, *batch(1))
            mine = [one.split(counts)[my_shard(sizes, rank)] for one in batch(1)]
            assert one_step(model, *mine) == pytest.approx(expected, rel=1e-6), counts
            require_same_gradients(model, plain)

    simulate(torch.Size(sizes.values()).numel())(on_a_rank)


@pytest.mark.parametrize(
    ("sizes", "zero"), [({"dp": 3}, 0), ({"dp": 4}, 3), (HALF, 3), (HYBRID, 2)], ids=str
)
def test_labels_of_a_loss_outside_of_the_model(sizes: dict[str, int], zero: int):
    def step(model: nn.Module, x: Tensor, y: Tensor, inside: bool) -> float:
        if inside:
            return vp.forward_backward(model, x, loss=(F.cross_entropy, y)).item()
        x, y = vp.distribute_batch(model, x, y)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    def on_a_rank(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
        x, y = torch.randn(7, 5), torch.arange(7) % 3
        batch = ", ".join(f"{axis}:0" for axis in sizes if axis != "tp")
        for is_local in (True, False):
            plan = vp.Plan(batch=batch, batch_is="local" if is_local else "global", zero=zero)
            mesh = vp.mesh(device_type="cpu", **sizes)
            model = vp.parallelize(copy.deepcopy(made), mesh, plan)
            for seed, inside in product(range(3), (False, True)):
                plain = copy.deepcopy(made)
                model.zero_grad()
                expected = step(plain, x, y, inside)
                mine = (x, y)
                if is_local:
                    counts = cut(7, sharers(sizes), seed)
                    at = my_shard(sizes, rank)
                    mine = x.split(counts)[at], y.split(counts)[at]
                assert step(model, *mine, inside) == pytest.approx(expected, rel=1e-6)
                require_same_gradients(model, plain)

    simulate(torch.Size(sizes.values()).numel())(on_a_rank)


@on_ranks(2, simulated=True)
def test_what_distribute_batch_gives_back(rank: int, world_size: int):
    mesh = vp.mesh(device_type="cpu", dp=2)
    model = vp.parallelize(nn.Linear(5, 3), mesh, vp.Plan(batch_is="local"))
    x = torch.randn(rank + 1, 5)
    one = vp.distribute_batch(model, x)
    assert one.shape == (3, 5)
    assert torch.equal(one.full_tensor()[rank : 2 * rank + 1], x)
    both = vp.distribute_batch(model, {"x": x, "scale": torch.tensor(2.0)}, [x, "text"])
    assert both[0]["x"].shape == both[1][0].shape == (3, 5)
    assert both[1][1] == "text"
    assert type(both[0]["scale"]) is torch.Tensor
    assert vp.distribute_batch(model, one) is one
    assert vp.distribute_batch(nn.Linear(5, 3), x) is x
    assert vp.distribute_batch(model) == ()
    with pytest.raises(vp.DisagreementError, match="differ in their form"):
        vp.distribute_batch(model, x.double() if rank else x)


@on_ranks(2, simulated=True)
def test_labels_that_are_distributed_leave_the_batches_of_the_model_compared(
    rank: int, world_size: int
):
    model = vp.parallelize(nn.Linear(5, 3), vp.mesh(device_type="cpu", dp=2), vp.Plan())
    x, y = torch.ones(4, 5), torch.arange(4) % 3
    vp.forward_backward(model, x, loss=(F.cross_entropy, y))
    with pytest.raises(vp.DisagreementError, match="batches that enter the model differ"):
        vp.forward_backward(model, x + rank, loss=(F.cross_entropy, y))
    other = vp.parallelize(nn.Linear(5, 3), vp.mesh(device_type="cpu", dp=2), vp.Plan())
    vp.distribute_batch(other, y)
    with pytest.raises(vp.DisagreementError, match="batches that enter the model differ"):
        vp.distribute_batch(other, y + rank)


@on_ranks(3, simulated=True)
def test_random_numbers_of_rows_are_those_of_one_device(rank: int, world_size: int):
    """Drawn outside of the model, with one seed: of the distributed batch, or of plain rows."""
    batch, mesh = torch.ones(7, 5), vp.mesh(device_type="cpu", dp=3)
    model = vp.parallelize(nn.Linear(5, 3), mesh, vp.Plan(batch_is="local"))
    for draw in (torch.randn_like, torch.rand_like, F.dropout):
        torch.manual_seed(3)
        noise, after = draw(batch), torch.rand(1)
        for counts in ([3, 3, 1], [2, 0, 5]):
            mine, even = batch.split(counts)[rank], noise.split([3, 3, 1])[rank]
            torch.manual_seed(3)
            assert torch.equal(draw(vp.distribute_batch(model, mine)).to_local(), even)
            assert torch.equal(torch.rand(1), after)
            torch.manual_seed(3)
            with consistent(data=mesh["dp"]):
                assert torch.equal(draw(mine), noise.split(counts)[rank])
            assert torch.equal(torch.rand(1), after)


@on_ranks(3, simulated=True)
def test_the_whole_batch_beside_rows_of_it_is_refused(rank: int, world_size: int):
    model = vp.parallelize(Many(), vp.mesh(device_type="cpu", dp=3), vp.Plan(batch_is="local"))
    x, noise = torch.ones(6, 2), torch.arange(12.0).view(6, 2)
    mine = x.split([1, 2, 3])[rank]
    said = r"args\[1\] has the same 6 rows on every rank, and args\[0\] has 1 \+ 2 \+ 3 of them"
    # Any batch: the first ones are compared for other reasons, too.
    for _ in range(4):
        with pytest.raises(vp.PlanError, match=said):
            model(mine, noise)
        with pytest.raises(vp.PlanError, match=said):
            vp.distribute_batch(model, mine, noise)
        with pytest.raises(vp.PlanError, match=r"loss\[0\] has the same 6 rows on every rank, and"):
            vp.forward_backward(model, mine, loss=(lambda out, _: out, noise))
        # As many, and each rank's own: several rows of y for one of x.
        model(mine, noise + rank)
        model(x[:0], noise[:0])


class Many(nn.Module):
    """Takes many tensors, some with other rows than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *given: Tensor) -> Tensor:
        return torch.stack([(one * self.weight * n).mean() for n, one in enumerate(given)]).sum()


@on_ranks(3, simulated=True)
def test_more_tensors_than_one_message_has_room_for(rank: int, world_size: int):
    values = [torch.arange(1.0, 4 + n % 3) for n in range(65)]
    plain, model = Many(), Many()
    vp.parallelize(model, vp.mesh(device_type="cpu", dp=3), vp.Plan(batch_is="local"))
    mine = [one.split([1, 0, len(one) - 1])[rank] for one in values]
    assert one_step(model, *mine) == pytest.approx(one_step(plain, *values), rel=1e-5)


class Weighted(nn.Module):
    """Takes nested arguments, a float input that asks for gradients, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, given: dict[str, Any], *, scale: Tensor) -> Tensor:
        return (self.inner(given["x"]).sum(1) * given["y"] * scale).mean()


@on_ranks(3, simulated=True)
def test_gradients_reach_the_rows_that_were_passed(rank: int, world_size: int):
    torch.manual_seed(0)
    plain, model = Weighted(), Weighted()
    model.load_state_dict(plain.state_dict())
    vp.parallelize(model, vp.mesh(device_type="cpu", dp=3), vp.Plan(batch_is="local"))
    x, y = torch.randn(8, 3, requires_grad=True), torch.randn(8)
    plain({"x": x, "y": y}, scale=torch.tensor(2.0)).backward()
    counts = [5, 0, 3]
    mine = x.detach().split(counts)[rank].clone().requires_grad_()
    given = {"x": mine, "y": y.split(counts)[rank]}
    model(given, scale=torch.tensor(2.0)).backward()
    torch.testing.assert_close(mine.grad, x.grad.split(counts)[rank])


def test_rows_that_lie_as_chunks_are_counted_and_not_moved():
    def on_a_rank(rank: int, world_size: int) -> list[str]:
        model = vp.parallelize(
            Weighted(), vp.mesh(device_type="cpu", dp=2), vp.Plan(batch_is="local")
        )
        found = []
        for _ in range(3):
            given = {"x": torch.ones(2 - rank, 3), "y": torch.ones(2 - rank)}
            with trace() as log, torch.no_grad():
                model(given, scale=torch.tensor(1.0))
            found = [one.op for one in log.records]
        return found

    for ops in simulate(2)(on_a_rank):
        assert ops == ["all_gather"]


def wrong(rank: int, kind: str) -> tuple[dict[str, Any], Tensor]:
    given: dict[str, Any] = {"x": torch.ones(2, 3), "y": torch.ones(2)}
    scale = torch.tensor(1.0)
    if rank == 3 and kind == "dtype":
        given["y"] = given["y"].double()
    if rank == 3 and kind == "shape":
        given["x"] = torch.ones(2, 4)
    if rank == 3 and kind == "missing":
        del given["y"]
    if rank == 3 and kind == "rows of tp":
        given["x"] = torch.ones(3, 3)
    if rank == 3 and kind == "values of tp":
        given["x"] = torch.zeros(2, 3)
    if rank == 3 and kind == "table":
        scale = torch.tensor(2.0)
    return given, scale


DIFFERENCES = [
    ("dtype", "torch.float64 on rank 3"),
    ("shape", r"\(rows, 4\) torch.float32 on rank 3"),
    ("missing", "not there on rank 3"),
    ("rows of tp", "2 rows on rank 2; 3 rows on rank 3"),
    ("values of tp", r"value of 'args\[0\]\['x'\]'"),
    ("table", "value of 'kwargs"),
]


@pytest.mark.parametrize(("kind", "message"), DIFFERENCES)
@on_ranks(4, simulated=True)
def test_what_differs_is_told_on_every_rank(rank: int, world_size: int, kind: str, message: str):
    mesh = vp.mesh(device_type="cpu", **HALF)
    torch.manual_seed(0)
    model = vp.parallelize(Weighted(), mesh, vp.Plan(batch_is="local"))
    given, scale = wrong(rank, kind)
    with pytest.raises(vp.DisagreementError, match=message):
        model(given, scale=scale)


@on_ranks(4, simulated=True)
def test_meshes_side_by_side_compare_by_themselves(rank: int, world_size: int):
    """Another mesh holds another model, and may be busy with something else."""
    ranks = [[0, 1], [2, 3]][rank // 2]
    meshes = [DeviceMesh("cpu", one, mesh_dim_names=("dp",)) for one in ([0, 1], [2, 3])]
    mesh = meshes[rank // 2]
    torch.manual_seed(rank // 2)
    model = vp.parallelize(Weighted(), mesh, vp.Plan(batch_is="local"))
    if rank < 2:
        return
    given: dict[str, Any] = {"x": torch.ones(2, 3), "y": torch.ones(2)}
    assert model(given, scale=torch.tensor(1.0)).full_tensor().numel()
    given["y"] = given["y"].to([torch.float32, torch.float64][rank - 2])
    with pytest.raises(vp.DisagreementError, match=r"torch.float64 on rank 3"):
        model(given, scale=torch.tensor(1.0))
    assert mesh.mesh.tolist() == ranks


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    name: str = ""


@on_ranks(2, simulated=True)
def test_rows_in_data_classes_are_rows(rank: int, world_size: int):
    torch.manual_seed(0)
    plain = nn.Linear(3, 1)
    mesh = vp.mesh(device_type="cpu", dp=2)
    model = vp.parallelize(OfSamples(plain), mesh, vp.Plan(batch_is="local"))
    x, y = torch.arange(15.0).view(5, 3), torch.arange(5.0)
    own = slice(0, 3) if rank == 0 else slice(3, 5)
    with torch.no_grad():
        found = model(Sample(x[own], y[own]))
        torch.testing.assert_close(found.full_tensor(), OfSamples(plain)(Sample(x, y)))


class OfSamples(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.linear.load_state_dict(linear.state_dict())

    def forward(self, sample: Sample) -> Tensor:
        return (self.linear(sample.x).squeeze(-1) - sample.y).square().mean()


@on_ranks(2, simulated=True)
def test_a_recording_does_not_keep_the_rows_of_one_batch():
    torch.manual_seed(0)
    model = vp.parallelize(Weighted(), vp.mesh(device_type="cpu", dp=2), vp.Plan(batch_is="local"))
    for _ in range(3):
        with pytest.raises((CaptureError, vp.ParallelError)):
            capture(model)({"x": torch.ones(2, 3), "y": torch.ones(2)}, scale=torch.ones(()))


NO_MEANING = [
    ({"batch_is": "mine"}, "'mine'"),
    ({"batch_is": "local", "batch": None}, "needs a batch"),
    ({"batch_is": "local", "batch": "dp:0, cp:1"}, "needs a batch"),
]


@pytest.mark.parametrize(("words", "message"), NO_MEANING)
def test_words_that_mean_nothing(words: dict[str, Any], message: str):
    with pytest.raises(vp.PlanError, match=message):
        vp.Plan(**words)
