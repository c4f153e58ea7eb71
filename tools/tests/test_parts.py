"""Everything that a change does not run belongs to one part, and the record says when it ran."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import omitted_cases, parts
from tools.packages import ROOT
from tools.parts import EVERY, NEVER, PARTS, Part, parse_part, read_record, take

FILE = """
import pytest

def test_core(): pass

@pytest.mark.slow
@pytest.mark.parametrize("n", range(30))
def test_slow(n): pass

@pytest.mark.models
def test_models(): pass
"""


def run(folder: Path, *arguments: str) -> str:
    (folder / "test_it.py").write_text(FILE)
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    command = [sys.executable, "-m", "pytest", *settings, "-p", "tools.omitted_cases"]
    command += ["-p", "no:cacheprovider", *arguments, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_of_the_core_says_what_it_left_out(workers, tmp_path, monkeypatch):
    said = run(tmp_path, "-n", workers)
    assert "not in the core, so not run: 31 of 32 cases" in said
    assert "  31 of 32  test_it.py" in said
    assert f"nox -s all_parts -- {PARTS}/{PARTS}" in said


def test_parts_are_disjoint_and_hold_everything(tmp_path):
    ran = [run(tmp_path, "-m", "slow or models", "--part", f"{k}/3", "-v") for k in (1, 2, 3)]
    cases = [{line.split()[0] for line in one.splitlines() if " PASSED" in line} for one in ran]
    assert sum(map(len, cases)) == len(set.union(*cases)) == 31
    assert min(map(len, cases)) > 4
    assert not any("not in the core" in one for one in ran)


def test_a_case_belongs_to_one_part():
    for n in range(100):
        assert sum(part.holds(f"test_x.py::test[{n}]") for part in EVERY) == 1


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "1/0", "-1/3"])
def test_what_is_no_part_is_an_error(text):
    with pytest.raises(ValueError, match="k-th of n"):
        parse_part(text)


def test_lines_of_other_machines_are_taken_into_the_record(tmp_path):
    record, other = tmp_path / "parts.txt", tmp_path / "other.txt"
    other.write_text("# a head\n2/12 0123456789ab 2030-01-01 300 cases 31 minutes\n")
    take([other], record)
    assert read_record(record)["2/12"] == "0123456789ab 2030-01-01 300 cases 31 minutes"
    assert list(read_record(record).values()).count(NEVER) == PARTS - 1
    other.write_text("3/12 ba9876543210 2030-01-02 301 cases 30 minutes\n9/99 no such part\n")
    take([other, tmp_path / "missing.txt"], record)
    assert [read_record(record)[part].split()[0] for part in ("2/12", "3/12")] == [
        "0123456789ab",
        "ba9876543210",
    ]


def test_another_number_of_parts_is_not_recorded(monkeypatch):
    monkeypatch.setattr(parts, "take", None)  # it would be called
    assert "the record is of" in parts.record_green(Part(1, PARTS + 1), 3, 1.0)


def test_the_list_counts_by_file():
    lines = omitted_cases.report(
        ["a.py::x[1]", "a.py::x[2]", "b.py::y"], {"a.py": 5, "b.py": 1, "c.py": 9}, {"1/1": NEVER}
    )
    assert lines[0] == "not in the core, so not run: 3 of 15 cases"
    assert lines[1:3] == ["  2 of 5  a.py", "  1 of 1  b.py"]
    assert lines[-1].endswith(f"1/1  {NEVER}")
