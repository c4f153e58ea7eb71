"""The first minutes on a GPU: planted faults are found, and nothing that hangs or dies takes more.

A fault is a file that a section's process runs first (`--with`), as a repair on trial would be.
"""

import json
import runpy
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tools.first_gpu import findings, report, schedule
from tools.first_gpu.cases import CaseResult, alike, both, same_bits
from tools.first_gpu.catalogue import SECTIONS
from tools.first_gpu.findings import Finding, append, latest, read
from tools.first_gpu.job import FILES, main
from tools.first_gpu.options import parse
from tools.first_gpu.paths import environment
from tools.first_gpu.sections import kernels, mesh, reads, rng

FAULTS = Path(__file__).parent / "first_gpu_faults"
CPU = torch.device("cpu")


def ask(section, name: str) -> CaseResult:
    """Ask a case of a section in this process."""
    (case,) = (one for one in section.cases(CPU) if one.name == name)
    return case.ask(CPU)


def planted(monkeypatch: pytest.MonkeyPatch, fault: str, owner: object, name: str) -> None:
    """Run a fault's file, and take back what it has changed at the end of the test."""
    monkeypatch.setattr(owner, name, getattr(owner, name))
    runpy.run_path(str(FAULTS / f"{fault}.py"))


def run(folder: Path, *arguments: str) -> tuple[int, dict[tuple[str, str], Finding]]:
    """Run the command, with sections in processes of their own."""
    status = main(["--device", "cpu", "--out", str(folder), *arguments])
    found = {(one.section, one.case): one for one in latest(read(folder / "findings.jsonl"))}
    return status, found


# --- Planted faults


def test_a_wrong_offset_in_a_map_is_found(monkeypatch):
    from vescale_rng._portable import tiles

    name = "portable Normal(mean=0.1, std=0.7), float32"
    assert ask(rng, name).fine
    tiles.tiles_of.cache_clear()
    planted(monkeypatch, "wrong_offset", tiles, "_tile")
    found = ask(rng, name)
    tiles.tiles_of.cache_clear()
    assert found.fine is False
    assert "rank" in found.got


def test_a_missing_wait_is_found(monkeypatch):
    from vescale_comm._simulation.group import SimulatedWork

    name = "train dp=2"
    assert ask(mesh, name).fine
    planted(monkeypatch, "missing_wait", SimulatedWork, "wait")
    found = ask(mesh, name)
    assert found.fine is False
    assert "rank" in found.got


def test_a_host_read_in_a_step_is_found_with_its_line(monkeypatch):
    assert ask(reads, "a step of dp=2").fine
    planted(monkeypatch, "host_read", torch.nn.LayerNorm, "forward")
    found = ask(reads, "a step of dp=2")
    assert found.fine is False
    assert "first_gpu_faults/host_read.py" in found.more
    assert "in wrong" in found.more


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_a_kernel_with_a_wrong_mask_is_found(tmp_path):
    arguments = ("--only", "kernels", "--case", "fold", "--minutes", "3")
    status, found = run(tmp_path, *arguments)
    assert (status, found["kernels", "fold"].status) == (0, findings.FINE)
    status, found = run(tmp_path, *arguments, "--with", str(FAULTS / "wrong_mask.py"))
    assert (status, found["kernels", "fold"].status) == (1, findings.DIFFERS)


@pytest.mark.slow
def test_what_hangs_or_dies_is_named_and_the_rest_goes_on(tmp_path, capsys):
    limit = ("--minutes", "4", "--case-limit", "5")
    fault = ("--with", str(FAULTS / "ends_badly.py"))
    status, found = run(tmp_path, "--only", "machine", *limit, *fault)
    assert status == 1
    statuses = {case: one.status for (_, case), one in found.items()}
    assert statuses == {
        "first": findings.FINE, "hangs": findings.HUNG, "dies": findings.DIED,
        "raises": findings.RAISED, "ends": findings.DIED, "last": findings.FINE,
    }  # fmt: skip
    named = {case: one for (_, case), one in found.items()}
    assert named["dies"].got == "died by SIGSEGV"
    assert named["ends"].got == "exit status 3"
    assert "first_gpu_faults/ends_badly.py:" in named["hangs"].where
    assert "first_gpu_faults/ends_badly.py:" in named["dies"].where
    assert named["raises"].got == "ValueError: not today"
    shown = capsys.readouterr().out
    assert 'python -m tools.first_gpu --device cpu --only machine --case "hangs"' in shown
    check_files(tmp_path)


@pytest.mark.slow
def test_an_interrupted_run_reports_what_it_has_found(tmp_path):
    command = [sys.executable, "-m", "tools.first_gpu", "--device", "cpu", "--only", "machine"]
    command += ["--out", str(tmp_path), "--minutes", "4", "--with", str(FAULTS / "ends_badly.py")]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    file = tmp_path / "findings.jsonl"
    while not any(one.status == findings.BEGUN for one in latest(read(file))):
        time.sleep(0.1)
        assert process.poll() is None
    process.terminate()
    assert process.wait(30) == 130
    document = json.loads((tmp_path / "report.json").read_text())
    statuses = {one["case"]: one["status"] for one in document["findings"]}
    assert statuses["hangs"] == findings.UNFINISHED


def check_files(folder: Path) -> None:
    """What was written: a few files, of which the page and the data say the same."""
    written = {one.name for one in folder.iterdir()}
    assert written <= set(FILES)
    assert len(FILES) <= 8
    document = json.loads((folder / "report.json").read_text())
    page = (folder / "report.md").read_text()
    for one in document["findings"]:
        assert one["case"] in page
        assert one["status"] in findings.STATUSES
        assert "--case" in one["command"]


