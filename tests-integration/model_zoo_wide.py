"""Models by the dozen: whatever Hugging Face's auto-classes offer, made small by one table.

Nothing is said of any of them but its class and what its configuration needs to be valid. Sizes are
given to every configuration that has an attribute of that name; layouts are `automatic`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model_zoo import TOKENS, VOCABULARY, Model, drawn, images, padded, tokens
from model_zoo_more import EVERY, sequences
from torch import Tensor, nn

WIDTH, WIDE, HEADS, EXPERTS = 36, 20, 6, 4
_NAMES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size n_embd d_model dim lru_width embedding_size d_embed": WIDTH,
    "intermediate_size ffn_hidden_size n_inner d_ff ffn_dim hidden_dim d_inner dff": WIDE,
    "moe_intermediate_size shared_expert_intermediate_size": WIDE,
    "encoder_ffn_dim decoder_ffn_dim": WIDE,
    "num_hidden_layers n_layer n_layers num_layers": 2,
    "encoder_layers decoder_layers num_encoder_layers num_decoder_layers": 1,
    "num_attention_heads n_head n_heads num_heads": HEADS,
    "encoder_attention_heads decoder_attention_heads linear_num_value_heads mamba_num_heads": HEADS,
    "num_key_value_heads linear_num_key_heads": 3,
    "head_dim attn_head_dim d_head d_kv v_head_dim": 6,
    "max_position_embeddings n_positions n_ctx": 32,
    "num_experts num_local_experts n_routed_experts moe_num_experts": EXPERTS,
    "num_experts_per_tok num_experts_per_token moe_k": 2,
    "q_lora_rank kv_lora_rank": 8,
    "rotary_dim rope_dim qk_rope_head_dim qk_nope_head_dim": 4,
    "linear_key_head_dim linear_value_head_dim": 4,
    "sliding_window window_size chunk_size attention_window_size mamba_chunk_size": 4,
    "state_size ssm_state_size mamba_d_state mamba_dt_rank conv_kernel": 4,
    "mamba_d_head": 6,
    "mamba_n_heads mamba_head_dim": 12,
    "n_group topk_group first_k_dense_replace n_shared_experts n_groups mamba_n_groups": 1,
    "attn_layer_offset expert_layer_offset": 1,
    "attn_layer_period expert_layer_period": 2,
    "attention_dropout hidden_dropout resid_pdrop dropout": 0.1,
    "pad_token_id decoder_start_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_mamba_kernels": False,
}
SIZES = {name: value for names, value in _NAMES.items() for name in names.split()}


def small(name: str, **special: Any) -> Callable[[], nn.Module]:
    """Builds a model of this class; `special` goes to its configuration, None leaves out a size."""

    def make() -> nn.Module:
        import transformers

        model: Any = getattr(transformers, name)
        known: Any = model.config_class()
        sizes = {key: value for key, value in SIZES.items() if hasattr(known, key)} | special
        given = {key: value for key, value in sizes.items() if value is not None}
        made: nn.Module = model(model.config_class(**given))
        return made

    return make


def mixed(rows: int) -> dict[str, Tensor]:
    """Texts in which four tokens stand for a picture, and the pictures."""
    ids = drawn(rows, 12, high=VOCABULARY - 3) + 1
    ids[:, 1:5] = VOCABULARY - 1
    labels = ids.masked_fill(ids == VOCABULARY - 1, -100)
    return {"input_ids": ids, "pixel_values": drawn(rows, 3, 16, 16), "labels": labels}


def waves(rows: int) -> dict[str, Tensor]:
    """Sounds, and the tokens that they stand for."""
    return {"input_values": drawn(rows, 400), "labels": drawn(rows, TOKENS - 2, high=50) + 1}


def films(rows: int) -> dict[str, Tensor]:
    """Films of four pictures and their classes."""
    return {"pixel_values": drawn(rows, 4, 3, 16, 16), "labels": drawn(rows, high=2)}


def large_images(rows: int) -> dict[str, Tensor]:
    """Pictures for what halves them several times."""
    return {"pixel_values": drawn(rows, 3, 64, 64), "labels": drawn(rows, high=5)}


def curves(rows: int) -> dict[str, Tensor]:
    """Three curves, and how they go on."""
    return {"past_values": drawn(rows, 32, 3), "future_values": drawn(rows + 1, 8, 3)[:rows]}


def each(names: str, suffix: str, inputs: Callable[[int], dict[str, Tensor]]) -> dict[str, Model]:
    """Models that the table of sizes is enough for."""
    return {name: Model(small(name + suffix), {}, inputs) for name in names.split()}


VISION = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "intermediate_size": WIDE,
    "image_size": 16,
    "patch_size": 8,
}
PATCHES = {"image_size": 16, "patch_size": 4, "num_labels": 5}
STAGES = {"num_labels": 5, "hidden_sizes": [6, 10], "depths": [1, 1]}

# Which spans of sound are masked is drawn by NumPy, for shards and not for the global tensor.
SOUND = {
    "conv_dim": [8, 8],
    "conv_kernel": [4, 4],
    "conv_stride": [4, 4],
    "num_feat_extract_layers": 2,
    "mask_time_prob": 0,
    "layerdrop": 0,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "ctc_loss_reduction": "mean",
}
FILM = {"image_size": 16, "num_frames": 4}
# Of what has names of its own for these.
OTHER_NAMES = {"hidden_size": None, "num_attention_heads": None}
CURVES = {
    "num_input_channels": 3,
    "context_length": 32,
    "prediction_length": 8,
    "patch_length": 8,
    "patch_stride": 8,
    "loss": "mse",
}
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 3,
    "intermediate_size": WIDE,
    "head_dim": 6,
    "pad_token_id": 0,
}


def seeing(name: str, vision: str, text: str, **special: Any) -> Model:
    """A model of text and pictures, made of two others."""
    parts = {
        "image_token_index": VOCABULARY - 1,
        "image_token_id": VOCABULARY - 1,
        "vision_config": {"model_type": vision, **VISION},
        "text_config": {"model_type": text, **TEXT},
        "hidden_size": None,
        "vocab_size": None,
    }
    return Model(small(f"{name}ForConditionalGeneration", **parts, **special), {}, mixed)


DECODERS = """
Apertus Arcee BioGpt BitNet Cohere Doge Dots1 Ernie4_5 Ernie4_5_Moe Exaone4 FalconMamba FlexOlmo
GPTBigCode Glm Glm4 Glm4Moe GptOss Granite GraniteMoe Helium HunYuanDenseV1 HunYuanMoEV1 Jamba
JetMoe Lfm2 Llama4 MiniMax MiniMaxM2 ModernBertDecoder Moshi Mpt NanoChat Nemotron Olmo Olmo2 Olmo3
OlmoHybrid Olmoe Phimoe Qwen2Moe Rwkv SeedOss SmolLM3 StableLm Starcoder2 VaultGemma XGLM
"""
ENCODERS = """
Camembert ConvBert Deberta Esm EuroBert FNet IBert LayoutLM MPNet MegatronBert ModernBert NomicBert
Nystromformer RemBert RoFormer SqueezeBert XLMRoberta Yoso
"""
TRANSLATORS = "Blenderbot M2M100 MBart MT5 NllbMoe PLBart Pegasus PegasusX UMT5"

WIDE_ZOO: dict[str, Model] = {
    **each(DECODERS, "ForCausalLM", tokens),
    **each("CTRL OpenAIGPT", "LMHeadModel", tokens),
    "XLM": Model(small("XLMWithLMHeadModel"), {}, tokens),
    "Flaubert": Model(small("FlaubertWithLMHeadModel"), {}, padded),
    "GPTNeo": Model(
        small("GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]]), {}, tokens
    ),
    "XLNet": Model(small("XLNetLMHeadModel", n_ctx=None, max_position_embeddings=None), {}, tokens),
    "CodeGen": Model(small("CodeGenForCausalLM", n_head=4, n_embd=32, **OTHER_NAMES), {}, tokens),
    "DeepSeek-V2": Model(
        small("DeepseekV2ForCausalLM", num_key_value_heads=HEADS, head_dim=None), {}, tokens
    ),
    "Persimmon": Model(small("PersimmonForCausalLM", hidden_size=48), {}, tokens),
    "RecurrentGemma": Model(
        small("RecurrentGemmaForCausalLM", num_hidden_layers=3, use_cache=False), {}, tokens
    ),
    "Bamba": Model(small("BambaForCausalLM", attn_layer_indices=[1]), {}, tokens),
    "GraniteMoeHybrid": Model(
        small("GraniteMoeHybridForCausalLM", layer_types=["mamba", "attention"]), {}, tokens
    ),
    "Qwen3.5": Model(
        small("Qwen3_5ForCausalLM", layer_types=["linear_attention", "full_attention"]), {}, tokens
    ),
    "Mamba2": Model(small("Mamba2ForCausalLM", num_heads=12, head_dim=6), {}, tokens),
    "Qwen3-Next": Model(
        small("Qwen3NextForCausalLM", layer_types=["linear_attention", "full_attention"]),
        {},
        tokens,
    ),
    **each(ENCODERS, "ForMaskedLM", padded),
    "Longformer": Model(
        small(
            "LongformerForMaskedLM",
            attention_window=4,
            max_position_embeddings=40,
            pad_token_id=1,
        ),
        {},
        padded,
    ),
    "Funnel": Model(
        small("FunnelForMaskedLM", num_hidden_layers=None, block_sizes=[1, 1]), {}, padded
    ),
    "BigBird": Model(small("BigBirdForMaskedLM", attention_type="original_full"), {}, padded),
    **each(TRANSLATORS, "ForConditionalGeneration", sequences),
    "LED": Model(
        small(
            "LEDForConditionalGeneration", attention_window=4, max_encoder_position_embeddings=64
        ),
        {},
        sequences,
    ),
    "Marian": Model(small("MarianMTModel"), {}, sequences),
    "LLaVA": seeing(
        "Llava",
        "clip_vision_model",
        "llama",
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    ),
    "PaliGemma": seeing("PaliGemma", "siglip_vision_model", "gemma", projection_dim=WIDTH),
    **{
        name: Model(small(f"{name}ForCTC", **SOUND), {}, waves)
        for name in ("Hubert", "Wav2Vec2", "WavLM")
    },
    "VideoMAE": Model(
        small("VideoMAEForVideoClassification", **FILM, patch_size=4, tubelet_size=2), {}, films
    ),
    "TimeSformer": Model(
        small("TimesformerForVideoClassification", **FILM, patch_size=4), {}, films
    ),
    "ViViT": Model(small("VivitForVideoClassification", **FILM, tubelet_size=[2, 4, 4]), {}, films),
    **{
        name: Model(
            small(f"{name}ForPrediction", **CURVES), {}, curves, outputs=("prediction_outputs",)
        )
        for name in ("PatchTST", "PatchTSMixer")
    },
    "DeiT": Model(small("DeiTForImageClassification", **PATCHES), {}, images),
    "ViTMSN": Model(small("ViTMSNForImageClassification", **PATCHES), {}, images),
    "DINOv2, registers": Model(
        small("Dinov2WithRegistersForImageClassification", **PATCHES), {}, images
    ),
    "SigLIP": Model(
        small(
            "SiglipForImageClassification", num_labels=5, vision_config=VISION | {"patch_size": 4}
        ),
        {},
        images,
    ),
    "BEiT": Model(
        small("BeitForImageClassification", **PATCHES | {"image_size": 64, "patch_size": 16}),
        {},
        large_images,
    ),
    "PVT v2": Model(
        small(
            "PvtV2ForImageClassification",
            num_labels=5,
            image_size=64,
            hidden_sizes=[6, 8, 10, 12],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 2, 2],
        ),
        {},
        large_images,
    ),
    "ConvNeXt V2": Model(
        small("ConvNextV2ForImageClassification", **STAGES, num_stages=2, patch_size=2), {}, images
    ),
    "BiT": Model(
        small(
            "BitForImageClassification",
            num_labels=5,
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_groups=2,
        ),
        {},
        images,
    ),
    "PoolFormer": Model(
        small(
            "PoolFormerForImageClassification",
            num_labels=5,
            hidden_sizes=[6, 8, 10, 12],
            depths=[1, 1, 1, 1],
        ),
        {},
        images,
    ),
    "FocalNet": Model(
        small(
            "FocalNetForImageClassification",
            num_labels=5,
            image_size=16,
            embed_dim=6,
            depths=[1, 1],
            patch_size=2,
            focal_levels=[1, 1],
            focal_windows=[3, 3],
        ),
        {},
        images,
    ),
}
ALL = {**EVERY, **WIDE_ZOO}
