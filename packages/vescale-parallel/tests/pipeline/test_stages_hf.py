"""Unmodified Hugging Face models in stages: tied embeddings, masks, dropout, losses inside."""

import pytest
import torch
from stage_models import gpt2, llama, needs_transformers
from stage_runs import require_gradients, step_both
from torch import Tensor
from vescale_comm import simulate
from vescale_dtensor import DTensor
from vescale_parallel import Plan, mesh, parallelize

pytestmark = [pytest.mark.models, needs_transformers]


KINDS = {"gpt2": gpt2, "llama": llama}


def inputs() -> dict[str, Tensor]:
    tokens = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


@pytest.mark.parametrize(
    ("kind", "sizes", "schedule"),
    [
        ("gpt2", {"pp": 2}, "1f1b"),
        ("llama", {"pp": 2}, "interleaved"),
        ("gpt2", {"pp": 2, "tp": 2}, "1f1b"),
        ("llama", {"pp": 2, "dp": 2, "tp": 2}, "1f1b"),
    ],
    ids=str,
)
def test_hugging_face_models_run_in_stages(kind: str, sizes: dict[str, int], schedule: str):
    def on_a_rank(rank: int, world_size: int) -> None:
        plain, model = KINDS[kind](), KINDS[kind]()
        plan = Plan.from_hf(model, pipeline={"schedule": schedule, "microbatches": 4})
        parallelize(model, mesh(device_type="cpu", **sizes), plan)
        for _ in range(2):
            step_both(model, plain, 4, rtol=1e-5, **inputs())
        assert list(dict(plain.named_parameters())) == [n for n, _ in model.named_parameters()]
        assert all(isinstance(one.grad, DTensor) for one in model.parameters())
        require_gradients(model, plain, rtol=1e-4, atol=1e-6)

    simulate(torch.Size(sizes.values()).numel())(on_a_rank)
