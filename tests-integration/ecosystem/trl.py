"""trl: supervised fine-tuning and preferences, at their defaults, with adapters too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from ecosystem_models import WORDS, llama
from ecosystem_runs import Found, Run, parameters
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from vescale_parallel.integrations.transformers import parallel

PACKAGES = ("trl", "transformers", "peft", "datasets")
ENDS = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
USUAL: dict[str, Any] = {"per_device_train_batch_size": 5, "max_steps": 3, "logging_steps": 1}
USUAL |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "learning_rate": 1e-3}
USUAL |= {"bf16": False, "disable_tqdm": True, "adam_epsilon": 1e-4}


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{at}" for at in range(WORDS - 4))]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, **ENDS)


def text(rows: int, words: int, seed: int) -> list[str]:
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, words, (rows,), generator=drawn).tolist()
    return [
        " ".join(f"w{at}" for at in torch.randint(WORDS - 4, (n,), generator=drawn).tolist())
        for n in lengths
    ]


def model() -> Any:
    made = llama(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return made


def trained(run: Run, kind: Any, args: Any, rows: Any, **options: Any) -> Found:
    given = {"train_dataset": rows, "processing_class": tokenizer(), "model": model(), **options}
    if run.mesh is None:
        made = kind(args=args, **given)
    else:
        made = parallel(kind)(args=args, mesh=run.mesh, plan=run.plan, **given)
    made.train()
    history = made.state.log_history
    left_out = ("runtime", "per_second", "epoch", "memory", "step", "flos")
    keys = [key for key in history[0] if not any(one in key for one in left_out)]
    told = {key: [one[key] for one in history if key in one] for key in keys}
    return {**told, **parameters(made.model)}


def sft(run: Run, **options: Any) -> Found:
    config = options.pop("config", {})
    args = SFTConfig(str(run.folder), max_length=16, **{**USUAL, **config})
    return trained(run, SFTTrainer, args, Dataset.from_dict({"text": text(15, 12, 0)}), **options)


def dpo(run: Run, **options: Any) -> Found:
    base = run.folder / "base"
    if not run.mesh or dist.get_rank() == 0:
        model().save_pretrained(base)
    if run.mesh:
        dist.barrier()
    columns = {"prompt": text(15, 5, 0), "chosen": text(15, 7, 1), "rejected": text(15, 7, 2)}
    args = DPOConfig(str(run.folder), max_length=24, **USUAL, **options.pop("config", {}))
    return trained(run, DPOTrainer, args, Dataset.from_dict(columns), model=str(base), **options)


def adapter() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


CASES = {
    "SFTTrainer": sft,
    "SFTTrainer, packing": lambda run: sft(run, config={"packing": True}),
    "SFTTrainer, LoRA": lambda run: sft(run, peft_config=adapter()),
    "DPOTrainer": dpo,
    "DPOTrainer, precomputed": lambda run: dpo(run, config={"precompute_ref_log_probs": True}),
    "DPOTrainer, LoRA": lambda run: dpo(run, peft_config=adapter()),
}
