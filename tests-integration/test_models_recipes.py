"""Scripts train a model on a mesh as on one device, whatever they do around forward and backward.

Optimizers, accumulation, checkpointing, averages, parametrizations, adapters: every parameter after
three steps is that of one device. What is done is in `model_recipes`.
"""

from __future__ import annotations

import importlib.util

import pytest
from model_recipes import RECIPES, compare
from vescale_comm.testing import run

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]
# Rounding of float32 over three steps, as a share of the largest element of a parameter.
LIMIT = 2e-5
# Muon makes steps orthogonal in bf16, by five iterations that amplify what they round.
LIMITS = {"Muon": 2e-2}
# The rest say the same of other optimizers.
A_FEW = ["SGD", "Muon", "LBFGS", "checkpointing", "accumulation", "parametrizations", "low rank"]


def judged(recipe: str) -> None:
    found: dict[str, float] = run(compare, 4, recipe, "dp=2, tp=2", timeout=280)[0]
    worst = max(found, key=found.__getitem__)
    assert found[worst] < LIMITS.get(recipe, LIMIT), (worst, found[worst])


@pytest.mark.parametrize("recipe", [name for name in A_FEW if name in RECIPES])
def test_common_ways_to_train(recipe: str) -> None:
    judged(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in A_FEW])
def test_every_way_to_train(recipe: str) -> None:
    judged(recipe)
