"""A Hugging Face model that is static trains as it does in eager mode, with caches and without."""

from typing import Any

import pytest
import torch
from stage_models import needs_transformers
from torch import nn
from vescale_comm import simulate
from vescale_parallel import Plan, captured_units, mesh, parallelize

pytestmark = [pytest.mark.models, needs_transformers]
STEPS = 4


def llama(cache: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=cache))


def losses(model: nn.Module) -> list[Any]:
    """Losses of some steps, and the parameters after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for seed in range(STEPS):
        torch.manual_seed(seed)
        tokens = torch.randint(53, (4, 6))
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        found.append(loss.detach().to_local())
    return [*found, *(p.detach().to_local() for p in model.parameters())]


def trains(rank: int, world_size: int, zero: int, cache: bool) -> None:
    over = mesh(device_type="cpu", dp=2, tp=1)
    found = []
    for static in (False, True):
        model = llama(cache)
        plan = Plan.from_hf(model.config).with_(zero=zero)
        parallelize(model, over, plan, static=static)
        found.append(losses(model))
    assert all(map(torch.equal, *found))
    units = captured_units(model)
    # The whole model, or each of its layers; not layers that fill a cache, which is an argument.
    captured = [one for one in units if one.replays >= STEPS - 2]
    expected = (0 if cache else 2) if zero else 1
    assert len(captured) == expected, "\n".join(map(str, units))
    assert all(one.refusal for one in units if zero and (cache or not one.name))


@pytest.mark.parametrize(("zero", "cache"), [(0, True), (3, False), (3, True)])
def test_llama_trains_as_without_it(zero: int, cache: bool):
    llama(cache)  # imported before there are threads
    simulate(2)(trains, zero, cache)
