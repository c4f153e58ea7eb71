"""Other people's libraries train a parallelised model as one device; `ecosystem/` has the cases.

A few run with the other tests of models; `nox -s ecosystem` runs all, and writes the table.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from ecosystem_models import llama, token_rows
from ecosystem_runs import FOLDER, compare
from ecosystem_table import FILE, LIMIT, load_name, verdicts
from vescale_comm.testing import run
from vescale_parallel import ParallelError

pytestmark = pytest.mark.models
FEW = [
    ("transformers", "Trainer", "dp=2, tp=2"),
    ("transformers", "Trainer, evaluation", "dp=2, tp=2"),
    ("transformers", "Trainer, resumed", "dp=4, zero=3"),
    ("transformers", "Trainer, microbatches", "pp=2, dp=2"),
    ("transformers", "Trainer, microbatches, smoothed labels", "pp=2, dp=2"),
    ("transformers", "Trainer, microbatches, own loss", "dp=2, tp=2"),
    ("accelerate", "Accelerator, resumed", "dp=2, tp=2"),
    ("accelerate", "Accelerator, a stream", "dp=4, zero=3"),
    ("accelerate", "Accelerator, rank by rank", "dp=2, tp=2"),
    ("lightning", "Trainer", "dp=4, zero=3"),
    ("peft", "LoRA", "dp=2, tp=2"),
    ("trl", "DPOTrainer, precomputed", "dp=2, tp=2"),
]
# What the cases of a library import beside it.
BESIDE = {"transformers": ["accelerate"], "peft": ["transformers"]}
BESIDE |= {"trl": ["transformers", "accelerate", "peft", "datasets"]}


@pytest.mark.parametrize(("library", "case", "layout"), FEW)
def test_a_mesh_trains_as_one_device(library: str, case: str, layout: str) -> None:
    for needed in [library, *BESIDE.get(library, [])]:
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    found = run(compare, 4, library, case, [layout], timeout=280)[0][layout]
    worst = max(found, key=found.__getitem__)
    assert found[worst] <= LIMIT, (worst, found[worst])


def test_the_table_has_every_library() -> None:
    rows = re.findall(r"^\| (\S+) \d", FILE.read_text(encoding="utf-8"), re.M)
    assert set(rows) == {load_name(path.stem) for path in FOLDER.glob("*.py")}


def test_a_table_is_compared_by_what_it_says_of_each_case() -> None:
    row = "| peft 0.21.2 | LoRA | 2 | 2e-07 | 3e-04 (1e-02) | no |"
    assert verdicts(row) == verdicts("| peft 0.22 | LoRA | 2 | 5e-07 | 1e-05 (1e-02) | no |")
    assert verdicts(row) != verdicts(row.replace("no", "2e-07"))
    assert verdicts(row) != verdicts(row.replace("LoRA", "DoRA"))
    assert len(verdicts(FILE.read_text(encoding="utf-8"))) > 20


def trains_alone(rank: int, world_size: int, folder: str) -> str:
    from transformers import Trainer, TrainingArguments
    from vescale_parallel import Plan, mesh
    from vescale_parallel.integrations.transformers import parallel

    class Own(Trainer):
        def compute_loss(self, model: object, inputs: object, **more: object) -> object:
            raise AssertionError

    args = TrainingArguments(folder, max_steps=1, report_to=[], disable_tqdm=True, use_cpu=True)
    options = {"mesh": mesh(dp=1, device_type="cpu"), "plan": Plan(microbatches=2)}
    with pytest.raises(ParallelError) as caught:
        parallel(Own)(llama(), args, train_dataset=token_rows(), **options).train()
    return str(caught.value)


def test_a_trainer_that_computes_its_loss_itself_is_told(tmp_path: Path) -> None:
    for needed in ["transformers", "accelerate"]:
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    (said,) = run(trains_alone, 1, str(tmp_path), timeout=200)
    assert said.startswith(
        "Own.compute_loss calls the model, and this plan's steps run it in parts"
    )


def ends_with_one_row(rank: int, world_size: int, folder: str) -> None:
    from transformers import Trainer, TrainingArguments, default_data_collator
    from vescale_parallel import Plan, mesh
    from vescale_parallel.integrations.transformers import parallel

    usual = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    sizes = {"per_device_train_batch_size": 7, "num_train_epochs": 1}
    rows = {"train_dataset": token_rows(), "data_collator": default_data_collator}
    options = {"mesh": mesh(dp=1, device_type="cpu"), "plan": Plan(microbatches=2)}

    def trained(kind: type, **options: object) -> list[torch.Tensor]:
        model = llama(attention_dropout=0.0)
        kind(model, TrainingArguments(folder, **usual, **sizes), **rows, **options).train()
        return [one.detach() for one in model.parameters()]

    for one, other in zip(trained(parallel(Trainer), **options), trained(Trainer), strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-6)


def test_the_last_batch_of_an_epoch_makes_fewer_microbatches(tmp_path: Path) -> None:
    for needed in ["transformers", "accelerate"]:
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    assert len(token_rows()) % 7 == 1
    run(ends_with_one_row, 1, str(tmp_path), timeout=200)
