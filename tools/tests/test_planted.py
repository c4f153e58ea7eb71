"""The planted faults fit the sources: each is there once, compiles, and its room has tests."""

import ast
from collections import Counter

import pytest

from tools.packages import PACKAGES, find
from tools.planted import report, trial
from tools.planted.__main__ import main
from tools.planted.faults import RULES, all_faults, chosen, faults, rooms
from tools.planted.sources import Sources

ALL = all_faults()
LEAST, OF_A_RULE = 60, 3


@pytest.mark.parametrize("fault", ALL, ids=lambda one: f"{one.package.short}-{one.name}")
def test_a_fault_is_planted_once_and_compiles(fault):
    text = (fault.package.source / fault.path).read_text(encoding="utf-8")
    faulty = fault.planted(text)  # refuses a text that is not there exactly once
    assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("fault", ALL, ids=lambda one: f"{one.package.short}-{one.name}")
def test_its_tests_are_there(fault):
    assert fault.tests
    for name in fault.tests:
        assert (
            any((fault.package.tests / name).rglob("test_*.py"))
            or (fault.package.tests / name).is_file()
        ), name


@pytest.mark.parametrize("package", PACKAGES, ids=lambda one: one.short)
def test_every_room_has_a_fault(package):
    bare = set(rooms(package)) - {fault.room for fault in faults(package)}
    assert not bare, f"no fault is planted in {sorted(bare)} of {package.name}"


def test_there_are_enough_of_every_kind():
    kinds = Counter(fault.rule for fault in ALL)
    assert len(ALL) >= LEAST
    assert kinds.keys() == RULES.keys()
    assert {rule: count for rule, count in kinds.items() if count < OF_A_RULE} == {}


def test_names_are_names():
    names = Counter(fault.name for fault in ALL)
    assert [name for name, count in names.items() if count > 1] == []
    with pytest.raises(ValueError, match="no fault is there of none-of-these"):
        chosen([], [], ["none-of-these"])
    assert main(["--room", "_nowhere"]) == 2


def test_a_fault_is_in_the_copy_alone_and_leaves_it(tmp_path, monkeypatch):
    package = find("rng")
    monkeypatch.setattr("tools.planted.sources.PACKAGES", [package])
    sources, fault = Sources(tmp_path), faults(package)[0]
    original, copy = package.source / fault.path, tmp_path / fault.path
    sound = original.read_text(encoding="utf-8")
    with sources.with_fault(fault):
        assert copy.read_text(encoding="utf-8") == fault.planted(sound)
        assert original.read_text(encoding="utf-8") == sound
    assert copy.read_text(encoding="utf-8") == sound


# What pytest prints with -v, cut to what is read of it.
PASSING = "a/test_x.py::test_a PASSED\n== 1 passed =="
FAILING = "a/test_x.py::test_b[0, 1] FAILED\nFAILED a/test_x.py::test_b[0, 1] - assert 1 == 2\n"
RUNNING = "a/test_x.py::test_a PASSED\na/test_x.py::test_c "


@pytest.mark.parametrize(
    ("status", "text", "silent", "outcome", "by"),
    [
        (0, PASSING, 0, "passed", "a"),
        (1, FAILING, 0, "failed", "a/test_x.py::test_b[0, 1]"),
        (2, "ERROR a/test_x.py - ImportError\n", 0, "failed", "a/test_x.py"),
        (5, "", 0, "no tests", "a"),
        (-11, RUNNING, 0, "crashed", "a/test_x.py::test_c"),
        (None, RUNNING, 200, "hung", "a/test_x.py::test_c"),
        (None, RUNNING, 2, "out of time", "a/test_x.py::test_c"),
    ],
)
def test_a_run_is_read_from_what_pytest_prints(status, text, silent, outcome, by):
    found = trial._trial(status, text, "a", silent, 420)
    assert (found.outcome, found.by) == (outcome, by)
    assert found.found == (outcome in ("failed", "crashed", "hung"))


def test_a_run_that_pytest_refuses_is_no_find():
    with pytest.raises(RuntimeError, match="pytest ended with 4"):
        trial._trial(4, "ERROR: file or directory not found: a\n", "a", 0, 1)


def test_what_fails_without_the_fault_too_is_no_find():
    fault, failed = ALL[0], trial.Trial("failed", "a/test_x.py::test_b", "", 1.0)
    found = report.Result(fault, failed)
    flaky = report.Result(fault, failed, confirmed=False)
    missed = report.Result(fault, trial.Trial("passed", "a", "", 2.0))
    assert report.share([found, flaky, missed]) == pytest.approx(1 / 3)
    text = report.tables([found, flaky, missed])
    assert "1 of 3 found (33.3%)" in text
    assert text.count(f"{fault.name}: ") == 2  # those that were missed are named
