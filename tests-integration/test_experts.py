"""Experts train unmodified Hugging Face models as one device does, shared over ranks or not.

`Plan(experts="ep")` is all that is asked for, and nothing where each rank computes its own tokens
with all experts: then nothing is sent for them but gradients. Losses, gradient norms and the
router's losses are compared over steps, and what every token chose is one device's, bit for bit.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from expert_runs import MESHES, MODELS, train
from torch import nn
from vescale_comm import simulate, trace
from vescale_parallel import Plan, mesh, parallelize

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]


def other(name: str) -> nn.Module:
    from model_zoo_wide import small

    made = small(f"{name}ForCausalLM")()
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return made


def one_step(name: str, sizes: dict[str, int], words: dict[str, Any]) -> list[float]:
    """Loss, and the norm of all gradients."""
    torch.manual_seed(0)
    model = other(name).train()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "expert" in parameter_name or parameter_name.endswith("gate.weight"):
                parameter.normal_(std=0.3)
    if sizes:
        parallelize(model, mesh(**sizes, device_type="cpu"), Plan(**words))
    tokens = (torch.arange(35).view(5, 7) * 7) % 32
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    given = [parameter for parameter in model.parameters() if parameter.grad is not None]
    return [loss.item(), nn.utils.clip_grad_norm_(given, 1e9).item()]


OTHERS = """
Glm4Moe GraniteMoe HunYuanMoEV1 Jamba MiniMax MiniMaxM2 Olmoe Phimoe Qwen3Moe Qwen3Next Ernie4_5_Moe
Dots1 FlexOlmo NemotronH Afmoe SolarOpen GraniteMoeShared Cohere2Moe ExaoneMoe
""".split()  # noqa: SIM905


# What a run takes, for fewer steps; `-m slow` takes the rest.
CORE = {
    ("Mixtral", "ep2-tp2", "grouped_mm"),
    ("DeepSeek", "ep2-zero3", "eager"),
    ("GPT-OSS", "ep2-dp2", "grouped_mm"),
    ("Qwen-MoE", "dp2", "grouped_mm"),
    ("Mixtral", "dp4-zero3", "eager"),
}
CORE_OTHERS = ("Qwen3Moe",)
CASES = [
    pytest.param(kind, where, how, 4)
    if (kind, where, how) in CORE
    else pytest.param(kind, where, how, 20, marks=pytest.mark.slow)
    for kind in MODELS
    for where in MESHES
    for how in ("grouped_mm", "eager")
    if kind != "own" or how == "eager"
]


@pytest.mark.parametrize(("kind", "where", "how", "steps"), CASES)
def test_steps_are_those_of_one_device(kind: str, where: str, how: str, steps: int) -> None:
    wanted = train(kind, None, steps, experts_implementation=how)
    for found in simulate(math.prod(MESHES[where][0].values())).run(
        lambda rank, world_size: train(kind, where, steps, experts_implementation=how)
    ):
        assert found.made == wanted.made
        assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
        assert found.norms == pytest.approx(wanted.norms, rel=1e-3)
        for one, two in zip(found.chosen, wanted.chosen, strict=True):
            assert torch.equal(one, two)


def sent(kind: str, how: str) -> tuple[set[str], int]:
    """What a layer's forward sends with dp=2, and what all of a model's does."""
    model = MODELS[kind](experts_implementation=how).train()
    parallelize(model, mesh(dp=2, device_type="cpu"), Plan())
    tokens = torch.randint(32, (4, 7))
    layers = [one for name, one in model.named_modules() if name.endswith(".mlp")]
    inside: list[Any] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: inside.append(len(sending.records)))
        layer.register_forward_hook(lambda *_: inside.append(len(sending.records)))
    for _ in range(3):  # the first batches are compared between ranks
        inside.clear()
        with trace() as sending:
            model(input_ids=tokens, labels=tokens, use_cache=False)
    assert len(inside) == 2 * len(layers) > 0
    pairs = zip(inside[::2], inside[1::2], strict=True)
    within = [one for a, b in pairs for one in sending.records[a:b]]
    return {one.op for one in within}, max((one.bytes for one in sending.records), default=0)


@pytest.mark.parametrize("how", ["grouped_mm", "eager"])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen-MoE", "DeepSeek", "GPT-OSS"])
def test_layers_with_own_tokens_send_nothing(kind: str, how: str) -> None:
    for inside, most in simulate(2).run(lambda rank, world_size: sent(kind, how)):
        assert inside == set()
        # Losses of routers, and counts of tokens: sums over experts, no tokens.
        assert most <= 128


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[] if one in CORE_OTHERS else [pytest.mark.slow]) for one in OTHERS],
)
def test_other_architectures(name: str) -> None:
    wanted = one_step(name, {}, {})
    words = {"batch": "dp:0, ep:0", "experts": "ep"}
    for found in simulate(4).run(
        lambda rank, world_size: one_step(name, {"dp": 2, "ep": 2}, words)
    ):
        assert found == pytest.approx(wanted, rel=1e-5)
