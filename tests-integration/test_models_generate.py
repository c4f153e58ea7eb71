"""`generate()` of unmodified models, with its cache of keys, gives the tokens of one device."""

from __future__ import annotations

import copy
import importlib.util
import logging
import warnings

import pytest
import torch
import vescale_dtensor as vd
from model_zoo_more import EVERY, automatic
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Replicate, Shard
from vescale_parallel import Plan, parallelize

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@torch.no_grad()
def generates(rank: int, world_size: int, name: str) -> None:
    logging.disable(logging.WARNING)
    model = EVERY[name]
    torch.manual_seed(0)
    dense = model.make().eval()
    mesh = device_mesh((2, 2), ("dp", "tp"))
    plan = Plan(batch="dp:0", parameters=model.plan or automatic(dense))
    ours = parallelize(copy.deepcopy(dense), mesh, plan)
    begin = model.inputs(5)["input_ids"][:, :4]
    cut = vd.distribute_tensor(begin, mesh, [Shard(0), Replicate()], src_data_rank=None)
    with warnings.catch_warnings(action="ignore"):
        wanted, found = (
            each.generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0)  # type: ignore[operator]
            for each, ids in ((dense, begin), (ours, cut))
        )
    assert torch.equal(found.full_tensor(), wanted)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5"])
def test_tokens_are_those_of_one_device(name: str) -> None:
    run(generates, 4, name, timeout=200)
