"""Unmodified models of transformers, small, from their configurations: nothing is downloaded.

Dropout is off, as each side of FSDP2 draws its own; all else is as `from_pretrained` leaves it, the
cache of keys and values too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SEED = 0
Inputs = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model and of a global batch; `layers` None: as many as the zoo says."""

    hidden: int = 64
    layers: int | None = None
    vocab: int = 256
    batch: int = 8
    length: int = 32

    @property
    def heads(self) -> int:
        """Heads of attention."""
        return 4 if self.hidden <= 128 else 8

    @property
    def inner(self) -> int:
        """Width inside of the feed-forward layers, a multiple of 16."""
        return self.hidden * 11 // 64 * 16


@dataclass(frozen=True)
class Kind:
    """A model: the names of its classes, options by the sizes, and how many layers it has."""

    model: str
    config: str
    options: Callable[[Sizes], dict[str, Any]]
    layers: int = 4
    inputs: Callable[[Sizes, torch.Generator], Inputs] | None = None


def _decoder(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads // 2,
        "max_position_embeddings": 2 * sizes.length,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _gemma(sizes: Sizes) -> dict[str, Any]:
    return {**_decoder(sizes), "head_dim": sizes.hidden // sizes.heads}


def _gpt2(sizes: Sizes) -> dict[str, Any]:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    width = {"n_embd": sizes.hidden, "n_head": sizes.heads, "n_positions": 2 * sizes.length}
    return {"vocab_size": sizes.vocab, "bos_token_id": 1, "eos_token_id": 2, **width, **dropout}


def _encoder(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "intermediate_size": 4 * sizes.hidden,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _bert(sizes: Sizes) -> dict[str, Any]:
    table = {"vocab_size": sizes.vocab, "max_position_embeddings": 2 * sizes.length}
    return {**_encoder(sizes), **table}


def _vit(sizes: Sizes) -> dict[str, Any]:
    return {**_encoder(sizes), "image_size": 24, "patch_size": 4, "num_labels": 10}


def _t5(sizes: Sizes) -> dict[str, Any]:
    width = {"d_model": sizes.hidden, "d_kv": sizes.hidden // sizes.heads, "d_ff": sizes.inner}
    words = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    rest = {"num_heads": sizes.heads, "dropout_rate": 0.0, "vocab_size": sizes.vocab}
    return {**width, **words, **rest}


def _mixtral(sizes: Sizes) -> dict[str, Any]:
    return {**_decoder(sizes), "num_local_experts": 8, "num_experts_per_tok": 2}


def _qwen_moe(sizes: Sizes) -> dict[str, Any]:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": sizes.hidden}
    return {**_gemma(sizes), **experts}


def _deepseek(sizes: Sizes) -> dict[str, Any]:
    head = sizes.hidden // sizes.heads
    ranks = {"q_lora_rank": sizes.hidden // 2, "kv_lora_rank": sizes.hidden // 2}
    heads = {"qk_rope_head_dim": head // 2, "qk_nope_head_dim": head // 2, "v_head_dim": head}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return {
        **_decoder(sizes),
        **ranks,
        **heads,
        **experts,
        "num_key_value_heads": sizes.heads,
        "moe_intermediate_size": sizes.hidden,
        "first_k_dense_replace": 1,
    }


def _mamba(sizes: Sizes) -> dict[str, Any]:
    words = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {"vocab_size": sizes.vocab, "hidden_size": sizes.hidden, "state_size": 8, **words}


def _drawn(sizes: Sizes, generator: torch.Generator, length: int = 0) -> Tensor:
    shape = (sizes.batch, length or sizes.length)
    return torch.randint(3, sizes.vocab, shape, generator=generator)


def _text(sizes: Sizes, generator: torch.Generator) -> Inputs:
    tokens = _drawn(sizes, generator)
    return {"input_ids": tokens, "labels": tokens}


def _padded(sizes: Sizes, generator: torch.Generator) -> Inputs:
    """Every row with as much padding: each rank then has as many tokens that count."""
    tokens = _drawn(sizes, generator)
    mask = torch.ones_like(tokens)
    mask[:, -sizes.length // 8 :] = 0
    labels = tokens.where(mask.bool(), torch.tensor(-100))
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _pairs(sizes: Sizes, generator: torch.Generator) -> Inputs:
    source = _drawn(sizes, generator)
    return {"input_ids": source, "labels": _drawn(sizes, generator, max(2, sizes.length // 2))}


def _images(sizes: Sizes, generator: torch.Generator) -> Inputs:
    pictures = torch.randn(sizes.batch, 3, 24, 24, generator=generator)
    labels = torch.randint(10, (sizes.batch,), generator=generator)
    return {"pixel_values": pictures, "labels": labels}


ZOO: dict[str, Kind] = {
    "Llama": Kind("LlamaForCausalLM", "LlamaConfig", _decoder),
    "GPT-2": Kind("GPT2LMHeadModel", "GPT2Config", _gpt2),
    "BERT": Kind("BertForMaskedLM", "BertConfig", _bert, inputs=_padded),
    "ViT": Kind("ViTForImageClassification", "ViTConfig", _vit, inputs=_images),
    "T5": Kind("T5ForConditionalGeneration", "T5Config", _t5, 2, _pairs),
    "Qwen3-MoE": Kind("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _qwen_moe, 2),
    "Mixtral": Kind("MixtralForCausalLM", "MixtralConfig", _mixtral, 2),
    "DeepSeek-V3": Kind("DeepseekV3ForCausalLM", "DeepseekV3Config", _deepseek, 2),
    "Gemma": Kind("GemmaForCausalLM", "GemmaConfig", _gemma),
    "Mamba": Kind("MambaForCausalLM", "MambaConfig", _mamba, 2),
}
_LAYERS = {"GPT-2": "n_layer", "T5": "num_layers"}


def built(name: str, sizes: Sizes) -> nn.Module:
    """The model with the values that every side starts from, in training mode."""
    import transformers

    kind = ZOO[name]
    layers = {_LAYERS.get(name, "num_hidden_layers"): sizes.layers or kind.layers}
    config = getattr(transformers, kind.config)(**kind.options(sizes), **layers)
    torch.manual_seed(SEED)
    made: nn.Module = getattr(transformers, kind.model)(config)
    return made.train()


def batch_of(name: str, sizes: Sizes, step: int) -> Inputs:
    """The global batch of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(SEED + step)
    return (ZOO[name].inputs or _text)(sizes, generator)


def tokens_of(batch: Inputs) -> int:
    """Tokens of a batch; of pictures the patches."""
    pictures = batch.get("pixel_values")
    if pictures is not None:
        return pictures.numel() // (3 * 4 * 4)
    given = batch["input_ids"].numel()
    return given if batch["labels"].shape == batch["input_ids"].shape else given * 3 // 2
