"""Unmodified models, small, and what a user says about them: layouts of parameters.

A model is made from its configuration with random weights: nothing is downloaded. Heads, hidden
sizes and vocabularies are odd wherever the architecture permits it, so that four ranks never get
equal shards; dropout is on wherever the architecture has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS = 53, 7

COLUMNS = "q,k,v,gate,up"
LLAMA = {
    f"*.{{{COLUMNS}}}_proj.weight": "tp:0",
    "*.{o,down}_proj.weight": "tp:1",
    "lm_head.weight": "tp:0",
    "*": "replicate",
}


@dataclass(frozen=True)
class Model:
    """A model and how it is laid out over `tp`.

    Attributes:
        make: builds it; the seed is set before.
        plan: parameter name → layout, as `vescale_parallel.Plan` reads it.
        inputs: what a step passes by name, for a batch of this many rows.
        blocks: glob of the modules in which nothing may fall back; empty: none is named.
        outputs: further outputs that are compared.
    """

    make: Callable[[], nn.Module]
    plan: dict[str, str]
    inputs: Callable[[int], dict[str, Tensor]]
    blocks: str = ""
    outputs: tuple[str, ...] = field(default=("logits",))


def drawn(rows: int, *shape: int, high: int = 0) -> Tensor:
    """The same numbers in every process: whole ones below `high`, or normal ones."""
    generator = torch.Generator().manual_seed(rows)
    if high:
        return torch.randint(high, (rows, *shape), generator=generator)
    return torch.randn(rows, *shape, generator=generator)


def tokens(rows: int) -> dict[str, Tensor]:
    """Token ids, which are their own labels."""
    ids = drawn(rows, TOKENS, high=VOCABULARY)
    return {"input_ids": ids, "labels": ids}


def padded(rows: int) -> dict[str, Tensor]:
    """Token ids with padding, which is neither looked at nor counted."""
    ids = drawn(rows, TOKENS, high=VOCABULARY)
    lengths = drawn(rows, high=TOKENS) + 1
    mask = torch.arange(TOKENS) < lengths.unsqueeze(1)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


def images(rows: int) -> dict[str, Tensor]:
    """Pictures and their classes."""
    return {"pixel_values": drawn(rows, 3, 16, 16), "labels": drawn(rows, high=5)}


def hf(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """Builds a Hugging Face model from its configuration class and options."""

    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return made

    return make


DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, Model] = {
    "Llama": Model(
        hf(
            "LlamaForCausalLM",
            "LlamaConfig",
            **DECODER,
            num_attention_heads=6,
            num_key_value_heads=3,
        ),
        LLAMA,
        tokens,
        "model.layers.*",
    ),
    "Qwen3": Model(
        hf(
            "Qwen3ForCausalLM",
            "Qwen3Config",
            **DECODER,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=8,
        ),
        LLAMA,
        padded,
        "model.layers.*",
    ),
    "GPT-2": Model(
        hf(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_positions=16,
            n_embd=36,
            n_layer=2,
            n_head=6,
            n_inner=22,
        ),
        {
            "*.c_attn.weight": "tp:1",
            "*.c_attn.bias": "tp:0",
            "*.c_fc.weight": "tp:1",
            "*.c_fc.bias": "tp:0",
            "*.c_proj.weight": "tp:0",
            "{*.wte,lm_head}.weight": "tp:0",
            "*": "replicate",
        },
        tokens,
        "transformer.h.*",
    ),
    "BERT": Model(
        hf(
            "BertForMaskedLM",
            "BertConfig",
            vocab_size=VOCABULARY,
            hidden_size=36,
            num_hidden_layers=2,
            num_attention_heads=6,
            intermediate_size=22,
            max_position_embeddings=16,
        ),
        {
            "*.{query,key,value}.*": "tp:0",
            "*.intermediate.dense.*": "tp:0",
            "*.output.dense.weight": "tp:1",
            "{*.word_embeddings,cls.predictions.decoder}.weight": "tp:0",
            "cls.predictions.{bias,decoder.bias}": "tp:0",
            "*": "replicate",
        },
        padded,
        "bert.encoder.layer.*",
    ),
    "ViT": Model(
        hf(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=36,
            num_hidden_layers=2,
            num_attention_heads=6,
            intermediate_size=22,
            image_size=16,
            patch_size=4,
            num_labels=5,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        ),
        {
            "*.{q,k,v}_proj.*": "tp:0",
            "*.mlp.fc1.*": "tp:0",
            "*.{o_proj,fc2}.weight": "tp:1",
            "classifier.*": "tp:0",
            "*": "replicate",
        },
        images,
        "vit.layers.*",
    ),
}
