"""A run that diverges stops on every rank before it changes or saves anything, and says so.

A run's log is complete lines of JSON, written by rank 0 only, that others read meanwhile.

What a run says that its ranks hold is what the level of ZeRO leaves them.
"""

import errno
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vescale_comm import simulate
from vescale_parallel import TrainError
from vescale_parallel import mesh as make_mesh
from vescale_parallel.train import loop
from vescale_parallel.train.data import load_corpus
from vescale_parallel.train.log import RunLog, read_log
from vescale_parallel.train.loop import train
from vescale_parallel.train.memory import KINDS, held_bytes
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


def test_logs_are_read_while_they_are_written(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    assert read_log(path) == []
    with RunLog(tmp_path, active=True) as written:
        written.write("step", step=1, loss=0.1)
        with path.open("a") as other:
            other.write('{"event": "st')
        assert read_log(path) == [{"event": "step", "step": 1, "loss": 0.1}]


def test_other_ranks_write_nothing(tmp_path: Path):
    with RunLog(tmp_path, active=False) as written:
        written.write("step", step=1)
    assert not list(tmp_path.iterdir())


def no_constant(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")


def test_every_line_is_legal_json_whatever_the_numbers(tmp_path: Path):
    with RunLog(tmp_path, active=True) as written:
        written.write("step", loss=math.nan, norms=[math.inf, 1.0, {"a": -math.inf}], step=3)
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=no_constant)
    assert found == {"event": "step", "loss": None, "norms": [None, 1.0, {"a": None}], "step": 3}


def unwritable(rank: int, world_size: int, folder: str) -> None:
    given = {"data": (__file__,), "out": folder, "save_every": -1, "overwrite": True}
    train(given | {"mesh": "dp=2", "layers": 1, "dim": 16, "heads": 2, "kv_heads": 1, "hidden": 8})


def test_a_log_that_rank_0_alone_cannot_open_stops_every_rank(tmp_path: Path):
    (tmp_path / "log.jsonl").mkdir()
    for rank, one in enumerate(simulate(2).outcomes(unwritable, str(tmp_path))):
        assert one.type_name.rpartition(".")[2] == "TrainError"
        assert "log.jsonl" in one.message
        assert ("rank 0: " in one.message) is (rank == 1)


def test_what_saving_needs_is_asked_for_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "vescale_ckpt", None)
    with pytest.raises(TrainError, match="checkpoints need vescale-ckpt"):
        train({"out": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()


RANKS = 4


def held(zero: int) -> list[dict[str, int]]:
    options = Options(
        data=(__file__,), layers=2, dim=32, hidden=48, context=16, steps=2, batch=4, zero=zero
    )
    corpus = load_corpus(options.data, options.context)

    def rank(rank: int, world_size: int) -> Any:
        run = build(options, corpus, make_mesh(device_type="cpu", dp=RANKS))
        train_step(run)
        return held_bytes(run)

    every = simulate(RANKS).run(rank)
    assert all(one == every[0] for one in every)
    found: list[dict[str, int]] = every[0]
    return found


@pytest.mark.parametrize(("zero", "sharded"), [(1, 1), (2, 2), (3, 3)])
def test_each_level_shards_one_kind_more(zero: int, sharded: int):
    torch.manual_seed(0)
    whole, found = held(0)[0], held(zero)
    assert len(found) == RANKS
    for number, kind in enumerate(reversed(KINDS)):
        for rank in found:
            share = rank[kind] / whole[kind]
            # Padding, and counts of steps, are a few bytes.
            expected = 1 / RANKS if number < sharded else 1.0
            # The gradients of level 1 are packed in whole buffers, which are not gradients.
            if (zero, kind) != (1, "gradients"):
                assert share == pytest.approx(expected, rel=0.05), (kind, rank)


class FullBoard:
    """As tensorboard's writer: an error of its thread is raised by the next call."""

    def add_scalar(self, *values):
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self):
        self.add_scalar()


def test_a_full_disk_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    with RunLog(tmp_path, active=True) as written:
        written._board = FullBoard()
        for step in range(3):
            written.write("step", step=step, loss=1.0)
    assert caplog.text.count("the run goes on without its log") == 1
