"""Losses of routers that hooks collect, with stages: of all layers, one device's numbers."""

from functools import partial
from typing import Any

import pytest
import torch
from stage_models import needs_transformers
from stage_runs import accumulate, require_gradients
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_parallel import Plan, forward_backward, mesh, parallelize

pytestmark = [pytest.mark.models, needs_transformers]

PARTS = 2
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    # Large, so that a part that is missing shows.
    "router_aux_loss_coef": 1.0,
}


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **SIZES))


def qwen() -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    # The second and the fourth layer have experts.
    more = {"num_experts": 4, "decoder_sparse_step": 2, "moe_intermediate_size": 16}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(shared_expert_intermediate_size=16, **more, **SIZES))


def dense_end() -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    more = {"num_experts": 4, "mlp_only_layers": [2, 3], "moe_intermediate_size": 16}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(shared_expert_intermediate_size=16, **more, **SIZES))


KINDS = {"mixtral": mixtral, "qwen": qwen, "no experts at the end": dense_end}
CASES: dict[str, tuple[str, dict[str, int], str, dict[str, Any]]] = {
    "mixtral pp2": ("mixtral", {"pp": 2}, "1f1b", {}),
    "mixtral pp4": ("mixtral", {"pp": 4}, "zb-h1", {}),
    "mixtral pp2 in a V": ("mixtral", {"pp": 2}, "zbv", {}),
    "mixtral pp2 dp2": ("mixtral", {"pp": 2, "dp": 2}, "1f1b", {"batch": "dp:0"}),
    "mixtral pp2 ep2": ("mixtral", {"pp": 2, "ep": 2}, "1f1b", {"batch": "ep:0", "experts": "ep"}),
    "mixtral pp2 zero3": ("mixtral", {"pp": 2, "dp": 2}, "1f1b", {"batch": "dp:0", "zero": 3}),
    "qwen pp2": ("qwen", {"pp": 2}, "interleaved", {}),
    "qwen pp2 ep2": ("qwen", {"pp": 2, "ep": 2}, "1f1b", {"batch": "ep:0", "experts": "ep"}),
    "no experts at the end": ("no experts at the end", {"pp": 2}, "1f1b", {}),
}


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind]().train()


def inputs(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def without_cache(model: nn.Module) -> Any:
    return partial(model, use_cache=False)


@pytest.mark.parametrize("name", CASES)
def test_router_losses_are_those_of_all_layers(name: str):
    kind, sizes, schedule, words = CASES[name]

    def on_a_rank(rank: int, world_size: int) -> None:
        plain, model = make(kind), make(kind)
        plan = Plan.from_hf(model, pipeline=schedule, microbatches=PARTS)
        parallelize(model, mesh(device_type="cpu", **sizes), plan.with_(**words))
        for step in range(3):
            expected = accumulate(without_cache(plain), PARTS, **inputs(step))
            found = forward_backward(model, **inputs(step), use_cache=False)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        require_gradients(model, plain, rtol=1e-4, atol=1e-6)

    simulate(torch.Size(sizes.values()).numel())(on_a_rank)


def test_an_evaluation_returns_what_was_collected():
    asked = ("router_logits", "hidden_states", "attentions")

    def on_a_rank(rank: int, world_size: int) -> None:
        plain, model = make("mixtral").eval(), make("mixtral").eval()
        plan = Plan.from_hf(model, pipeline="1f1b", microbatches=PARTS)
        parallelize(model, mesh(device_type="cpu", pp=2), plan)
        given: dict[str, Any] = {**inputs(0), "use_cache": False}
        given |= {f"output_{name}": True for name in asked}
        for one in (plain, model):
            one.set_attn_implementation("eager")
        with torch.no_grad():
            for _ in range(2):
                expected, found = plain(**given), model(**given)
                torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
                for name in asked:
                    torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5)

    simulate(2)(on_a_rank)


@on_ranks(2, simulated=True)
def test_a_configuration_that_changes_is_seen():
    plain, model = make("mixtral"), make("mixtral")
    plan = Plan.from_hf(model, pipeline="1f1b", microbatches=PARTS)
    parallelize(model, mesh(device_type="cpu", pp=2), plan)
    for asked in (False, True, False, True):
        for one in (plain, model):
            one.config.output_router_logits = asked
        expected = accumulate(without_cache(plain), PARTS, **inputs(0))
        found = forward_backward(model, **inputs(0), use_cache=False)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
