"""A merged projection whose blocks are sharded one by one is one device's, and sends nothing."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import vescale_parallel as vp
from torch import Tensor, nn
from vescale_comm import simulate, trace
from zero_models import whole


class Attention(nn.Module):
    """q, k and v of one product, heads of two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(x.shape[-1], dim=-1)
        heads = [one.view(*x.shape[:2], -1, 2).transpose(1, 2) for one in (q, k, v)]
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        return self.proj(mixed.transpose(1, 2).reshape(x.shape))


def model_of(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ModuleList([Attention(width)])[0])


def plan_of(width: int, **words: Any) -> vp.Plan:
    rules = {"1.qkv.*": "tp:0/3", "1.proj.weight": "tp:1", "*": "replicate"}
    return vp.Plan(parameters=rules, **words)


@pytest.mark.parametrize(
    ("sizes", "width", "zero", "is_deferred"),
    [({"tp": 2}, 8, 0, False), ({"tp": 4}, 12, 0, True), ({"dp": 2, "tp": 2}, 8, 3, True)],
    ids=str,
)
def test_merged_projections(
    sizes: dict[str, int], width: int, zero: int, is_deferred: bool, tmp_path: Path
):
    x = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1))
    plain = model_of(width)
    loss = plain(x).square().mean()
    loss.backward()

    def rank(rank: int, size: int) -> None:
        if is_deferred:
            with vp.deferred():
                model = model_of(width)
        else:
            model = model_of(width)
        vp.parallelize(model, vp.mesh(device_type="cpu", **sizes), plan_of(width, zero=zero))
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(one.detach()), two.detach())
        for _ in range(3):
            model.zero_grad()
            with trace() as seen:
                found = model(x).square().mean()
                found.backward()
        if width == 8 and not zero:
            assert {one.op for one in seen.records} == {"all_reduce"}
        torch.testing.assert_close(whole(found.detach()), loss.detach())
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(one.grad), two.grad)
        vp.save_pretrained(model, tmp_path)
        with torch.no_grad():
            for one in model.parameters():
                one.zero_()
        vp.load_pretrained(model, tmp_path)
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(one.detach()), two.detach())

    simulate(prod(sizes.values()))(rank)


def test_blocks_that_are_not_equal_are_refused_and_presets_find_them():
    with pytest.raises(
        vp.PlanError, match=r"shards a dim of 5 equal blocks \('tp:0/5'\), which 24"
    ):
        vp.Plan(parameters={"1.qkv.weight": "tp:0/5", "*": "replicate"}).check(
            model_of(8), {"tp": 2}
        )
    model = nn.Module()
    model.blocks = nn.ModuleList([Attention(8), Attention(8)])
    rows = vp.Plan.for_encoder(model).check(model, {"tp": 2}).parameters
    assert [str(row.layout) for row in rows[:3]] == ["tp:0/3", "tp:0/3", "tp:1"]
    row = plan_of(8).check(model_of(8), {"tp": 3}).parameters[2]
    assert (row.name, row.local_shape, row.uneven) == ("1.qkv.weight", (9, 8), True)
