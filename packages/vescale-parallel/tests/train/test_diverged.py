"""A run that diverges stops on every rank before it changes or saves anything, and says so."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vescale_comm import simulate
from vescale_parallel import mesh as make_mesh
from vescale_parallel.train import loop
from vescale_parallel.train.data import load_corpus
from vescale_parallel.train.options import Options
from vescale_parallel.train.run import (
    DivergedError,
    Run,
    build,
    require_finite_parameters,
    train_step,
)

SMALL = {"layers": 1, "dim": 16, "heads": 2, "kv_heads": 1, "hidden": 16, "context": 8, "batch": 4}


def start(parallel: bool) -> Run:
    options = Options(data=(__file__,), steps=4, **SMALL)
    mesh = make_mesh(dp=2, tp=2, device_type="cpu") if parallel else None
    return build(options, load_corpus(options.data, options.context), mesh)


def spoil(run: Run, value: float) -> None:
    with torch.no_grad():
        run.model.get_parameter("norm.weight").mul_(value)


def snapshot(model: nn.Module) -> dict[str, list[Any]]:
    return {name: [p.detach().to_local().clone()] for name, p in model.named_parameters()}


def diverge(rank: int, world_size: int, value: float) -> str:
    run = start(parallel=True)
    train_step(run)
    require_finite_parameters(run)
    spoil(run, value)
    before = snapshot(run.model)
    run.checkpoint = Path("runs/x/step-00000001")
    with pytest.raises(DivergedError) as caught:
        train_step(run)
    with pytest.raises(DivergedError, match="the norm of the parameters after step 1 is"):
        require_finite_parameters(run)
    assert run.step == 1
    for name, (local,) in snapshot(run.model).items():
        assert torch.equal(local.nan_to_num(7.0), before[name][0].nan_to_num(7.0))
    return str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_every_rank_stops_before_the_update(value: float):
    told = simulate(4)(diverge, value)
    assert len(set(told)) == 1
    for part in ("of step 2 is nan", "runs/x/step-00000001", "smaller --lr (it is 0.001)"):
        assert part in told[0]


def events(folder: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    text = (folder / "log.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.mark.parametrize("at", ["gradient", "last update", "validation"])
def test_good_checkpoints_stay_as_they_are(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Wherever the NaN comes from, the checkpoints of before it are there, and no other."""
    pytest.importorskip("vescale_ckpt")
    real_step, real_validate = loop.train_step, loop.validate

    def step(run: Run) -> Any:
        if at == "gradient" and run.step == 3:
            spoil(run, math.nan)
        result = real_step(run)
        if at == "last update" and run.step == 4:
            spoil(run, math.nan)
        return result

    def validation(run: Run) -> float:
        return math.inf if at == "validation" and run.step == 4 else real_validate(run)

    monkeypatch.setattr(loop, "train_step", step)
    monkeypatch.setattr(loop, "validate", validation)
    every = 0 if at == "last update" else 2
    given = {"data": (__file__,), "out": str(tmp_path), "steps": 4, "save_every": 2} | SMALL
    with pytest.raises(DivergedError, match=r"last good checkpoint is .*step-00000002"):
        loop.train(given | {"validate_every": every})
    assert sorted(one.name for one in tmp_path.iterdir()) == ["log.jsonl", "step-00000002"]
    last = events(tmp_path)[-1]
    assert last["event"] == "diverged"
    assert "training has diverged" in last["reason"]
