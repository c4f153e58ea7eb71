"""Sequences sharded over `cp` train unmodified Hugging Face models as one device does.

A batch of `"cp:1"` is all that is asked for: position ids, rotary tables, masks, shifted labels and
dropout follow from global shapes. Losses are compared over steps, and the generator behind them.
"""

from __future__ import annotations

import importlib.util
import zlib
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
import torch
from torch import nn
from vescale_comm import simulate, trace
from vescale_parallel import Plan, mesh, parallelize

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]
STEPS = 5
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
}


def train(kind: str, where: str | None) -> tuple[list[float], float]:
    """Losses of a few steps, and the number that the generator draws behind them."""
    torch.manual_seed(0)
    model = MODELS[kind]().train()
    if where is not None:
        sizes, sharded, words = MESHES[where]
        plan = Plan(batch=sharded, parameters={"*": "replicate"}, **words)
        if "tp" in sizes:
            plan = Plan.from_hf(model).with_(batch=sharded, **words)
        parallelize(model, mesh(**sizes, device_type="cpu"), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch(kind), use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch.rand(()).item()


def of_today(name: str) -> bool:
    return zlib.crc32(f"{datetime.now(UTC):%Y%m%d} {name}".encode()) % 5 == 0


CASES = [
    pytest.param(kind, where, marks=[] if of_today(f"{kind} {where}") else [pytest.mark.slow])
    for kind in MODELS
    for where in MESHES
]


@pytest.mark.parametrize(("kind", "where"), CASES)
def test_losses_are_those_of_one_device(kind: str, where: str) -> None:
    wanted, behind = train(kind, None)
    for losses, number in simulate(4).run(lambda rank, world_size: train(kind, where)):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert number == behind


def step_of(heads: int, axes: dict[str, int], way: Any = "auto") -> tuple[int, Counter[str]]:
    """Bytes that a forward keeps for its backward on this rank, and what a step sends."""
    torch.manual_seed(0)
    model = llama(heads, heads).eval()
    if axes:
        plan = Plan(batch="cp:1", parameters={"*": "replicate"}, sequence=way)
        parallelize(model, mesh(**axes, device_type="cpu"), plan)
    tokens = torch.randint(32, (1, 256))
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with trace() as sent, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return sum(kept.values()), Counter(record.op for record in sent.records)


# Four ranks divide four heads, which are exchanged for rows: the labels, which are shifted, are
# gathered. Of three heads, keys and values of each layer come in three turns, and once more in
# backward, from where gradients go back. Gathered, a rank keeps them, and what its rows see.
@pytest.mark.parametrize(
    ("heads", "way", "most", "wanted"),
    [
        (4, "auto", 0.35, {"all_to_all": 16, "all_gather": 1}),
        (3, "auto", 0.35, {"permute": 18, "all_gather": 1}),
        (4, "ring", 0.35, {"permute": 18, "all_gather": 1}),
        (3, "gather", 0.6, {"all_gather": 5, "reduce_scatter": 4}),
    ],
)
def test_what_a_rank_keeps_falls_with_the_number_of_ranks(
    heads: int, way: str, most: float, wanted: dict[str, int]
) -> None:
    alone, _ = step_of(heads, {})
    for kept, sent in simulate(4).run(lambda rank, world_size: step_of(heads, {"cp": 4}, way)):
        assert kept < most * alone
        sent.pop("all_reduce")  # of gradients, and of the loss
        assert dict(sent) == wanted
