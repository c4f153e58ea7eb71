"""`static=True` with stages: unmodified models of Hugging Face, and layers of experts."""

from typing import Any

import pytest
import torch
from expert_models import ROWS, TOKENS, WIDTH
from stage_models import gpt2, llama, needs_transformers
from static_stage_runs import are_plain, replays, require_same_bits, trained
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_parallel import MoE, Pipeline, Plan


class Experts(nn.Module):
    """Blocks with layers of experts and without."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(
            MoE(WIDTH, 24, 6, 2) if at % 2 else nn.Linear(WIDTH, WIDTH) for at in range(4)
        )
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def experts() -> nn.Module:
    torch.manual_seed(0)
    return Experts()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens_of(step: int) -> Any:
    tokens = torch.randint(32, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))
    return (tokens,), {"loss": (loss_of, tokens.roll(1, 1))}


@on_ranks(4, simulated=True)
def test_layers_of_experts_run_eagerly_and_say_why():
    stages = Pipeline("zb-h1", stages="blocks.*")
    how = Plan(batch="ep:0", experts="ep", pipeline=stages, microbatches=2)
    units = require_same_bits(experts, {"pp": 2, "ep": 2}, how, trained(tokens_of))
    layers = [one for one in units if int(one.name[-1]) % 2]
    assert all(one.programs == 0 and one.refusal is not None for one in layers), units
    # The others are replayed beside them.
    assert set(replays(units)) == {one.name for one in units} - {one.name for one in layers}
    assert all(replays(units).values())


def inputs(step: int) -> Any:
    tokens = torch.randint(32, (7, 6), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    # A cache is filled by the blocks, so with one they run eagerly.
    told = {"attention_mask": mask, "labels": tokens, "use_cache": False}
    return (), {"input_ids": tokens, **told}


def steps_and_text(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    every: list[Any] = list(trained(inputs)(model, optimizer))
    model.eval()
    with torch.no_grad():
        kwargs = inputs(9)[1]
        every.append(model(**{**kwargs, "labels": None}).logits)
        every.append(
            model.generate(  # type: ignore[operator]
                kwargs["input_ids"][:1], max_new_tokens=2, do_sample=True, use_cache=False
            )
        )
    return every


MODELS = [
    (gpt2, {"pp": 2}, {"pipeline": "zbv"}),
    (llama, {"pp": 2}, {"pipeline": "interleaved"}),
    (gpt2, {"pp": 2, "tp": 2}, {"pipeline": "1f1b"}),
    (llama, {"pp": 2, "dp": 2}, {"pipeline": "1f1b", "zero": 3}),
]


@pytest.mark.models
@needs_transformers
@pytest.mark.parametrize(
    ("make", "sizes", "words"),
    MODELS,
    ids=["gpt2 pp2", "llama pp2", "gpt2 pp2 tp2", "llama pp2 zero3"],
)
def test_hugging_face_models(make: Any, sizes: dict[str, int], words: dict[str, Any]):
    def on_a_rank(rank: int, world_size: int) -> None:
        how = Plan.from_hf(make(), microbatches=4, **words)
        units = require_same_bits(make, sizes, how, steps_and_text)
        if set(sizes) == {"pp"}:
            assert are_plain(units)
            return
        found = replays(units)
        assert len(found) == 2, units
        # Batches with padding and without are recorded as they come; the smaller one is a third
        # kind, of which so few calls are not worth it.
        assert all(count >= 5 for count in found.values()), units

    simulate(torch.Size(sizes.values()).numel())(on_a_rank)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        num_hidden_layers=4,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=32,
    )
    return MixtralForCausalLM(config).train()


def with_routers(step: int) -> Any:
    args, kwargs = inputs(step)
    return args, {**kwargs, "output_router_logits": True}


@pytest.mark.models
@needs_transformers
@on_ranks(4, simulated=True)
def test_losses_of_routers_are_those_of_all_stages():
    how = Plan.from_hf(mixtral(), pipeline="1f1b", microbatches=4)
    units = require_same_bits(mixtral, {"pp": 2, "dp": 2}, how, trained(with_routers))
    assert all("hooks" in (one.refusal or "") for one in units), units
