"""Models whose sequences are sharded, the layouts they train in, and the training itself."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from torch import nn
from vescale_dtensor import DTensor
from vescale_parallel import Plan, forward_backward, mesh, parallelize

ROWS, TOKENS = 2, 30  # which four ranks do not divide


def llama(heads: int = 4, keys: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=4 * heads, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=keys, attention_dropout=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=64, n_embd=16, n_layer=2, n_head=4)
    )


def mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=8,
    )  # fmt: skip
    return MistralForCausalLM(config)


def batch(kind: str) -> dict[str, torch.Tensor]:
    tokens = torch.randint(32, (ROWS, TOKENS))
    found = {"input_ids": tokens, "labels": tokens}
    if kind == "packed":  # three documents in each row, which do not see each other
        ends = torch.tensor([0] * 7 + [1] * 12 + [2] * (TOKENS - 19))
        starts = torch.tensor([0] * 7 + [7] * 12 + [19] * (TOKENS - 19))
        seen = (ends[:, None] == ends[None]) & torch.ones(TOKENS, TOKENS).bool().tril()
        found["attention_mask"] = seen.expand(ROWS, 1, TOKENS, TOKENS)
        found["position_ids"] = (torch.arange(TOKENS) - starts).expand(ROWS, TOKENS)
    if kind == "padded":
        mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
        mask[0, -9:] = 0
        found["attention_mask"] = mask
    return found


MODELS = {"llama": llama, "gpt2": gpt2, "mistral": mistral, "packed": llama, "padded": llama}
MESHES: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "cp4": ({"cp": 4}, "cp:1", {}),
    "cp2-tp2": ({"cp": 2, "tp": 2}, "cp:1", {}),
    "cp2-dp2": ({"dp": 2, "cp": 2}, "dp:0, cp:1", {}),
    "cp2-zero3": ({"dp": 2, "cp": 2}, "dp:0, cp:1", {"zero": 3}),
    "cp4-ring": ({"cp": 4}, "cp:1", {"sequence": "ring"}),
    "cp4-ring-balanced": ({"cp": 4}, "cp:1/3", {"sequence": "ring"}),
    "cp2-tp2-ring": ({"cp": 2, "tp": 2}, "cp:1/2", {"sequence": "ring", "checkpoint": "full"}),
    "cp2-dp2-ring": ({"dp": 2, "cp": 2}, "dp:0, cp:1", {"sequence": "ring"}),
    "cp2-zero3-ring": ({"dp": 2, "cp": 2}, "dp:0, cp:1/3", {"sequence": "ring", "zero": 3}),
    "cp2-tp2-zero3-ring": (
        {"dp": 2, "cp": 2, "tp": 2}, "dp:0, cp:1", {"sequence": "ring", "zero": 3},
    ),
    "pp2-cp2-ring": (
        {"pp": 2, "cp": 2}, "cp:1", {"sequence": "ring", "pipeline": "1f1b", "microbatches": 1},
    ),
}  # fmt: skip


class Run(NamedTuple):
    """What a training showed.

    Attributes:
        made: a checksum of each global parameter before the first step.
        losses: of the steps.
        drawn: what the generator gives behind each step, which every mask has moved.
    """

    made: list[int]
    losses: list[float]
    drawn: list[float]


def train(kind: str, where: str | None, steps: int) -> Run:
    """A few steps of a model, on one device or over a mesh."""
    torch.manual_seed(0)
    model = MODELS[kind]().train()
    if where is not None:
        sizes, sharded, words = MESHES[where]
        plan = Plan(batch=sharded, parameters={"*": "replicate"}, **words)
        if "tp" in sizes:
            plan = Plan.from_hf(model).with_(batch=sharded, **words)
        parallelize(model, mesh(**sizes, device_type="cpu"), plan)
    found = Run(checksums(model), [], [])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = forward_backward(model, **batch(kind), use_cache=False)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
        found.drawn.append(torch.rand(()).item())
    return found


def checksums(model: nn.Module) -> list[int]:
    """Of each parameter, as one device has it. Collective."""
    return [
        zlib.crc32((one.full_tensor() if isinstance(one, DTensor) else one).detach().numpy())
        for one in model.parameters()
    ]
