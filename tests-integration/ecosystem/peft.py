"""peft: adapters of every common kind, on tied embeddings too, and what is merged from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
from ecosystem_models import TOKENS, gpt2, llama, token_rows
from ecosystem_runs import Found, Run, parameters
from torch import nn

PACKAGES = ("peft", "transformers")
TARGETS = {"target_modules": ["q_proj", "v_proj"]}
USUAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}


def steps(model: nn.Module, count: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], 1e-2, eps=1e-4
    )
    rows = torch.tensor([row["input_ids"] for row in token_rows(5)])
    losses = []
    for _ in range(count):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(3, 3 + TOKENS)[None]).logits
    return found


def with_(config: Callable[[], Any], base: Callable[[], Any] = llama, merges: bool = False) -> Any:
    """A case: adapt a model, lay it out, train it, and merge what was learned."""

    def case(run: Run) -> Found:
        torch.manual_seed(2)
        model = run.parallelize(peft.get_peft_model(base(), config()))
        found: dict[str, Any] = {"losses": steps(model), **parameters(model)}
        found["logits"] = logits(model)
        if merges:
            merged = model.merge_and_unload()  # type: ignore[operator]
            found["merged"] = logits(merged)
            found |= {f"merged.{name}": p.detach() for name, p in merged.named_parameters()}
        return found

    return case


def lora(**options: Any) -> Callable[[], Any]:
    usual = {**USUAL, "r": 4, "lora_dropout": 0.1, **TARGETS}
    return lambda: peft.LoraConfig(**{**usual, **options})


def several(run: Run) -> Found:
    """Two adapters that take turns, one switched off, and the base model below."""
    torch.manual_seed(2)
    model = peft.get_peft_model(llama(), lora(lora_dropout=0.0)())
    model.add_adapter("other", lora(r=2)())
    model.set_adapter("default")
    model = run.parallelize(model)
    found: dict[str, Any] = {"losses": steps(model, 2)}
    model.set_adapter("other")  # type: ignore[operator]
    found["other"] = steps(model, 2)
    with model.disable_adapter():  # type: ignore[operator]
        found["base"] = logits(model)
    state = peft.get_peft_model_state_dict(model, adapter_name="other")
    return {**found, **state}


def embeddings() -> Any:
    return lora(target_modules=["wte", "c_attn"], fan_in_fan_out=True)()


CASES = {
    "LoRA": with_(lora(), merges=True),
    "LoRA, tied embeddings": with_(embeddings, gpt2, merges=True),
    "LoRA, whole head": with_(lora(modules_to_save=["lm_head"]), merges=True),
    "rsLoRA": with_(lora(use_rslora=True, init_lora_weights="gaussian"), merges=True),
    "DoRA": with_(lora(use_dora=True), merges=True),
    "adapters by turns": several,
    "IA3": with_(
        lambda: peft.IA3Config(
            **USUAL,
            target_modules=["k_proj", "v_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        ),
        merges=True,
    ),
    "prompt": with_(lambda: peft.PromptTuningConfig(**USUAL, num_virtual_tokens=3)),
    "P-tuning": with_(
        lambda: peft.PromptEncoderConfig(
            **USUAL, num_virtual_tokens=3, encoder_hidden_size=16, encoder_dropout=0.0
        )
    ),
    "prefix": with_(lambda: peft.PrefixTuningConfig(**USUAL, num_virtual_tokens=3)),
    "AdaLoRA": with_(
        lambda: peft.AdaLoraConfig(**USUAL, init_r=4, target_r=2, total_step=10, **TARGETS)
    ),
    "LoHa": with_(lambda: peft.LoHaConfig(**USUAL, r=3, **TARGETS), merges=True),
    "LoKr": with_(lambda: peft.LoKrConfig(**USUAL, r=3, **TARGETS), merges=True),
    "OFT": with_(lambda: peft.OFTConfig(**USUAL, r=0, oft_block_size=4, **TARGETS), merges=True),
    "VeRA": with_(lambda: peft.VeraConfig(**USUAL, r=4, target_modules=["q_proj"])),
}
