"""Lists, dicts and records that a module writes to are its caller's, also if a rule copies them."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_dtensor import DTensor
from vescale_parallel import Plan, parallelize
from vescale_parallel import mesh as make_mesh


@dataclass
class Record:
    hidden: Tensor
    losses: list[Tensor] = field(default_factory=list)
    note: str = ""


class Block(nn.Module):
    """Appends, replaces, deletes and sets, in a list, a dict and a record."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, kept: list[Any], named: dict[str, Any], record: Record) -> Tensor:
        x = self.lin(x) + kept[0] + named["bias"] + record.hidden
        kept.append(x.mean())
        kept[1].append(x.sum())
        named["sum"] = x.sum()
        named.pop("gone", None)
        record.losses.append(x.square().mean())
        record.note = record.note + "seen "
        if x.shape[0] == 1:
            raise ValueError("after it was written")
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, outer: list[Any]) -> Tensor:
        kept: list[Any] = [x * 2, [x * 3]]
        first, named = kept[0], {"bias": x * 0.5, "gone": x}
        record = Record(x * 0.1, [])
        for block in self.blocks:
            x = block(x, kept, named=named, record=record)
        assert kept[0] is first
        assert (len(kept), len(kept[1]), list(named)) == (4, 3, ["bias", "sum"])
        assert (len(record.losses), record.note) == (2, "seen seen ")
        outer.append(x.mean())
        extra = [*kept[2:], *kept[1][1:], named["sum"], *record.losses]
        return x.square().mean() + sum(one.sum() for one in extra)


def step(model: nn.Module) -> tuple[float, list[Tensor], int]:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    outer: list[Any] = [x]
    loss = model(x, outer)
    loss.backward()
    assert outer[0] is x
    assert len(outer) == 2
    grads = [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()
    ]
    return loss.item(), grads, len(outer)


@pytest.mark.parametrize(
    "rule", ["dp:full -> dp:0", "* = dp:full -> dp:0", "kept = dp:full; named = dp:full ->"]
)
def test_what_is_written_reaches_the_caller(rule: str):
    torch.manual_seed(0)
    plain = Model()
    loss, grads, _ = step(copy.deepcopy(plain))

    def on_a_rank(rank: int, world_size: int) -> None:
        mesh = make_mesh(device_type="cpu", dp=2, tp=2)
        plan = Plan(activations={"blocks.[01]": rule})
        model = parallelize(copy.deepcopy(plain), mesh, plan)
        for tried in (model, copy.deepcopy(model)):
            for _ in range(2):
                tried.zero_grad()
                found, mine, _ = step(tried)
                assert found == pytest.approx(loss, rel=1e-5)
                for one, two in zip(mine, grads, strict=True):
                    torch.testing.assert_close(one, two)

    simulate(4)(on_a_rank)


@on_ranks(2, simulated=True)
def test_also_when_the_module_raises():
    mesh = make_mesh(device_type="cpu", tp=2)
    model = parallelize(Model(), mesh, Plan(activations={"blocks.[01]": "tp:1 ->"}, batch=None))
    x = DTensor.from_local(torch.ones(1, 4), mesh)
    kept: list[Any] = [x, [x]]
    named, record = {"bias": x}, Record(x)
    with pytest.raises(ValueError, match="after it was written"):
        model.blocks[0](x, kept, named=named, record=record)
    assert (len(kept), len(kept[1]), list(named)) == (3, 2, ["bias", "sum"])
    assert kept[0] is x
    assert (record.hidden is x, len(record.losses)) == (True, 1)
