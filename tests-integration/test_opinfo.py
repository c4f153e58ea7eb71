"""Every entry of torch's operator database, sharded, is as on one device; see the sweep's docs.

Each run takes a part of them, drawn by the seed `--opinfo-seed`, of which 0 is the default. The
whole takes `nox -s integration -- --opinfo-all`; `--opinfo-only sort` leaves all others out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import vescale_dtensor  # noqa: F401 - left out where it is not installed

ROOT = Path(__file__).resolve().parents[1]
SWEEP = ROOT / "packages" / "vescale-dtensor" / "opinfo"
SHARE = 14  # one entry out of so many: fifty, in two minutes
GOOD = {"passed", "plain", "excluded", "not on CPU"}


@pytest.fixture
def sweep(tmp_path, seed, request, capfd):
    """Runs the sweep of vescale-dtensor, with this run's seed: its report by entry."""
    only = request.config.getoption("--opinfo-only")

    def run(*arguments, timeout):
        out = tmp_path / "opinfo.json"
        chosen = ["--only", *only] if only else []
        command = [sys.executable, str(SWEEP), "--libraries", "vescale", "--json", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with capfd.disabled():  # half an hour without a word would look like a hang
            done = subprocess.run(
                [*command, "--seed", seed, *chosen, *arguments],
                env=environment,
                timeout=timeout,
                check=False,
            )
        assert out.exists(), f"the sweep ended with status {done.returncode} and wrote nothing"
        found = json.loads(out.read_text())["entries"]
        assert found, f"no entry is called {only}"
        return found

    return run


def problems(entries):
    return [
        f"{name}: {failure['kind']} in {failure['trial']}: {failure['error']}"
        for name, entry in entries.items()
        if entry["vescale"]["status"] not in GOOD
        for failure in entry["vescale"]["failures"][:1]
    ]


@pytest.fixture
def seed(request):
    return str(request.config.getoption("--opinfo-seed"))


@pytest.mark.timeout(1200)
def test_a_part_that_is_drawn(sweep, seed, request):
    if request.config.getoption("--opinfo-all"):
        pytest.skip("all of it runs")
    only = request.config.getoption("--opinfo-only")
    found = sweep("--share", "1" if only else str(SHARE), timeout=1100)
    assert only or len(found) > 20
    assert not problems(found), f"--opinfo-seed {seed}\n" + "\n".join(problems(found))


@pytest.mark.timeout(7200)
def test_all(sweep, seed, request):
    if not request.config.getoption("--opinfo-all"):
        pytest.skip("takes half an hour: ask for it with --opinfo-all")
    found = sweep(timeout=7000)
    assert request.config.getoption("--opinfo-only") or len(found) > 600
    assert not problems(found), f"--opinfo-seed {seed}\n" + "\n".join(problems(found))


# The sweep's own workers, where the trials of some entries go wrong in ways of their own.
DAMAGED = """
import ctypes, os, signal, sys, time

sys.path.insert(0, {sweep!r})
import _worker
from _judge import judge

ENDS = {{
    "sort": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "topk": lambda: ctypes.string_at(0),
    "add": lambda: time.sleep(600),
}}


def damaged(name, library, effort, told):
    def telling(trial):
        told(trial)
        if "square" in trial or name != "add":
            ENDS.get(name, lambda: None)()

    return judge(name, library, effort, telling)


_worker.judge = damaged
_worker.main()
"""
ENDED = {"sort": "SIGKILL", "topk": "SIGSEGV", "add": "no answer within 30 s"}


@pytest.mark.timeout(600)
def test_a_hang_and_crashes_are_named_and_the_sweep_goes_on(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SWEEP))
    from _sweep import Bounds, sweep

    (tmp_path / "worker.py").write_text(DAMAGED.format(sweep=str(SWEEP)))
    bounds = Bounds(workers=1, seconds=30, samples=1, program=tmp_path / "worker.py")
    names = ["neg", "sort", "add", "topk", "flip"]
    heard = []
    found = sweep(
        [("vescale", name) for name in names], bounds, lambda task, _: heard.append(task[1])
    )
    statuses = {name: found["vescale", name]["status"] for name in names}
    assert statuses == {
        "neg": "passed", "sort": "crashed", "add": "hung", "topk": "crashed", "flip": "passed"
    }  # fmt: skip
    for name, words in ENDED.items():
        (failure,) = found["vescale", name]["failures"]
        assert words in failure["error"]
        assert failure["trial"].startswith("sample 0")
    assert "square" in found["vescale", "add"]["failures"][0]["trial"]
    assert heard == names
    assert len(problems({name: {"vescale": found["vescale", name]} for name in names})) == 3
