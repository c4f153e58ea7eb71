"""Figures of documents are those of the recorded runs, and documents have no others."""

import pytest

from tools import figures, quoted_figures

RUNS = {
    "some": {
        "benchmark": "some",
        "date": "2999-01-01T00:00:00+00:00",
        "commit": "abc",
        "machine": {"cores": 2, "torch": "2.13.0", "processor": "one"},
        "results": [
            {"name": name, "unit": "us", "against": "plain", "ours": 3.0, "reference": other}
            | {"ratio": 3.0 / other}
            for name, other in (("fill", 2.0), ("fill, twice", 4.0))
        ],
    }
}


@pytest.fixture
def template(tmp_path, monkeypatch):
    monkeypatch.setattr(quoted_figures, "TEMPLATES", tmp_path)
    return lambda text: (tmp_path / "one.md").write_text(text)


def test_a_block_is_written_from_its_template_and_the_runs(template):
    template("{{some; fill; us}} x, {{some; fill*; us; pl*; range:.1f}}, {{when; some}}\n")
    text = "Before.\n<!-- figures: one -->\nold\n<!-- end of figures -->\nAfter."
    made = quoted_figures.filled(text, RUNS, figures.markdown)
    assert made == (
        "Before.\n<!-- figures: one -->\n1.50 x, 0.8 to 1.5, commit `abc`, 2 cores, "
        "torch 2.13.0\n<!-- end of figures -->\nAfter."
    )
    assert quoted_figures.filled(made, RUNS, figures.markdown) == made


def test_what_was_not_measured_is_a_dash_and_what_is_not_there_an_error(template):
    text = "<!-- figures: one -->\n<!-- end of figures -->"
    template("{{other; fill; us; ; ours}}\n")
    assert quoted_figures.NOT_RECORDED in quoted_figures.filled(text, RUNS, figures.markdown)
    template("{{some; fill; ms}}\n")
    with pytest.raises(ValueError, match="no row 'fill' in 'ms'"):
        quoted_figures.filled(text, RUNS, figures.markdown)
    template("{{some; fill*; us}}\n")
    with pytest.raises(ValueError, match="fits 2 rows"):
        quoted_figures.filled(text, RUNS, figures.markdown)


@pytest.mark.parametrize(
    "line",
    ["It takes 0.85 x the time.", "1.5\u00d7 as long", "| 12 us |", "3.4 ms of it", "5 GB/s"],
)
def test_a_figure_outside_of_a_block_is_found(line):
    assert list(quoted_figures.stray(f"Words.\n{line}\n")) == [line]
    assert not list(quoted_figures.stray(f"<!-- figures: a -->\n{line}\n<!-- end of figures -->"))
    assert not list(quoted_figures.stray(f"```text\n{line}\n```"))


@pytest.mark.parametrize(
    "line", ["a 2 x 2 mesh", "8 \u00d7 8 tensors", "`0.5 x 3`", "version 2.13"]
)
def test_what_is_no_measurement_is_left_alone(line):
    assert not list(quoted_figures.stray(line))


def test_documents_say_what_was_recorded():
    assert list(figures.differences(write=False)) == []
