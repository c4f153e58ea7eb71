"""Sequences sharded over `cp` train unmodified Hugging Face models as one device does.

A batch of `"cp:1"` is all that is asked for: position ids, rotary tables, masks, shifted labels and
dropout follow from global shapes. Losses are compared over steps, and the generator behind them.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from typing import Any

import pytest
import torch
from context_runs import MESHES, MODELS, llama, train
from vescale_comm import simulate, trace
from vescale_parallel import Plan, mesh, parallelize

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]
STEPS = 5


# What a run takes; `-m slow` takes the rest.
CORE = {
    ("llama", "cp4"),
    ("llama", "cp2-zero3-ring"),
    ("gpt2", "cp2-tp2"),
    ("gpt2", "cp4-ring-balanced"),
    ("mistral", "cp2-dp2"),
    ("mistral", "cp4-ring"),
    ("packed", "cp2-tp2-ring"),
    ("packed", "cp2-dp2"),
    ("padded", "cp2-zero3"),
    ("padded", "cp2-dp2-ring"),
}
CASES = [
    pytest.param(kind, where, marks=[] if (kind, where) in CORE else [pytest.mark.slow])
    for kind in MODELS
    for where in MESHES
]


@pytest.mark.parametrize(("kind", "where"), CASES)
def test_losses_are_those_of_one_device(kind: str, where: str) -> None:
    wanted = train(kind, None, STEPS)
    world = math.prod(MESHES[where][0].values())
    for found in simulate(world).run(lambda rank, world_size: train(kind, where, STEPS)):
        assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
        assert found.made == wanted.made
        assert found.drawn == wanted.drawn


def step_of(heads: int, axes: dict[str, int], way: Any = "auto") -> tuple[int, Counter[str]]:
    """Bytes that a forward keeps for its backward on this rank, and what a step sends."""
    torch.manual_seed(0)
    model = llama(heads, heads).eval()
    if axes:
        plan = Plan(batch="cp:1", parameters={"*": "replicate"}, sequence=way)
        parallelize(model, mesh(**axes, device_type="cpu"), plan)
    tokens = torch.randint(32, (1, 256))
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with trace() as sent, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return sum(kept.values()), Counter(record.op for record in sent.records)


# Four ranks divide four heads, which are exchanged for rows: the labels, which are shifted, are
# gathered. Of three heads, keys and values of each layer come in three turns, and once more in
# backward, from where gradients go back. Gathered, a rank keeps them, and what its rows see.
@pytest.mark.parametrize(
    ("heads", "way", "most", "wanted"),
    [
        (4, "auto", 0.35, {"all_to_all": 16, "all_gather": 1}),
        (3, "auto", 0.35, {"permute": 18, "all_gather": 1}),
        (4, "ring", 0.35, {"permute": 18, "all_gather": 1}),
        (3, "gather", 0.6, {"all_gather": 5, "reduce_scatter": 4}),
    ],
)
def test_what_a_rank_keeps_falls_with_the_number_of_ranks(
    heads: int, way: str, most: float, wanted: dict[str, int]
) -> None:
    alone, _ = step_of(heads, {})
    for kept, sent in simulate(4).run(lambda rank, world_size: step_of(heads, {"cp": 4}, way)):
        assert kept < most * alone
        sent.pop("all_reduce")  # of gradients, and of the loss
        assert dict(sent) == wanted
