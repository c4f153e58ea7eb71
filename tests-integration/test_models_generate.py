"""`generate()` of unmodified models, with its cache of keys, gives the tokens of one device."""

from __future__ import annotations

import copy
import importlib.util
import logging
import warnings
from typing import Any

import pytest
import torch
import vescale_dtensor as vd
from model_zoo_more import EVERY, automatic
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Replicate, Shard
from vescale_parallel import Plan, parallelize

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]


HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "several of more beams": {
        "do_sample": False, "num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.7,
        "early_stopping": True, "no_repeat_ngram_size": 2,
    },
    "drawn beams": {"do_sample": True, "num_beams": 2, "top_k": 10},
    "drawn": {"do_sample": True, "top_p": 0.8, "temperature": 0.7},
}  # fmt: skip


@torch.no_grad()
def generates(rank: int, world_size: int, name: str, how: str) -> None:
    logging.disable(logging.WARNING)
    model = EVERY[name]
    torch.manual_seed(0)
    dense = model.make().eval()
    mesh = device_mesh((2, 2), ("dp", "tp"))
    plan = Plan(batch="dp:0", parameters=model.plan or automatic(dense))
    ours = parallelize(copy.deepcopy(dense), mesh, plan)
    begin = model.inputs(5)["input_ids"][:, :4]
    cut = vd.distribute_tensor(begin, mesh, [Shard(0), Replicate()], src_data_rank=None)
    outputs = []
    for each, ids in ((dense, begin), (ours, cut)):
        torch.manual_seed(1)
        with warnings.catch_warnings(action="ignore"):
            outputs.append(
                each.generate(input_ids=ids, max_new_tokens=5, pad_token_id=0, **HOW[how])  # type: ignore[operator]
            )
    wanted, found = outputs
    whole = found.full_tensor() if isinstance(found, vd.DTensor) else found
    assert torch.equal(whole, wanted)


@pytest.mark.parametrize(
    ("name", "how"),
    [("Llama", "greedy"), ("GPT-2", "greedy"), ("T5", "greedy")]
    + [("Llama", how) for how in ("beams", "several of more beams", "drawn beams", "drawn")],
)
def test_tokens_are_those_of_one_device(name: str, how: str) -> None:
    run(generates, 4, name, how, timeout=200)
