"""Trains a Hugging Face model by `Plan.from_hf` alone, all ranks in this process, as one device.

The ranks are simulated, so that three meshes of one model cost seconds and start no processes.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from model_runs import ROWS, share, stepped
from model_zoo import Model
from model_zoo_wide import ALL
from torch import nn
from vescale_comm import simulate
from vescale_parallel import Plan, mesh, parallelize

LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "tp=4": ({"tp": 4}, 0),
    "dp=2, tp=2": ({"dp": 2, "tp": 2}, 0),
    "zero=3, dp=2, tp=2": ({"dp": 2, "tp": 2}, 3),
}
# What people train most, and one of each kind of trouble.
NAMES = """
Llama Mistral Qwen2 Qwen3 Gemma Gemma-2 Gemma-3 Phi Phi-3 GPT-2 GPTNeo GPT-NeoX GPT-J OPT Bloom
Falcon Mpt Starcoder2 StableLm Cohere Olmo Olmo2 Olmo3 Granite Glm Glm4 SmolLM3 Nemotron XGLM
CodeGen BERT RoBERTa DistilBERT ALBERT ELECTRA DeBERTa ModernBert Esm T5 BART Pegasus Whisper ViT
DINOv2 DeiT CLIP Mixtral Qwen2Moe Qwen3-MoE DeepSeek-V3 Olmoe GraniteMoe Mamba
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Described:
    """What a preset makes of a model, which no run is needed for.

    Attributes:
        declared: whether the model declares a layout.
        rules: of the plan.
        sharded: elements of parameters that `tp` shards, as a share of all.
    """

    declared: bool
    rules: int
    sharded: float

    @property
    def cells(self) -> tuple[str, str, str]:
        """As the table has them."""
        return "declared" if self.declared else "shapes", str(self.rules), f"{self.sharded:.0%}"


@dataclass(frozen=True)
class Compared:
    """A training step on a mesh, beside one device.

    Attributes:
        loss: that of the mesh minus that of one device.
        gradient, parameter: the largest differences, as shares of the largest element.
        preset: what the plan makes of the model.
    """

    loss: float
    gradient: float
    parameter: float
    preset: Described

    @property
    def worst(self) -> float:
        """The largest of the three."""
        return max(abs(self.loss), self.gradient, self.parameter)


def described(model: nn.Module, plan: Plan, sizes: dict[str, int]) -> Described:
    """Return what a plan makes of a model on a mesh."""
    rows = plan.check(model, sizes).parameters
    sharded = sum(math.prod(row.global_shape) for row in rows if "tp" in row.layout.axes)
    return Described(
        declared=bool(getattr(model, "tp_plan", None)),
        rules=len(plan.parameters) + len(plan.activations),
        sharded=sharded / sum(one.numel() for one in model.parameters()),
    )


def compare(name: str, layout: str, **options: Any) -> Compared:
    """Return one step of a model of the zoo in both ways; `options` go to `Plan.from_hf`."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            return _compared(ALL[name], *LAYOUTS[layout], options)
    finally:
        logging.disable(logging.NOTSET)


def _compared(model: Model, sizes: dict[str, int], zero: int, options: dict[str, Any]) -> Compared:
    torch.manual_seed(0)
    dense = model.make().train()
    plan = Plan.from_hf(dense, zero=zero, **options)
    inputs = model.inputs(ROWS)

    def program(rank: int, world_size: int) -> tuple[Any, dict[str, Any], nn.Module]:
        ours = parallelize(copy.deepcopy(dense), mesh(device_type="cpu", **sizes), plan)
        out, gradients = stepped(ours, inputs)
        # Gathered while all ranks are there.
        whole = {key: one.full_tensor() for key, one in gradients.items()}
        after = {key: one.detach().full_tensor() for key, one in ours.named_parameters()}
        return out.loss.item(), whole, after

    loss, found, after = simulate(4).run(program)[0]
    out, wanted = stepped(dense, inputs)
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    # Gradients that are nothing but rounding (of the bias of a key) are measured by the others.
    floor = 1e-3 * max(float(grad.abs().max()) for grad in wanted.values())
    return Compared(
        loss=loss - out.loss.item(),
        gradient=max(share(found[key], wanted[key], floor) for key in wanted),
        parameter=max(share(after[key], one, 1.0) for key, one in dense.named_parameters()),
        preset=described(dense, plan, sizes),
    )
