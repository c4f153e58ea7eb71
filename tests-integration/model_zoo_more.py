"""More unmodified models: other families, eager attention, experts, recurrence, torch's own.

Their layouts are not written by hand: every matrix, table and kernel is sharded over `tp` by the
kind of its module, whatever its size, so that shards are uneven everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from model_zoo import DECODER, MODELS, TOKENS, VOCABULARY, Model, drawn, hf, images, padded, tokens
from torch import Tensor, nn

# The last layers of a block: sharded along the dim that they sum over.
BACK = ("o_proj", "out_proj", "down_proj", "fc2", "w2", "c_proj", "wo", "dense_4h_to_h", "dense")


def automatic(model: nn.Module) -> dict[str, str]:
    """A layout for every parameter: what leads back by columns, everything else by rows."""
    plan = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        module = model.get_submodule(owner)
        back = owner.rpartition(".")[2] in BACK
        if "Norm" in type(module).__name__ or not parameter.ndim:
            plan[name] = "replicate"
        elif back and parameter.ndim > 1:
            plan[name] = "tp:1"
        else:
            plan[name] = "replicate" if back else "tp:0"
    return plan


def sequences(rows: int) -> dict[str, Tensor]:
    """Source and target tokens of an encoder and a decoder."""
    return {**padded(rows), "labels": drawn(rows, TOKENS - 2, high=VOCABULARY)}


def sounds(rows: int) -> dict[str, Tensor]:
    """Spectra, and the tokens that they stand for."""
    return {"input_features": drawn(rows, 8, 20), "labels": drawn(rows, 5, high=VOCABULARY)}


def pairs(rows: int) -> dict[str, Any]:
    """Texts and their pictures."""
    given = {**tokens(rows), **images(rows)}
    return {name: given[name] for name in ("input_ids", "pixel_values")} | {"return_loss": True}


class Loss(nn.Module):
    """A module of torch's own with a loss behind it; results in Hugging Face's form."""

    class Output(dict[str, Any]):
        """Entries by name."""

        __getattr__ = dict.__getitem__

    def __init__(self, module: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module.double()
        self.call = call

    def forward(self, **inputs: Tensor) -> Any:
        """The module's result and its mean square."""
        result = self.call(self.module, **inputs)
        # Not the square: normalised features have the same one, whatever they are.
        weights = torch.linspace(-1, 2, result.shape[-1], dtype=result.dtype)
        return self.Output(loss=(result.sin() * weights).mean(), logits=result)


def features(rows: int) -> dict[str, Tensor]:
    """Sequences of features."""
    return {"x": drawn(rows, TOKENS, 12).double()}


def recurrent(kind: type[nn.Module], **options: Any) -> Model:
    """An RNN of torch's own."""

    def make() -> nn.Module:
        return Loss(kind(12, 10, batch_first=True, **options), lambda m, x: m(x)[0])

    return Model(make, {}, features)


def attention() -> nn.Module:
    module = nn.MultiheadAttention(12, 6, dropout=0.1, batch_first=True)
    return Loss(module, lambda m, x: m(x, x, x, need_weights=False)[0])


def attention_with_weights() -> nn.Module:
    module = nn.MultiheadAttention(12, 3, dropout=0.1, batch_first=True)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return Loss(module, lambda m, x: m(x, x, x, attn_mask=mask)[0])


def transformer() -> nn.Module:
    module = nn.Transformer(12, 3, 2, 2, 22, batch_first=True)
    return Loss(module, lambda m, x: m(x, x.flip(1)))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 3, 22, activation="gelu", norm_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Loss(module, lambda m, x: m(x.transpose(0, 1)))


def convolutions() -> nn.Module:
    module = nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1, bias=False),
        nn.BatchNorm2d(10),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(10, 10, 3, groups=5),
        nn.GroupNorm(2, 10),
        nn.PReLU(10),
        nn.ConvTranspose2d(10, 6, 2, stride=2),
        nn.InstanceNorm2d(6, affine=True),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Dropout2d(0.2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 5),
    )
    return Loss(module, lambda m, pixel_values, labels: m(pixel_values.double()))


EAGER: dict[str, Any] = {"attn_implementation": "eager"}
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 22,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Experts are multiplied by a kernel that wants rows of 16 bytes.
EXPERTS = {**DECODER, "intermediate_size": 20}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}
SEQ = {"decoder_start_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 36,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 22,
    "decoder_ffn_dim": 22,
    **SEQ,
}
T5 = {"d_model": 36, "d_kv": 6, "d_ff": 22, "num_layers": 1, "num_heads": 5, **SEQ}


def _language(name: str, kind: str = "ForCausalLM", **options: Any) -> Model:
    make = hf(f"{name}{kind}", f"{name}Config", **options)
    return Model(make, {}, padded if "Masked" in kind else tokens)


def _pictures(name: str, **options: Any) -> Model:
    make = hf(f"{name}ForImageClassification", f"{name}Config", num_labels=5, **options)
    return Model(make, {}, images)


