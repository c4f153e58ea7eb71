"""Models of several towers, or of blocks that are called again: right, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_models import needs_transformers
from stage_runs import failures_of, require_gradients
from torch import nn
from vescale_comm import simulate
from vescale_parallel import Pipeline, Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh

pytestmark = [pytest.mark.models, needs_transformers]

Made = tuple[nn.Module, dict[str, Any]]


def clip() -> Made:
    from transformers import CLIPConfig, CLIPModel

    shared = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    shared |= {"num_attention_heads": 2, "projection_dim": 8}
    text = {"vocab_size": 40, "max_position_embeddings": 8, "eos_token_id": 39, **shared}
    vision = {"image_size": 8, "patch_size": 4, **shared}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    tokens = torch.randint(2, 38, (4, 6))
    tokens[:, -1] = 39
    batch = {"input_ids": tokens, "pixel_values": torch.randn(4, 3, 8, 8)}
    return model.eval(), {**batch, "return_loss": True}


def albert(groups: int) -> Made:
    """Four layers, of which some are one module."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    sizes = {"vocab_size": 32, "embedding_size": 8, "hidden_size": 16, "intermediate_size": 32}
    torch.manual_seed(0)
    config = AlbertConfig(
        num_hidden_layers=4, num_hidden_groups=groups, num_attention_heads=2, **sizes
    )
    tokens = torch.randint(32, (4, 6))
    return AlbertForMaskedLM(config).eval(), {"input_ids": tokens, "labels": tokens}


GROUPS = "albert.encoder.albert_layer_groups.*"
TEXT, VISION = ("text_model*", "text_projection"), ("vision_model*", "visual_projection")
Case = tuple[Callable[[], Made], dict[str, Any], str]
CASES: dict[str, Case] = {
    "the other tower on every stage": (
        clip,
        {"stages": "vision_model.encoder.layers.*", "everywhere": f"{{{','.join(TEXT)}}}"},
        "none",
    ),
    "the first tower on every stage": (
        clip,
        {"stages": "text_model.encoder.layers.*", "everywhere": f"{{{','.join(VISION)}}}"},
        "none",
    ),
    "one tower": (clip, {"stages": "text_model.encoder.layers.*"}, r"everywhere='vision_model"),
    "both towers": (
        clip,
        {"stages": "{text,vision}_model.encoder.layers.*"},
        "calls block 'vision_model.encoder.layers.0' where 'text_model.encoder.layers.0' is due",
    ),
    "blocks of their own": (lambda: albert(4), {"stages": GROUPS}, "none"),
    "blocks called twice": (lambda: albert(2), {"stages": GROUPS}, "each block called once"),
    "one block": (lambda: albert(1), {"stages": GROUPS}, "leave a stage empty"),
}


@pytest.mark.parametrize("name", CASES)
def test_towers_and_blocks_that_are_called_again(name: str):
    make, pipeline, words = CASES[name]

    def on_a_rank(rank: int, world_size: int) -> str:
        (model, batch), (plain, _) = make(), make()
        plan = Plan(parameters={"*": "replicate"}, pipeline=Pipeline(**pipeline), microbatches=1)

        def train() -> None:
            parallelize(model, make_mesh(pp=2, device_type="cpu"), plan)
            forward_backward(model, **batch)

        told = failures_of(train)
        if told == "none":
            plain(**batch).loss.backward()
            require_gradients(model, plain)
        return told

    assert all(words in told for told in simulate(2)(on_a_rank))
