"""A run's log is complete lines of JSON, written by rank 0 only, that others read meanwhile."""

import json
import math
import sys
from pathlib import Path

import pytest
from vescale_comm import simulate
from vescale_parallel import TrainError
from vescale_parallel.train.log import RunLog, read_log
from vescale_parallel.train.loop import train


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
        assert ("rank 0 reports" in one.message) is (rank == 1)


def test_what_saving_needs_is_asked_for_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "vescale_ckpt", None)
    with pytest.raises(TrainError, match="checkpoints need vescale-ckpt"):
        train({"out": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()
