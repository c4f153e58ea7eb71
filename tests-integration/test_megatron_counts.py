"""Tensor parallel layers of `Plan.from_hf` communicate as often as Megatron-LM's, and no more.

Counted for blocks with merged projections (GPT-2; Phi-3 and GLM with grouped queries), grouped
queries (Llama), encoders (BERT), cross attention and relative positions (T5), and pictures (ViT),
forward and backward.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from typing import Any

import pytest
import torch
from vescale_comm import simulate, trace
from vescale_parallel import Plan, parallelize
from vescale_parallel import mesh as make_mesh

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]

LAYERS = 2
TOKENS = torch.arange(24).view(2, 12) % 90

# All-reduces of Megatron-LM (arXiv 1909.08053, sections 3 and B): forward, one behind each table,
# each attention and each MLP, three in the loss (greatest, target's and sum of logits); backward,
# one before each of them and before the head. T5's decoder has two attentions, and before the
# second one for the queries and one for keys and values.
LOSS = 3
MEGATRON = {
    "gpt2": (1 + 2 * LAYERS + LOSS, 1 + 2 * LAYERS),
    "llama": (1 + 2 * LAYERS + LOSS, 1 + 2 * LAYERS),
    "phi3": (1 + 2 * LAYERS + LOSS, 1 + 2 * LAYERS),
    "glm": (1 + 2 * LAYERS + LOSS, 1 + 2 * LAYERS),
    "bert": (1 + 2 * LAYERS + LOSS, 1 + 2 * LAYERS),
    "t5": (2 + 5 * LAYERS + LOSS, 1 + 6 * LAYERS),
    "vit": (2 * LAYERS, 2 * LAYERS),
}


def model_of(name: str) -> tuple[Any, dict[str, Any]]:
    """A tiny model of that kind, and a batch."""
    import transformers as hf

    text = {"input_ids": TOKENS, "labels": TOKENS}
    size: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
    }
    words: dict[str, Any] = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    if name == "gpt2":
        few = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 32}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**few, **words)), text
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**size, **words, num_key_value_heads=2)), text
    few = {**size, **words, "num_key_value_heads": 2, "pad_token_id": 0}
    if name == "phi3":
        return hf.Phi3ForCausalLM(hf.Phi3Config(**few)), text
    if name == "glm":
        return hf.GlmForCausalLM(hf.GlmConfig(**few, head_dim=8)), text
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**size, vocab_size=96)), text
    if name == "t5":
        few = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": LAYERS, "num_heads": 4}
        made = hf.T5Config(**few, vocab_size=96, decoder_start_token_id=0)
        return hf.T5ForConditionalGeneration(made), text
    config = hf.ViTConfig(**size, image_size=32, patch_size=8)
    pictures = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    return hf.ViTForImageClassification(config), pictures


def counted(name: str) -> tuple[Counter[str], Counter[str]]:
    """Collectives of a forward and of a backward, once nothing is compared any more."""

    def rank(rank: int, size: int) -> tuple[Counter[str], Counter[str]]:
        model, batch = model_of(name)
        plain, _ = model_of(name)
        plan = Plan.from_hf(model, batch=None)
        parallelize(model.eval(), make_mesh(device_type="cpu", tp=2), plan)
        for _ in range(3):
            with trace() as forward:
                loss = model(**batch).loss
            with trace() as backward:
                loss.backward()
        expected = plain.eval()(**batch).loss
        torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-5, atol=1e-6)
        return Counter(r.op for r in forward.records), Counter(r.op for r in backward.records)

    return simulate(2).run(rank)[0]


@pytest.mark.parametrize("name", MEGATRON)
def test_no_collective_more_than_megatron(name: str):
    forward, backward = counted(name)
    most = MEGATRON[name]
    assert set(forward) | set(backward) == {"all_reduce"}
    assert forward["all_reduce"] <= most[0]
    assert backward["all_reduce"] <= most[1]
