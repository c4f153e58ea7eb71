"""`offload=` in transformers' Trainer: bits of the same plan without it, saved and resumed.

The device is the host here, so a link that copies within it stands for one; that nobody moves the
model afterwards, which would bring what lies on the host to the device, is asserted.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vescale_comm.testing import run
from vescale_parallel import Plan, Zero
from vescale_parallel import mesh as make_mesh
from vescale_parallel._zero import host

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
]


def made(folder: Path, zero: int, offload: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from transformers import default_data_collator as collator
    from vescale_parallel.integrations.transformers import parallel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    tokens = [[(row * 7 + at) % 32 for at in range(8)] for row in range(16)]
    rows: Any = [{"input_ids": one, "labels": one} for one in tokens]
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    options |= {"max_grad_norm": 0.5, "logging_steps": 1, "report_to": [], "use_cpu": True}
    args = TrainingArguments(str(folder), learning_rate=1e-2, disable_tqdm=True, **options)
    mesh = make_mesh(device_type="cpu", dp=2)
    plan = Plan(zero=Zero(zero, offload=offload))
    return parallel(Trainer)(
        model, args, train_dataset=rows, data_collator=collator, mesh=mesh, plan=plan
    )


def trained(folder: Path, zero: int, offload: Any, resume: str | None = None) -> Any:
    trainer = made(folder, zero, offload)
    moved: list[Any] = []
    if offload:
        trainer.model.to = lambda *where, **how: moved.append((where, how))
    trainer.train(resume_from_checkpoint=resume)
    assert not moved
    keys = ("loss", "grad_norm")
    logged = [one[key] for one in trainer.state.log_history for key in keys if key in one]
    return logged, {n: p.full_tensor().detach() for n, p in trainer.model.named_parameters()}


def alike(rank: int, world_size: int, folder: Path, zero: int, offload: Any) -> None:
    with patch.object(host, "is_host", return_value=False):
        logged, expected = trained(folder / "plain", zero, None)
        found = trained(folder / "moved", zero, offload)
        again = trained(folder / "moved", zero, offload, str(folder / "moved" / "checkpoint-2"))
    assert found[0] == again[0] == logged
    for name, one in expected.items():
        assert torch.equal(found[1][name], one), name
        assert torch.equal(again[1][name], one), name


@pytest.mark.parametrize(("zero", "offload"), [(3, True), (2, "optimizer")])
def test_what_lies_on_the_host_trains_as_on_the_device(
    tmp_path: Path, zero: int, offload: Any
) -> None:
    run(alike, 2, tmp_path, zero, offload)
