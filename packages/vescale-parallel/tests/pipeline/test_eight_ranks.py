"""Stages with data, tensor and ZeRO parallelism on eight ranks: the numbers of one device.

One device accumulates over the same four microbatches of seven rows, the last of which has one
row: fewer than there are ranks along dp, so some of them have none.
Unmodified Hugging Face models: tied embeddings, masks, dropout, losses inside.
"""

from typing import Any

import pytest
import torch
from stage_models import gpt2, llama, needs_transformers
from stage_runs import make, plan, require_gradients, scaled_steps, step_both, train, whole
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_dtensor import DTensor
from vescale_parallel import Plan, forward_backward, mesh, parallelize
from vescale_parallel import mesh as make_mesh

LAYOUTS = {
    "pp2 dp2 tp2": {"pp": 2, "dp": 2, "tp": 2},
    "pp2 dp4": {"pp": 2, "dp": 4},
    "pp4 dp2": {"pp": 4, "dp": 2},
}
ONE_STAGE, TWO_STAGES = ("gpipe", "1f1b", "zb-h1"), ("interleaved", "zbv", "dualpipev")
ROWS, PARTS = 7, 4
# The model has four blocks: one a stage where four ranks have one stage, or two ranks two.
CASES = [
    (layout, schedule)
    for layout, sizes in LAYOUTS.items()
    for schedule in ONE_STAGE + (TWO_STAGES if sizes["pp"] == 2 else ())
]
SCALED = [case for case in CASES if case[1] in ("1f1b", "zb-h1", "zbv")]
of_each_level = pytest.mark.parametrize("zero", [1, 2, 3])


@of_each_level
@pytest.mark.parametrize(("layout", "schedule"), CASES)
def test_training_with_clipped_gradients(layout: str, schedule: str, zero: int):
    simulate(8)(train, LAYOUTS[layout], plan(schedule, PARTS, zero=zero), True, ROWS)


@of_each_level
@pytest.mark.parametrize(("layout", "schedule"), SCALED)
def test_scaled_gradients_that_overflow(layout: str, schedule: str, zero: int):
    expected = scaled_steps(make(), None, {}, PARTS, ROWS)
    assert [one.item() for one in expected[:3]] == [16.0, 8.0, 16.0]

    def on_a_rank(rank: int, world_size: int) -> None:
        how = plan(schedule, PARTS, zero=zero)
        found = scaled_steps(make(), how, LAYOUTS[layout], PARTS, ROWS)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)

    simulate(8)(on_a_rank)


def trained(model: nn.Module, tokens: Tensor, parts: int) -> Any:
    """The model after one step, in evaluation mode; `parts` microbatches, 1 for what has a plan."""
    torch.manual_seed(11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in tokens.split(-(-len(tokens) // parts)):
        part = len(rows) / len(tokens)
        given: Any = {"input_ids": rows, "labels": rows, "use_cache": False}
        forward_backward(model, loss=lambda out, part=part: out.loss * part, **given)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return model.eval()


@pytest.mark.models
@of_each_level
@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_and_generation(layout: str, zero: int):
    pytest.importorskip("transformers", reason="transformers is not installed")
    tokens = torch.randint(3, 32, (ROWS, 5), generator=torch.Generator().manual_seed(0))
    asked: Any = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "use_cache": False}
    plain = trained(llama(), tokens, PARTS)
    with torch.no_grad():
        logits = plain(input_ids=tokens, use_cache=False).logits
    written = plain.generate(tokens, **asked)

    def on_a_rank(rank: int, world_size: int) -> None:
        model = llama()
        how = Plan.from_hf(model, pipeline="1f1b", microbatches=PARTS, zero=zero)
        parallelize(model, make_mesh(device_type="cpu", **LAYOUTS[layout]), how)
        trained(model, tokens, 1)
        with torch.no_grad():
            found = whole(model(input_ids=tokens, use_cache=False).logits)
        torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-6)
        assert torch.equal(whole(model.generate(tokens, **asked)), written)

    simulate(8)(on_a_rank)


KINDS = {"gpt2": gpt2, "llama": llama}


def inputs() -> dict[str, Tensor]:
    tokens = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


MODELS = [
    ("gpt2", {"pp": 2}, "1f1b"),
    ("llama", {"pp": 2}, "interleaved"),
    ("gpt2", {"pp": 2, "tp": 2}, "1f1b"),
    ("llama", {"pp": 2, "dp": 2, "tp": 2}, "1f1b"),
]


@pytest.mark.models
@needs_transformers
@pytest.mark.parametrize(("kind", "sizes", "schedule"), MODELS, ids=str)
def test_hugging_face_models_run_in_stages(kind: str, sizes: dict[str, int], schedule: str):
    def on_a_rank(rank: int, world_size: int) -> None:
        plain, model = KINDS[kind](), KINDS[kind]()
        plan = Plan.from_hf(model, pipeline=schedule, microbatches=4)
        parallelize(model, mesh(device_type="cpu", **sizes), plan)
        for _ in range(2):
            step_both(model, plain, 4, rtol=1e-5, **inputs())
        assert list(dict(plain.named_parameters())) == [n for n, _ in model.named_parameters()]
        assert all(isinstance(one.grad, DTensor) for one in model.parameters())
        require_gradients(model, plain, rtol=1e-4, atol=1e-6)

    simulate(torch.Size(sizes.values()).numel())(on_a_rank)
