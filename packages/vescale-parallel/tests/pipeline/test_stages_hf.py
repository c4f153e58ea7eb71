"""Unmodified Hugging Face models in stages: tied embeddings, masks, dropout, losses inside."""

import importlib.util
from typing import Any

import pytest
import torch
from stage_models import gpt2, llama
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_dtensor import DTensor
from vescale_parallel import Plan, forward_backward, mesh, parallelize

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]


KINDS = {"gpt2": gpt2, "llama": llama}


def make(kind: str) -> nn.Module:
    return KINDS[kind]()


def inputs() -> dict[str, Tensor]:
    tokens = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def one_device(model: nn.Module, parts: int) -> Tensor:
    total = torch.zeros(())
    for pieces in zip(*(one.chunk(parts) for one in inputs().values()), strict=True):
        loss: Any = model(**dict(zip(inputs(), pieces, strict=True))).loss / parts
        loss.backward()
        total += loss.detach()
    return total


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
        plain, model = make(kind), make(kind)
        plan = Plan.from_hf(model, pipeline={"schedule": schedule, "microbatches": 4})
        parallelize(model, mesh(device_type="cpu", **sizes), plan)
        for _ in range(2):
            start = torch.get_rng_state()
            expected = one_device(plain, 4)
            end = torch.get_rng_state()
            torch.set_rng_state(start)
            found = forward_backward(model, **inputs())
            assert torch.equal(torch.get_rng_state(), end)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        named = dict(plain.named_parameters())
        assert list(named) == [name for name, _ in model.named_parameters()]
        for name, one in model.named_parameters():
            assert isinstance(one.grad, DTensor)
            torch.testing.assert_close(
                one.grad.full_tensor(), named[name].grad, rtol=1e-4, atol=1e-6
            )

    simulate(torch.Size(sizes.values()).numel())(on_a_rank)
