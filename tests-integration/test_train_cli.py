"""Bad input on the command line: every rank says one clear line, exits non-zero, and none hangs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from vescale_parallel.train.__main__ import main

SMALL = ["--layers", "1", "--dim", "32", "--hidden", "48", "--context", "16", "--steps", "2"]


def torchrun(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [sys.executable, *launcher, "-m", "vescale_parallel.train", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def lines_of_ranks(text: str) -> dict[int, str]:
    return {
        int(rank): line for rank, line in re.findall(r"^\[rank (\d+)\] error: (.*)$", text, re.M)
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "dp=2,tp=4"], "mesh(dp=2, tp=4) needs 8 process(es) and 3 run(s)"),
        (["--mesh", "dp=3", "--data", "/nowhere"], "--data /nowhere: no such file or folder"),
        (["--stepz", "3"], "Did you mean '--steps'?"),
        (["--mesh", "dp=3", "--resume", "/nowhere/step-1"], "/nowhere/step-1"),
    ],
)
def test_every_rank_says_what_is_wrong(arguments: list[str], message: str, tmp_path: Path):
    done = torchrun(3, *arguments, "--out", str(tmp_path))
    assert done.returncode != 0
    lines = lines_of_ranks(done.stderr)
    assert sorted(lines) == [0, 1, 2]
    assert all(message in line for line in lines.values())
    # torchrun itself ends with a traceback of its own; none goes through our code.
    assert not re.search(r'^ *File ".*vescale', done.stderr, re.M)
    assert not (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "dp=2"], "mesh(dp=2) needs 2 process(es) and 1 run(s)"),
        (["--mesh", "dp"], "'dp' is not AXIS=SIZE"),
        (["--mesh", "dpp=1"], "no axis 'dpp'. Did you mean 'dp'?"),
        (["--context", "1000000", "--data", __file__], "Give more --data, or a smaller --context"),
        (["--resume", "/nowhere/step-1"], "/nowhere/step-1"),
        (["--device", "tpu"], "--device tpu: this machine has 'cpu'"),
        (["--steps", "no"], "invalid int value: 'no'"),
    ],
)
def test_one_process_says_what_is_wrong(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert message in said


def test_a_run_and_its_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = ["--out", str(tmp_path), "--data", __file__, *SMALL]
    assert main(out) == 0
    assert main(out) == 2
    assert "holds a run already" in capsys.readouterr().err
    resumed = ["--out", str(tmp_path), "--resume", str(tmp_path / "step-00000002")]
    assert main([*resumed, "--data", __file__, "--steps", "3"]) == 0
    assert "step     3  loss" in capsys.readouterr().out
    assert main([*resumed, "--data", __file__, "--steps", "2"]) == 2
    assert "is at step 2 already" in capsys.readouterr().err
    assert main([*resumed, "--steps", "3"]) == 2
    assert "was trained on other text" in capsys.readouterr().err
