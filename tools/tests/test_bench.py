"""A run of a benchmark leaves a document with its ratios, date, machine and torch."""

import json

import pytest

from tools import bench, figures
from tools.bench import _run

CODE = '''"""A title.

More words."""
from tools.bench import Ratio
def measure():
    yield Ratio("fill", 3.0, 2.0, "s", "plain torch")
'''


@pytest.fixture
def document(tmp_path, monkeypatch, capsys):
    """The document of a run of that code."""
    monkeypatch.setattr(_run, "ROOT", tmp_path)
    monkeypatch.setattr(_run, "RUNS", tmp_path / "runs")
    path = tmp_path / "some.py"
    path.write_text(CODE)
    return json.loads(_run.run("some", path).read_text())


def test_the_document_says_what_when_and_where(document):
    assert document["title"] == "A title."
    assert document["results"][0]["ratio"] == pytest.approx(1.5)
    assert document["machine"]["torch"]
    assert document["machine"]["cores"] >= 1
    assert document["date"].endswith("+00:00")


def test_figures_quote_the_latest_run_with_its_date_and_machine(document, tmp_path):
    later = {**document, "date": "2999-01-01T00:00:00+00:00"}
    (tmp_path / "runs" / "some-29990101T000000.json").write_text(json.dumps(later))
    text = figures.markdown(figures.latest(tmp_path / "runs", "some"))
    assert "| fill | 3 s | plain torch: 2 s | 1.500 |" in text
    assert "2999-01-01" in text
    assert f"torch {document['machine']['torch']}" in text


def test_figures_put_several_references_of_one_case_on_one_line(document):
    other = {**document["results"][0], "against": "stock", "reference": 6000.0, "ratio": 0.0005}
    text = figures.markdown({**document, "results": [*document["results"], other]})
    assert "| fill | 3 s | plain torch: 2 s | 1.500 | stock: 6000 s | 5.0e-04 |" in text


def test_a_recorded_run_can_be_run_again_by_others(document, tmp_path):
    clean = {**document, "changed_files": 0}
    path = figures.record(clean, tmp_path / "kept")
    assert figures.recorded_runs(tmp_path / "kept") == {path: clean}
    with pytest.raises(ValueError, match="3 files changed"):
        figures.record({**document, "changed_files": 3}, tmp_path / "kept")


def test_every_benchmark_of_the_workspace_has_a_title_and_a_measure():
    found = _run.discover()
    assert "imports" in found
    for path in found.values():
        module = _run.load(path)
        assert module.__doc__
        assert callable(module.measure)


def test_who_begins_changes_from_turn_to_turn():
    assert [bench.in_turn("abc", turn) for turn in range(4)] == [
        *(list("abc"), list("bca"), list("cab")),
        list("abc"),
    ]
