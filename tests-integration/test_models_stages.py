"""Unmodified Hugging Face models run in two stages as on one device that accumulates.

By the blocks that they declare, or by the lists of an encoder and a decoder; what lies around the
blocks is placed by a call with the model's own `dummy_inputs`, or with the batch.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from model_zoo_wide import ALL
from plan_runs import NAMES
from torch import Tensor
from vescale_comm import simulate
from vescale_parallel import Pipeline, Plan, forward_backward, mesh, parallelize

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]
# One block that is called again and again, a single block, and two towers side by side, whose
# results meet in the loss.
NOT_ONE_LIST = {"ALBERT", "Mamba", "CLIP"}
# Beside those of MODELS.md: they register a head first, or a table behind the blocks.
MORE = ("Camembert", "XLMRoberta", "MPNet", "MBart", "PLBart", "Marian")
BLOCKS = dict.fromkeys(
    ("BART", "Pegasus", "Whisper", "MBart", "PLBart", "Marian"), "model.{encoder,decoder}.layers.*"
) | {"T5": "{encoder,decoder}.block.*"}
# Their `dummy_inputs` do not do: another dtype of ids, or pictures.
BY_BATCH = {"DeBERTa", "Pegasus", "Whisper"}
CORE = ("OPT", "BART", "DeBERTa")


def pieces(given: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {k: one[rows] if isinstance(one, Tensor) else one for k, one in given.items()}


def run_in_stages(name: str) -> None:
    given = ALL[name].inputs(5)
    torch.manual_seed(0)
    plain: Any = ALL[name].make().train()
    torch.manual_seed(7)
    expected = 0.0
    for rows, share in ((slice(3), 3 / 5), (slice(3, 5), 2 / 5)):
        loss = plain(**pieces(given, rows)).loss * share
        loss.backward()
        expected += loss.item()
    stages = Pipeline(stages=BLOCKS.get(name))

    def on_a_rank(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        model = ALL[name].make().train()
        plan = Plan.from_hf(model, pipeline=stages, microbatches=2)
        inputs = given if name in BY_BATCH else None
        parallelize(model, mesh(pp=2, device_type="cpu"), plan, inputs=inputs)
        torch.manual_seed(7)
        assert forward_backward(model, **given).item() == pytest.approx(expected, rel=1e-5)
        for (path, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), path
            if other.grad is not None:
                found: Any = one.grad
                torch.testing.assert_close(found.full_tensor(), other.grad, rtol=1e-4, atol=1e-6)

    simulate(2)(on_a_rank)


@pytest.mark.parametrize("name", CORE)
def test_models_that_register_in_another_order_than_they_call(name: str) -> None:
    run_in_stages(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in (*NAMES, *MORE) if n not in NOT_ONE_LIST])
def test_all_models(name: str) -> None:
    run_in_stages(name)
