"""The main job, made small: it runs, its promises hold, and it leaves behind what it says."""

import json
from pathlib import Path

import pytest
from vescale_parallel.train.log import read_log

from tools.compare.__main__ import main

SMALL = ["--layers", "1", "--dim", "32", "--hidden", "48", "--context", "16", "--data", __file__]


def test_one_device_a_mesh_and_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--steps", "3", "--more-steps", "2", "--mesh", "dp=2", "--resume-on", "tp=2"]
    arguments += ["--zero-on", "dp=2"]
    assert main([*arguments, "--out", str(tmp_path), *SMALL]) == 0
    said = capsys.readouterr().out
    for part in (
        "loss on one device  loss on dp=2  difference",
        "initial parameters bitwise equal: yes (sha256 ",
        "dropout masks bitwise equal:      yes (3 masks of the first step)",
        "largest loss difference: ",
        "largest difference on tp=2: ",
        "dp=2, zero=3",
        "held between steps, MB of the rank with most",
        "tokens/s",
    ):
        assert part in said
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "mesh" / "step-00000003").is_dir()
    assert json.loads((tmp_path / "results.json").read_text())["broken"] == []
    runs = {event["run"] for event in read_log(tmp_path / "log.jsonl")}
    assert runs == {"one device", "dp=2", "dp=2, zero=3", "resumed on tp=2"}


def test_a_run_that_cannot_start_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--out", str(tmp_path), "--data", "/nowhere"]) == 2
    said = capsys.readouterr().err
    assert "one device: ended with status 2" in said
    assert "--data /nowhere: no such file or folder" in said
