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
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Replicate, Shard
from vescale_parallel import Plan, parallelize
from vescale_parallel import mesh as make_mesh

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


def generated(model: Any, ids: torch.Tensor, how: str) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        found = model.generate(input_ids=ids, max_new_tokens=5, pad_token_id=0, **HOW[how])
    whole: torch.Tensor = found.full_tensor() if isinstance(found, vd.DTensor) else found
    return whole


@pytest.mark.parametrize("static", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "how", "sizes"),
    [
        ("GPT-2", "greedy", {"dp": 4}),
        ("Llama", "drawn", {"dp": 2, "tp": 2}),
        pytest.param("GPT-2", "beams", {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("GPT-2", "drawn", {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("Llama", "greedy", {"dp": 4}, marks=pytest.mark.slow),
        pytest.param("Llama", "drawn beams", {"dp": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_where_parameters_are_sharded(
    name: str, how: str, sizes: dict[str, int], static: bool
) -> None:
    """Between steps of training, by `zero=3` and what the model declares; plain tokens go in."""
    logging.disable(logging.WARNING)
    model = EVERY[name]
    torch.manual_seed(0)
    dense = model.make().eval()
    begin = model.inputs(5)["input_ids"][:, :4]
    wanted = generated(dense, begin, how)

    def program(rank: int, world_size: int) -> None:
        over = make_mesh(device_type="cpu", **sizes)
        ours = parallelize(copy.deepcopy(dense), over, Plan.from_hf(dense, zero=3), static=static)
        for _ in range(2):
            ours.train()
            ours(**model.inputs(5)).loss.backward()
            ours.zero_grad()
            ours.eval()
            assert torch.equal(generated(ours, begin, how), wanted)

    simulate(4).run(program)
