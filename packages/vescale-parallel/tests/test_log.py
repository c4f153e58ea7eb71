"""A run's log is complete lines of JSON, written by rank 0 only, that others read meanwhile."""

import json
import math
from pathlib import Path

from vescale_parallel.train.log import RunLog, read_log


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
