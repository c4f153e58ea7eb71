"""Models with experts, the layouts they train in, and the training itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from context_runs import checksums
from torch import Tensor, nn
from vescale_dtensor import DTensor
from vescale_parallel import MoE, Plan, balance_loss, mesh, parallelize, z_loss

DECODER = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def mixtral(**options: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**DECODER, num_local_experts=6, output_router_logits=True, **options)
    return MixtralForCausalLM(config)


def qwen(**options: Any) -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        **DECODER, moe_intermediate_size=16, shared_expert_intermediate_size=20, num_experts=8,
        num_experts_per_tok=3, output_router_logits=True, **options,
    )  # fmt: skip
    return Qwen2MoeForCausalLM(config)


def deepseek(**options: Any) -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **DECODER | {"num_key_value_heads": 4}, moe_intermediate_size=12, n_routed_experts=8,
        num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=1, first_k_dense_replace=1,
        q_lora_rank=12, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
        **options,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def gpt_oss(**options: Any) -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(**DECODER, head_dim=4, num_local_experts=6, **options))


class Own(nn.Module):
    """A decoder without attention, of `MoE`."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([MoE(16, 24, 6, 2, shared=20) for _ in range(2)])
        self.head = nn.Linear(16, 32)

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> Any:
        hidden, extra = self.embed(input_ids), 0
        for block in self.blocks:
            out, routing = block(hidden, with_routing=True)
            hidden = hidden + out
            extra = extra + 0.01 * balance_loss(routing) + 0.001 * z_loss(routing)
        logits = self.head(hidden)[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten()) + extra

        class Result:
            pass

        found = Result()
        found.loss = loss
        return found


MODELS: dict[str, Any] = {
    "Mixtral": mixtral,
    "Qwen-MoE": qwen,
    "DeepSeek": deepseek,
    "GPT-OSS": gpt_oss,
    "own": Own,
}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {}),
    "dp4-zero3": ({"dp": 4}, {"zero": 3}),
    "dp2-tp2-zero3": ({"dp": 2, "tp": 2}, {"zero": 3}),
    "ep4": ({"ep": 4}, {"batch": "ep:0"}),
    "ep2-tp2": ({"ep": 2, "tp": 2}, {"batch": "ep:0"}),
    "ep2-dp2": ({"dp": 2, "ep": 2}, {"batch": "dp:0, ep:0"}),
    "ep2-zero3": ({"dp": 2, "ep": 2}, {"batch": "dp:0, ep:0", "zero": 3}),
    "ep2-tp2-zero3": ({"dp": 2, "ep": 2, "tp": 2}, {"batch": "dp:0, ep:0", "zero": 3}),
    "cp2-ep2-ring": ({"cp": 2, "ep": 2}, {"batch": "ep:0, cp:1", "sequence": "ring"}),
}
STACKS = {"*.gate_up_proj": "tp:1", "*.down_proj": "tp:2", "*": "replicate"}


def planned(model: nn.Module, where: str) -> tuple[dict[str, int], Plan]:
    sizes, words = MESHES[where]
    plan = Plan()
    if "tp" in sizes:
        plan = Plan(parameters=STACKS) if isinstance(model, Own) else Plan.from_hf(model)
    # Without that axis each rank computes its own tokens, with all experts.
    return sizes, plan.with_(**{"experts": "ep"} if "ep" in sizes else {}, **words)


class Run(NamedTuple):
    """What a training showed.

    Attributes:
        made: a checksum of each global parameter before the first step.
        losses: of the steps.
        norms: of their gradients.
        chosen: the experts that tokens chose, in the order of the calls.
    """

    made: list[int]
    losses: list[float]
    norms: list[float]
    chosen: list[Tensor]


def train(kind: str, where: str | None, steps: int, **options: Any) -> Run:
    """A few steps of a model, on one device or over a mesh."""
    torch.manual_seed(0)
    model = MODELS[kind](**options).train()
    with torch.no_grad():
        # Routers that choose: those of the libraries begin nearly or quite undecided.
        for name, parameter in model.named_parameters():
            if "experts" in name or "router" in name or name.endswith("mlp.gate.weight"):
                parameter.normal_(std=0.3)
    chosen: list[Tensor] = []

    def note(module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            return  # the gate of a shared layer
        index = next(one for one in out if not one.dtype.is_floating_point)
        chosen.append(index.full_tensor() if isinstance(index, DTensor) else index)

    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_hook(note)
    if where is not None:
        sizes, plan = planned(model, where)
        parallelize(model, mesh(**sizes, device_type="cpu"), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = Run(checksums(model), [], [], chosen)
    for _ in range(steps):
        tokens = torch.randint(32, (5, 7))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
        found.norms.append(norm.item())
    return found
