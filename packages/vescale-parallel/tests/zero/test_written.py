"""What a forward writes to its parameters is stored, as on one device, or an error on every rank.

WRITES.md has the table of it, whose cells are computed here again.
"""

import traceback
from typing import Any

import pytest
import torch
from forward_writes import FILE, WAYS, WRITES, Writing, batch, cells, make, parallelized, train
from torch import nn
from vescale_comm import simulate, trace
from vescale_comm.testing import Failed, outcomes
from vescale_parallel import Plan, forward_backward, graph, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import schedule_of

WHOLE, PART, DATA = "`w.copy_(normalize(w))`", "`w[0].mul_(0.5)`", "`w.data.div_(2)`"
SET, LOCAL = "`w.data = normalize(w.data)`", "`w.to_local().mul_(0.5)`"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRITES)
def test_the_table_is_what_a_run_gives(name: str, way: str):
    (line,) = [one for one in FILE.read_text().splitlines() if one.startswith(f"| {name} |")]
    told = line.strip("|").split("|")[2 + WAYS.index(way)].strip()
    assert cells(name, way) == told
    assert not {"LOST", "HANGS", "ACCEPTED"} & set(told.split())


def on_a_mesh(sizes: dict[str, int], model: nn.Module, **words: Any) -> Any:
    plan = Plan(batch="dp:0", zero=3, axes=("replica", "dp", "tp"), **words)
    return parallelize(model, make_mesh(device_type="cpu", **sizes), plan)


MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 3}, {}),
    ({"replica": 2, "dp": 2}, {}),
    ({"dp": 2, "tp": 2}, {"parameters": {"blocks.*.weight": "tp:0", "*": "replicate"}}),
]


@pytest.mark.parametrize("name", [WHOLE, PART, DATA, SET])
@pytest.mark.parametrize(("sizes", "words"), MESHES, ids=lambda one: "-".join(one) or "plain")
def test_uneven_shards_and_other_axes(name: str, sizes: dict[str, int], words: dict[str, Any]):
    expected = train(make(name, "eager"), "eager", plain=True)

    def on_a_rank(rank: int, world_size: int) -> torch.Tensor:
        how = {"activations": {}, **words} if words else {}
        return train(on_a_mesh(sizes, make(name, "eager"), **how), "eager", plain=False)

    for found in simulate(4 if len(sizes) > 1 else 3).run(on_a_rank):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_evaluation_writes_as_well():
    def evaluated(model: nn.Module, plain: bool) -> torch.Tensor:
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                model(*batch(7))
        return train(model, "eager", plain)

    for name in (PART, DATA):
        expected = evaluated(make(name, "eager"), True)
        ranks = simulate(2).run(lambda *_, n=name: evaluated(parallelized(n, "eager", 3), False))
        for found in ranks:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Cast(Writing):
    def forward(self, x: Any, tokens: Any, targets: Any) -> Any:
        return super().forward(x.double(), tokens, targets)


@pytest.mark.parametrize("name", [WHOLE, PART, DATA, SET, LOCAL])
def test_another_dtype_is_an_error_that_names_the_line(name: str):
    """Taken back, it would round what nobody has written to."""

    def on_a_rank(rank: int, world_size: int) -> None:
        for zero in (0, 1, 3):
            torch.manual_seed(0)
            plan = Plan(batch="dp:0", zero=zero, precision={"compute": "float64"})
            mesh = make_mesh(device_type="cpu", dp=2)
            model = parallelize(Cast(name, False), mesh, plan)
            for _ in range(2):
                before = [one.detach().full_tensor() for one in model.parameters()]
                with pytest.raises(Exception, match=r"writes to parameter 'blocks\.0") as caught:
                    model(*batch(0))
                after = [one.detach().full_tensor() for one in model.parameters()]
                assert all(map(torch.equal, before, after))
            lines = [one.name for one in traceback.extract_tb(caught.value.__traceback__)]
            # By `to_local` and `.data =` it is noticed when the module has run.
            assert (WRITES[name][1].__name__ in lines) == (name in (WHOLE, PART, DATA))
            if zero:
                assert schedule_of(model).gathered_bytes == 0 or zero < 3

    simulate(2).run(on_a_rank)


def test_another_shape_is_an_error():
    class Grows(Writing):
        def forward(self, *given: Any) -> Any:
            loss = super().forward(*given)
            self.head.weight.data = torch.cat([self.head.weight.data] * 2)
            return loss

    def on_a_rank(rank: int, world_size: int) -> None:
        model = parallelize(
            Grows(DATA, False), make_mesh(device_type="cpu", dp=2), Plan(batch="dp:0", zero=3)
        )
        with pytest.raises(Exception, match=r"has set parameter 'head\.weight' to .* \(6, 4\)"):
            model(*batch(0))

    simulate(2).run(on_a_rank)


def test_writes_send_nothing_and_keep_nothing():
    """Beside a model that does not write: the same collectives, and nothing stays gathered."""

    def on_a_rank(rank: int, world_size: int) -> list[Any]:
        found = []
        for name in (WHOLE, "`w.mul_(0.5)`, recorded"):
            model = parallelized(name, "eager", 3)
            if name != WHOLE:
                for one in (model, *model.blocks):
                    one.write = lambda weight: None
            for step in range(3):
                with trace() as seen:
                    model(*batch(step)).backward()
            assert schedule_of(model).gathered_bytes == 0
            assert not any(one.handed for unit in schedule_of(model).units for one in unit.buffers)
            found.append(seen.counts())
        return found

    for writing, other in simulate(2).run(on_a_rank):
        assert writing == other


def alone(rank: int, world_size: int, name: str, zero: int) -> None:
    model = parallelized(name, "eager", zero)
    writes = model.write
    model.write = lambda weight: writes(weight) if rank == 1 else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(*batch(step)).backward()
        optimizer.step()
    sum(one.detach().full_tensor().sum() for one in model.parameters()).item()


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("name", [WHOLE, PART, DATA, LOCAL])
def test_a_write_on_one_rank_is_an_error_on_all(name: str, zero: int):
    for one in outcomes(alone, 2, name, zero):
        assert isinstance(one, Failed), one
        assert one.type_name in ("CommMismatchError", "RankFailedError", "DisagreementError")


def test_logical_shards_and_graphs_refuse_it():
    def on_a_rank(rank: int, world_size: int) -> None:
        mesh = make_mesh(device_type="cpu", dp=2)
        for name in (WHOLE, DATA):
            plan = Plan(batch="dp:0", zero=3, deterministic="dp-invariant")
            model = parallelize(make(name, "eager"), mesh, plan)
            with pytest.raises(Exception, match="forward has written to 'blocks"):
                forward_backward(model, *batch(0))
            model = parallelized(name, "eager", 3)
            with pytest.raises(Exception, match="train_step: the forward writes to parameters"):
                graph.train_step(model, model, *batch(0))

    simulate(2).run(on_a_rank)