@pytest.mark.slow
def test_all_that_runs_without_a_gpu_in_a_minute(tmp_path):
    start = time.monotonic()
    status, found = run(tmp_path, "--minutes", "1")
    assert time.monotonic() - start < 75
    assert status == 0, [one for one in found.values() if one.bad]
    assert {section for section, _ in found} == {one.name for one in SECTIONS}
    assert sum(one.status == findings.FINE for one in found.values()) > 10
    check_files(tmp_path)


# --- What it is made of


def test_every_section_has_cases_of_different_names():
    for section in SECTIONS:
        module = __import__(f"tools.first_gpu.sections.{section.name}", fromlist=["cases"])
        names = [one.name for one in module.cases(CPU)]
        assert names
        assert len({*names}) == len(names), section.name
        # They are given to `--case`, a glob in quotes.
        assert not any(set(name) & set('*?[]"') for name in names)


def test_what_needs_a_gpu_says_so_in_a_line():
    from tools.first_gpu.cases import NEEDS

    for section in SECTIONS:
        module = __import__(f"tools.first_gpu.sections.{section.name}", fromlist=["cases"])
        assert {need for one in module.cases(CPU) for need in one.needs} <= NEEDS.keys()
    assert all("\n" not in text for text in NEEDS.values())


def test_bits_are_compared_and_what_differs_is_said():
    x = torch.tensor([1.0, float("nan"), -0.0])
    assert same_bits({"x": (x, x.clone())}).fine
    found = same_bits({"x": (x, torch.tensor([1.0, float("nan"), 0.0]))})
    assert found.fine is False
    assert "1 of 3 elements, first at 2" in found.got
    assert not same_bits({"x": (x, x.double())}).fine
    assert not same_bits({"x": (x, x[:2])}).fine
    assert same_bits({"x": (3, 3)}).fine
    assert not same_bits({"x": ("a", "b")}).fine


def test_what_is_close_is_told_from_what_is_not():
    x = torch.tensor([100.0, 1.0])
    assert alike({"x": (x, x + 1e-4)}).fine
    assert alike({"x": (x, x.clone())}).got == "the same bits (1 compared)"
    assert not alike({"x": (x, x + 0.1)}).fine
    assert not alike({"x": (x, x * float("nan"))}).fine
    assert not both(alike({"x": (x, x)}), alike({"x": (x, x + 1)})).fine


def test_findings_are_appended_by_many_and_the_last_word_counts(tmp_path):
    file = tmp_path / "findings.jsonl"
    append(file, Finding(section="rng", case="a", status=findings.BEGUN))
    append(file, Finding(section="rng", case="b", status=findings.CANNOT))
    append(file, Finding(section="rng", case="a", status=findings.FINE))
    with file.open("a") as half:
        half.write('{"section": "rng", "ca')
    assert [(one.case, one.status) for one in latest(read(file))] == [
        ("a", findings.FINE),
        ("b", findings.CANNOT),
    ]


def test_time_is_shared_out_by_weight_and_what_is_left_over_is_the_others(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(schedule.time, "monotonic", lambda: now[0])
    asked = []

    class Watch:
        def __init__(self, section, options, file, log, until, end, stop):
            asked.append((section.name, until - now[0], end))

        def run(self):
            now[0] += 1.0

    monkeypatch.setattr(schedule, "Watch", Watch)
    options = parse(["--device", "cpu", "--minutes", "5", "--at-once", "1"])
    schedule.run(options, Path("a"), Path("b"), lambda section: None)
    assert [name for name, _, _ in asked] == [one.name for one in SECTIONS]
    assert {end for _, _, end in asked} == {300.0}
    given = {name: seconds for name, seconds, _ in asked}
    # The last one has all that is left: the others took a second each.
    assert given["speed"] == pytest.approx(0.94 * 300 - (len(SECTIONS) - 1), abs=1)
    assert given["mesh"] > given["kernels"] / 2 > 0


def test_words_that_cannot_be_read_are_refused(capsys):
    for words, said in (
        (["--only", "rgn"], "no section is called 'rgn'"),
        (["--minutes", "0"], "above 0"),
        (["--with", "/nowhere.py"], "there is no file"),
    ):
        with pytest.raises(SystemExit):
            parse(["--device", "cpu", *words])
        assert said in capsys.readouterr().err


def test_help_teaches():
    command = [sys.executable, "-m", "tools.first_gpu", "--help"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
    assert all(one.name in done.stdout and one.title in done.stdout for one in SECTIONS)
    assert "examples:" in done.stdout


def test_a_section_is_not_taken_for_a_rank_and_finds_the_packages():
    given = {"RANK": "3", "WORLD_SIZE": "4", "PYTHONPATH": "/mine", "TRITON_INTERPRET": "1"}
    made = environment(given, cuda=True, interpreted=False)
    assert {"RANK", "WORLD_SIZE", "TRITON_INTERPRET"}.isdisjoint(made)
    assert made["PYTHONPATH"].endswith("/mine")
    assert "vescale-comm/src" in made["PYTHONPATH"]
    assert environment({}, cuda=False, interpreted=True)["TRITON_INTERPRET"] == "1"


def test_a_table_can_be_read_as_it_is():
    lines = report.table(("a", "bb"), [("x | y", "long " * 60)]).split("\n")
    assert len({len(line) for line in lines}) == 1
    assert "x \\| y" in lines[2]
    assert lines[2].rstrip("| ").endswith("...")


def test_kernels_of_a_gpu_are_many_and_interpreted_ones_few():
    needs = [one.needs for one in kernels.cases(CPU)]
    assert needs.count(("many kernels",)) > 100
    assert 8 < needs.count(("kernels",)) < 16
