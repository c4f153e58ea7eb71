"""The recipes for other people's trainers print on two ranks of torchrun what they print alone."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.models
PAGE = Path(__file__).resolve().parents[1] / "tools" / "docs" / "pages" / "trainers.md"
RECIPES = {
    title: code
    for title, code in re.findall(r"^## (.*?)\n.*?^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S)
}
HUGGING_FACE = "transformers accelerate"
LIBRARIES = {
    "transformers": HUGGING_FACE,
    "Stages in transformers' Trainer": HUGGING_FACE,
    "accelerate": "accelerate",
}


def missing(title: str) -> str | None:
    """Why a recipe cannot run here."""
    needed = LIBRARIES.get(title, "lightning").split()
    absent = [one for one in needed if importlib.util.find_spec(one) is None]
    return f"{absent[0]} is not installed" if absent else None


def printed(command: list[str], folder: Path) -> list[str]:
    """What a program says about its training, without the words of its libraries."""
    folder.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"^\d+\.\d+$|'loss': '?[\d.]+|'grad_norm': '?[\d.]+", done.stdout, re.M)


def test_every_trainer_has_a_recipe() -> None:
    assert list(RECIPES) == [
        "transformers",
        "Stages in transformers' Trainer",
        "accelerate",
        "Lightning Fabric",
        "Lightning Trainer",
        "Stages in Lightning's Trainer",
    ]


@pytest.mark.parametrize("title", RECIPES)
def test_on_two_ranks_it_is_the_program_of_one(title: str, tmp_path: Path) -> None:
    if reason := missing(title):
        pytest.skip(reason)
    program = tmp_path / "program.py"
    program.write_text(RECIPES[title])
    alone = printed([sys.executable, str(program)], tmp_path / "alone")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    several = printed([*launch, "--nproc-per-node", "2", str(program)], tmp_path / "several")
    assert alone
    assert several == alone
