"""A run that left tests out differs from one that proved something."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import skips
from tools.skips import Outcome, faults, read, summary

ROOT = Path(__file__).resolve().parents[2]
FILE = """
import pytest

def test_runs(): pass

@pytest.mark.skip(reason="no CUDA device")
def test_device(): pass

@pytest.mark.skip(reason="nobody installed it")
def test_forgotten(): pass

@pytest.mark.xfail(strict=True)
def test_known(): raise ValueError
"""


def report(folder, text: str):
    (folder / "test_it.py").write_text(text)
    out = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    subprocess.run([*command, f"--junitxml={out}"], capture_output=True, timeout=60, cwd=folder)
    return read(out)


def test_reasons_are_read_from_pytest_s_report(tmp_path):
    outcome = report(tmp_path, FILE)
    assert outcome == Outcome(2, Counter({"no CUDA device": 1, "nobody installed it": 1}))
    assert outcome.total == 4
    (found,) = faults(outcome, skips.ANYWHERE)
    assert "1 skipped" in found
    assert "nobody installed it" in found
    assert "2 ran, 2 skipped" in summary(outcome)


def test_a_module_that_cannot_be_imported_is_a_skip_too(tmp_path):
    outcome = report(tmp_path, "import pytest\npytest.importorskip('no_such_module')\n")
    assert outcome.ran == 0
    found = faults(outcome, [r"could not import 'no_such_module'.*"])
    assert found == ["nothing ran: all 1 tests were skipped"]


def test_nothing_left_out_is_no_fault():
    assert not faults(Outcome(3, Counter()), ())
    assert summary(Outcome(3, Counter())) == "3 ran, none was skipped"


@pytest.mark.parametrize(
    "reason",
    [
        "transformers is not installed",
        "triton is not installed",
        "needs triton and TRITON_INTERPRET=1: nox -s kernels_interpret",
        "needs 2 CUDA devices, found 0",
        "needs a GPU, and there is none",
    ],
)
def test_what_the_usual_sessions_leave_to_others(reason):
    outcome = Outcome(1, Counter({reason: 1}))
    assert not faults(outcome, skips.ALONE)
    of_others = "transformers" in reason or "triton" in reason
    assert bool(faults(outcome, skips.ANYWHERE)) == of_others


@pytest.mark.parametrize(
    "words", ["transformers or accelerate is not installed", "x is not installed"]
)
def test_no_session_allows_whatever_is_not_installed(words):
    assert faults(Outcome(1, Counter({words: 1})), skips.PARTIAL)


def test_a_package_that_is_absent_may_be_missed_only_where_packages_are_left_out():
    outcome = Outcome(1, Counter({"vescale-comm is not installed": 1}))
    assert faults(outcome, skips.ALONE)
    assert not faults(outcome, skips.PARTIAL)


def words(node: ast.expr) -> str | None:
    """The text of a literal, with a 1 for what an f-string fills in; None where it is none."""
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) or "" for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "1"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def reasons(source: str) -> Iterator[str]:
    """The reasons that a file of tests gives for its skips, as far as they are literals."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, given = node.func.attr, {one.arg: one.value for one in node.keywords}
        if name not in ("skip", "skipif", "importorskip") or "pytest" not in ast.unparse(node.func):
            continue
        if "reason" in given:
            reason = words(given["reason"])
        elif name == "importorskip":
            reason = f"could not import {words(node.args[0])!r}: No module named it"
        else:
            reason = words(node.args[-1]) if node.args else None
        if reason is not None:
            yield reason


def test_every_reason_in_the_tests_is_one_that_some_session_knows():
    # Otherwise a session fails where, and only where, the test is skipped: on another machine.
    files = [*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("tests-integration/**/*.py")]
    files += [one for one in ROOT.glob("tools/tests/**/*.py") if one.name != Path(__file__).name]
    found = {reason: str(one) for one in files for reason in reasons(one.read_text())}
    assert len(found) > 10
    # Of a table, which the next test reads.
    assert Path(found.pop("1 is not installed")).name == "test_ecosystem.py"
    assert not {
        reason: where
        for reason, where in found.items()
        if not any(re.fullmatch(one, reason, re.IGNORECASE) for one in skips.PARTIAL)
    }


def test_the_sessions_know_what_the_table_of_libraries_needs():
    text = (ROOT / "tests-integration" / "test_ecosystem.py").read_text()
    names = {
        name
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FEW"
        for name, *_ in ast.literal_eval(node.value)
    }
    beside = re.findall(r"^BESIDE \|?= (.*)$", text, re.M)
    names.update(name for one in beside for each in ast.literal_eval(one).values() for name in each)
    assert {"accelerate", "trl"} <= names
    reasons_ = Counter(f"{name} is not installed" for name in names)
    assert not faults(Outcome(1, reasons_), skips.ALONE)
