"""Hugging Face models as they come train bit for bit alike with `static=True`, and are captured.

Caches that configurations ask for, masks, rotary tables, tuples, output classes, position biases
that blocks hand on, adapters beside frozen layers, and checkpointing by the library's own flag.
"""

from typing import Any

import pytest
import torch
from stage_models import needs_transformers
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_parallel import Plan, captured_units, mesh, parallelize
from zero_models import adamw, gradients, same

pytestmark = [pytest.mark.models, needs_transformers]
STEPS, VOCABULARY = 4, 32
WIDTH = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16}


class Adapter(nn.Module):
    """A frozen layer and a product of two narrow ones, as of LoRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})
        self.scaling, self.active = {"default": 0.5}, ["default"]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = self.base_layer(x, *args, **kwargs)
        for name in self.active:
            if name in self.lora_A:
                result = result + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return result


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**WIDTH, **LAYERS, num_key_value_heads=2))


def checkpointed() -> Any:
    model = llama()
    name = "activation_checkpointing_enable"
    # As it is called since transformers 5.23.
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
    return model


def adapted() -> Any:
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
    return model


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**WIDTH, **LAYERS))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    words = {"decoder_start_token_id": 0, "pad_token_id": 0, "vocab_size": VOCABULARY}
    return T5ForConditionalGeneration(T5Config(**sizes, **words))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes))


# How many blocks are replayed: none that checkpoints what is in its forward.
MODELS = {llama: 2, checkpointed: 0, adapted: 2, bert: 2, t5: 4, gpt2: 2}


def steps(model: nn.Module) -> list[Any]:
    optimizer = adamw([one for one in model.parameters() if one.requires_grad])
    found: list[Any] = []
    for seed in range(STEPS):
        tokens = torch.randint(3, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(tokens)
        mask[:, 5:] = 0
        torch.manual_seed(seed)
        optimizer.zero_grad()
        out = model(input_ids=tokens, attention_mask=mask, labels=tokens)
        out.loss.backward()
        found += [out.loss.detach(), out.logits.detach(), *gradients(model).values()]
        optimizer.step()
    return [*found, *(one.detach() for one in model.parameters()), torch.get_rng_state()]


def trained(rank: int, world_size: int, name: str) -> list[str]:
    (make,) = [one for one in MODELS if one.__name__ == name]
    over, plan = mesh(device_type="cpu", dp=2), Plan(parameters={"*": "replicate"}, zero=3)
    found = []
    for static in (False, True):
        torch.manual_seed(0)
        model = parallelize(make(), over, plan, static=static)
        found.append(steps(model))
    same(*found)
    return [one.name for one in captured_units(model) if one.replays >= STEPS - 2]


@pytest.mark.parametrize("make", MODELS, ids=lambda one: one.__name__)
@pytest.mark.filterwarnings("ignore:static=True. .* makes no cache")
def test_blocks_are_replayed(make: Any):
    make()  # imported before there are threads
    for replayed in simulate(2)(trained, make.__name__):
        assert len(replayed) == MODELS[make], replayed
