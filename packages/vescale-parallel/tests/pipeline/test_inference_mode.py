"""Evaluation under `torch.inference_mode`, first or between steps, in stages as elsewhere.

It has the values of `torch.no_grad`, and steps behind it are what they are without it.
"""

from typing import Any

import pytest
import torch
from stage_runs import batch, make, whole
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_parallel import Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import PARAMETERS

LAYOUTS = [{"pp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}, {"dp": 2}]
WORDS: list[dict[str, Any]] = [
    {},
    {"zero": 1},
    {"zero": 3},
    {"zero": 3, "precision": {"compute": "bfloat16", "reduce": "float32"}},
    {"precision": {"compute": "bfloat16"}},
    {"checkpoint": "full"},
]


def trained(sizes: dict[str, int], words: dict[str, Any], *, first: bool, inference: bool) -> Any:
    """Losses of evaluations between three steps, and the parameters at the end."""
    stages: dict[str, Any] = {"pipeline": "1f1b", "microbatches": 2} if "pp" in sizes else {}
    model: nn.Module = make(True)
    plan = Plan(parameters=PARAMETERS, **stages, **words)
    parallelize(model, make_mesh(device_type="cpu", **sizes), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(2)
    found: list[Tensor] = []
    for step in range(3):
        if step or first:
            with torch.inference_mode() if inference else torch.no_grad():
                for call in (forward_backward, lambda model, *given: model(*given)):
                    found.append(whole(call(model.eval(), *batch(step, 5))).clone())
        forward_backward(model.train(), *batch(step))
        optimizer.step()
        optimizer.zero_grad()
    return found, [whole(one).detach() for one in model.parameters()]


def require_same(sizes: dict[str, int], words: dict[str, Any]) -> None:
    def on_a_rank(rank: int, world_size: int) -> None:
        for first in (True, False):
            one, other = (trained(sizes, words, first=first, inference=i) for i in (True, False))
            # In inference mode torch takes other products of three dims, which round otherwise.
            torch.testing.assert_close(one[0], other[0])
            for mine, theirs in zip(one[1], other[1], strict=True):
                assert torch.equal(mine, theirs)

    simulate(torch.Size(sizes.values()).numel())(on_a_rank)


@pytest.mark.slow
@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_every_layout(sizes: dict[str, int], words: dict[str, Any]):
    require_same(sizes, words)


def test_stages_of_gathered_parameters():
    require_same({"pp": 2, "dp": 2}, {"zero": 3})
