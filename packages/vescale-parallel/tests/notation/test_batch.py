"""Parts of a batch are rows of it, never tokens: in microbatches, stages and logical shards."""

from typing import Any

import pytest
import torch
from torch import nn
from vescale_comm import simulate
from vescale_parallel import Pipeline, Plan, PlanError, forward_backward, mesh, parallelize
from vescale_parallel._notation.batch import dim_of_rows
from vescale_parallel._notation.layout import parse_layout

ROW_DIMS = [
    (None, "dp", 0),
    ("dp:0", "dp", 0),
    ("cp:1", "dp", 0),
    ("cp:1", "cp", 0),
    ("cp:1/4, dp:0", "dp", 0),
    ("sp:1, ep:0", "dp", 0),
    ("dp:1", "dp", 1),
    ("data:1, cp:0", "data", 1),
    ("dp:full, cp:1", "dp", 0),
]


@pytest.mark.parametrize(("batch", "over", "dim"), ROW_DIMS)
def test_which_dim_has_the_rows(batch: str | None, over: str, dim: int):
    assert dim_of_rows(None if batch is None else parse_layout(batch), over) == dim


MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
PARTS: list[dict[str, Any]] = [
    {"microbatches": 2},
    {"pipeline": Pipeline(stages="?"), "microbatches": 2},
    {"deterministic": "dp-invariant"},
]


@pytest.mark.parametrize("words", PARTS, ids=str)
def test_a_batch_that_does_not_tell_is_refused(words: dict[str, Any]):
    with pytest.raises(PlanError, match=r"sp:1.*does not tell.*'dp:0, sp:1'"):
        Plan(batch="sp:1", **words).check(MODEL, {"pp": 2, "sp": 2})


def test_logical_shards_are_none_of_tokens():
    with pytest.raises(PlanError, match="no rows to cut"):
        Plan(batch="cp:1", deterministic="dp-invariant").check(MODEL, {"cp": 2})


class Tokens(nn.Module):
    """Its loss is no mean over parts of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.cumsum(1)).square().mean()


def test_microbatches_of_sharded_sequences():
    def found(sharded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = Tokens(), torch.randn(4, 6, 3)
        if not sharded:
            losses = [model(one) / 2 for one in x.chunk(2)]
            for one in losses:
                one.backward()
            return [sum(losses), model.inner.weight.grad]
        plan = Plan(batch="cp:1", microbatches=2)
        parallelize(model, mesh(cp=2, device_type="cpu"), plan)
        return [forward_backward(model, x), model.inner.weight.grad.full_tensor()]

    wanted = found(False)
    for each in simulate(2).run(lambda rank, world_size: found(True)):
        torch.testing.assert_close(each, [one.detach() for one in wanted])
