"""timm: a vision transformer and a convnet, and its optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import timm
import torch
from ecosystem_models import batch, classifier, steps
from ecosystem_runs import Found, Run, parameters
from timm.optim import create_optimizer_v2, list_optimizers

PACKAGES = ("timm",)


def images() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(5)
    classes = torch.randint(5, (6,), generator=source)
    return torch.randn(6, 3, 32, 32, generator=source), classes


def of_images(name: str, **options: Any) -> Any:
    def case(run: Run) -> Found:
        torch.manual_seed(1)
        model = run.parallelize(timm.create_model(name, num_classes=5, **options))
        optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, eps=1e-4)
        return {"losses": steps(model, optimizer, *images()), **parameters(model)}

    return case


def with_optimizer(name: str, **options: Any) -> Any:
    def case(run: Run) -> Found:
        model = run.parallelize(classifier())
        optimizer = create_optimizer_v2(model, name, lr=1e-2, **options)
        torch.manual_seed(6)
        curved = name == "adahessian"  # which looks at second derivatives
        return {"losses": steps(model, optimizer, *batch(), curved), **parameters(model)}

    return case


def with_each(names: Sequence[str]) -> Any:
    """A case of many optimizers, one after the other."""

    def case(run: Run) -> Found:
        # kron compiles its update for minutes; what is compared does not depend on that.
        torch.compiler.set_stance("force_eager")
        try:
            found = {name: with_optimizer(name)(run) for name in names}
        finally:
            torch.compiler.set_stance("default")
        return {f"{name}: {key}": one for name in names for key, one in found[name].items()}

    return case


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
NAMES = (
    "adamw", "adamp", "adan", "adabelief", "adafactorbv", "adopt", "lamb", "laprop",
    "lion", "lookahead_adam", "madgrad", "mars", "muon", "nadamw", "novograd", "radam", "sgdp",
    "sgdw",
)  # fmt: skip
# Each of these is one case, all the rest are two: what orthogonalises, and what does not.
OTHERS = [
    name
    for name in list_optimizers()
    # Other people's kernels: those of bitsandbytes have a file here, those of apex need CUDA.
    if name not in (*NAMES, "adahessian") and not name.startswith(("bnb", "fused"))
]
MUONS = [name for name in OTHERS if "muon" in name]
# Orthogonalised in bfloat16, by iterations that amplify what they round.
LIMITS = {"optimizer muon": 2e-2, "optimizers with Muon": 2e-2}
LIMITS |= {"ResNet": 1e-3}  # norms over six rows amplify it, too
LIMITS |= {"optimizer adahessian": 1e-3}  # as divisions by curvatures that are next to nothing
REFUSED = {
    ("optimizer adahessian", "dp=4, zero=3"): "it differentiates gradients "
    "(create_graph=True), which is refused of parameters that zero shards; take zero=0"
}
CASES = {
    "vision transformer": of_images("vit_tiny_patch16_224", **VIT, drop_rate=0.1),
    "ResNet": of_images("resnet10t"),
    **{f"optimizer {name}": with_optimizer(name) for name in NAMES},
    "optimizer adahessian": with_optimizer("adahessian"),
    "optimizers with Muon": with_each(MUONS),
    f"{len(OTHERS) - len(MUONS)} optimizers more": with_each(
        [name for name in OTHERS if name not in MUONS]
    ),
}