MORE: dict[str, Model] = {
    "Llama, eager": _language("Llama", **DECODER, **HEADS, **EAGER),
    "GPT-2, eager": _language(
        "GPT2",
        "LMHeadModel",
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=36,
        n_layer=1,
        n_head=6,
        **EAGER,
    ),
    "BERT, eager": _language("Bert", "ForMaskedLM", **SMALL, **EAGER),
    "Mistral": _language("Mistral", **DECODER, **HEADS, sliding_window=4),
    "Mixtral": _language(
        "Mixtral", **EXPERTS, **HEADS, num_local_experts=3, output_router_logits=True
    ),
    "Qwen2": _language("Qwen2", **DECODER, **HEADS),
    "Qwen3-MoE": _language(
        "Qwen3Moe",
        **DECODER,
        **HEADS,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        head_dim=6,
    ),
    "DeepSeek-V3": _language(
        "DeepseekV3",
        **{**DECODER, "attention_dropout": 0.1},
        num_attention_heads=6,
        num_key_value_heads=6,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=6,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
    "Gemma": _language("Gemma", **DECODER, **HEADS, head_dim=6),
    "Gemma-2": _language("Gemma2", **DECODER, **HEADS, head_dim=6, sliding_window=4),
    "Gemma-3": Model(
        hf(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            **DECODER,
            **HEADS,
            head_dim=6,
            sliding_window=4,
        ),
        {},
        tokens,
    ),
    "OPT": _language(
        "OPT",
        vocab_size=VOCABULARY,
        hidden_size=36,
        ffn_dim=22,
        num_hidden_layers=2,
        num_attention_heads=6,
        max_position_embeddings=16,
        word_embed_proj_dim=36,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "GPT-NeoX": _language("GPTNeoX", **SMALL, attention_dropout=0.1, hidden_dropout=0.1),
    "GPT-J": _language(
        "GPTJ",
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=36,
        n_layer=2,
        n_head=6,
        rotary_dim=4,
        resid_pdrop=0.1,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "Phi": _language(
        "Phi", **{**DECODER, "hidden_size": 48}, num_attention_heads=6, resid_pdrop=0.1
    ),
    "Phi-3": _language("Phi3", **DECODER, **HEADS, resid_pdrop=0.1),
    "Falcon": _language(
        "Falcon",
        vocab_size=VOCABULARY,
        hidden_size=36,
        num_hidden_layers=2,
        num_attention_heads=6,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "Bloom": _language(
        "Bloom",
        vocab_size=VOCABULARY,
        hidden_size=36,
        n_layer=2,
        n_head=6,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "Mamba": _language(
        "Mamba",
        vocab_size=VOCABULARY,
        hidden_size=12,
        num_hidden_layers=1,
        state_size=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "RoBERTa": _language("Roberta", "ForMaskedLM", **{**SMALL, "max_position_embeddings": 32}),
    "DistilBERT": _language(
        "DistilBert",
        "ForMaskedLM",
        vocab_size=VOCABULARY,
        dim=36,
        n_layers=2,
        n_heads=6,
        hidden_dim=22,
        max_position_embeddings=16,
    ),
    "ALBERT": _language(
        "Albert", "ForMaskedLM", **SMALL, embedding_size=10, hidden_dropout_prob=0.1
    ),
    "ELECTRA": _language("Electra", "ForMaskedLM", **SMALL, embedding_size=10),
    "DeBERTa": _language(
        "DebertaV2",
        "ForMaskedLM",
        **SMALL,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=4,
    ),
    "T5": Model(
        hf("T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, **T5), {}, sequences
    ),
    "BART": Model(hf("BartForConditionalGeneration", "BartConfig", **BART), {}, sequences),
    "Whisper": Model(
        hf(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **BART,
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=8,
            dropout=0.1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        {},
        sounds,
    ),
    "CLIP": Model(
        hf(
            "CLIPModel",
            "CLIPConfig",
            projection_dim=10,
            text_config={**SMALL, "attention_dropout": 0.1},
            vision_config={
                "hidden_size": 36,
                "num_hidden_layers": 1,
                "num_attention_heads": 6,
                "intermediate_size": 22,
                "image_size": 16,
                "patch_size": 4,
            },
        ),
        {},
        lambda rows: pairs(rows),
        outputs=("logits_per_text", "logits_per_image"),
    ),
    "ResNet": _pictures("ResNet", embedding_size=6, hidden_sizes=[10, 14], depths=[1, 1]),
    "ConvNeXt": _pictures(
        "ConvNext",
        hidden_sizes=[6, 10],
        depths=[1, 1],
        num_stages=2,
        patch_size=2,
        drop_path_rate=0.1,
    ),
    "Swin": _pictures(
        "Swin",
        image_size=16,
        patch_size=2,
        embed_dim=6,
        depths=[1, 2],
        num_heads=[2, 3],
        window_size=4,
    ),
    "DINOv2": _pictures(
        "Dinov2",
        image_size=16,
        patch_size=4,
        hidden_size=36,
        num_hidden_layers=2,
        num_attention_heads=6,
        hidden_dropout_prob=0.1,
    ),
    "torch: MultiheadAttention": Model(attention, {}, features),
    "torch: MultiheadAttention, weights": Model(attention_with_weights, {}, features),
    "torch: Transformer": Model(transformer, {}, features),
    "torch: TransformerEncoder": Model(encoder, {}, features),
    "torch: LSTM": recurrent(nn.LSTM, num_layers=2, dropout=0.1),
    "torch: GRU": recurrent(nn.GRU, bidirectional=True),
    "torch: RNN": recurrent(nn.RNN),
    "torch: convolutions": Model(convolutions, {}, images),
}

EVERY = {**MODELS, **MORE}
