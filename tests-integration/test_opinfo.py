"""Every entry of torch's operator database, sharded, is as on one device; see the sweep's docs.

Each run takes another part of them, drawn by a seed: that of `--opinfo-seed`, or the date. The
whole takes `nox -s integration -- --opinfo-all`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import vescale_dtensor  # noqa: F401 - left out where it is not installed

ROOT = Path(__file__).resolve().parents[1]
SWEEP = ROOT / "packages" / "vescale-dtensor" / "opinfo"
SHARE = 14  # one entry out of so many: fifty, in two minutes
GOOD = {"passed", "plain", "excluded", "not on CPU"}


def sweep(tmp_path, *arguments, timeout):
    out = tmp_path / "opinfo.json"
    command = [sys.executable, str(SWEEP), "--json", str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # The progress goes to where pytest shows it.
    done = subprocess.run(command, env=environment, timeout=timeout, check=False)
    assert out.exists(), f"the sweep ended with status {done.returncode} and wrote nothing"
    return json.loads(out.read_text())["entries"]


def problems(entries):
    return [
        f"{name}: {failure['kind']} in {failure['trial']}: {failure['error']}"
        for name, entry in entries.items()
        if entry["vescale"]["status"] not in GOOD
        for failure in entry["vescale"]["failures"][:1]
    ]


@pytest.fixture
def seed(request):
    given = request.config.getoption("--opinfo-seed")
    return str(given if given is not None else int(f"{datetime.now(UTC):%Y%m%d}"))


@pytest.mark.timeout(1200)
def test_a_part_that_rotates(tmp_path, seed, request):
    if request.config.getoption("--opinfo-all"):
        pytest.skip("all of it runs")
    found = sweep(
        tmp_path, "--libraries", "vescale", "--share", str(SHARE), "--seed", seed, timeout=1100
    )
    assert len(found) > 20
    assert not problems(found), f"--opinfo-seed {seed}\n" + "\n".join(problems(found))


@pytest.mark.timeout(7200)
def test_all(tmp_path, seed, request):
    if not request.config.getoption("--opinfo-all"):
        pytest.skip("takes half an hour: ask for it with --opinfo-all")
    found = sweep(tmp_path, "--libraries", "vescale", "--seed", seed, timeout=7000)
    assert len(found) > 600
    assert not problems(found), f"--opinfo-seed {seed}\n" + "\n".join(problems(found))


CRASHING = """
import ctypes, json, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    print(json.dumps({"at": "the second trial"}), flush=True)
    if "sort" in line:
        ctypes.string_at(0)
    time.sleep(60)
"""


def test_a_hang_and_a_crash_are_named(tmp_path, monkeypatch):
    """The sweep's own promise, kept with workers that do nothing else."""
    monkeypatch.syspath_prepend(str(SWEEP))
    from _sweep import Bounds, sweep

    (tmp_path / "worker.py").write_text(CRASHING)
    bounds = Bounds(workers=1, seconds=2, program=tmp_path / "worker.py")
    heard = []
    found = sweep(
        [("vescale", "sort"), ("vescale", "add")], bounds, lambda task, _: heard.append(task)
    )
    crashed, hung = found["vescale", "sort"], found["vescale", "add"]
    assert (crashed["status"], hung["status"]) == ("crashed", "hung")
    assert "SIGSEGV" in crashed["failures"][0]["error"]
    assert "no answer within 2 s" in hung["failures"][0]["error"]
    assert crashed["failures"][0]["trial"] == hung["failures"][0]["trial"] == "the second trial"
    assert len(heard) == 2
