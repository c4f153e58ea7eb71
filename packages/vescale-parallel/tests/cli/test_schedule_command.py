"""`python -m vescale_parallel schedule`: tables, pictures, and words for what is wrong."""

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from vescale_parallel._cli.arguments import main
from vescale_parallel.schedules import SCHEDULES, from_csv, make_schedule

ASKED = ["schedule", "--stages", "4", "--microbatches", "8"]


def test_every_schedule_is_in_the_table(capsys: pytest.CaptureFixture[str]):
    assert main(ASKED) == 0
    tables, *drawn = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in tables.splitlines()[1:]] == [*SCHEDULES]
    # And each of them is drawn.
    assert [one.split(":")[0] for one in drawn[:-1]] == [*SCHEDULES]
    assert all(len(one.splitlines()) == 1 + 4 for one in drawn[:-1])
    assert "dots: it waits" in drawn[-1]
    assert main([*ASKED, "--json", "--times", "1,2,0.5", "--send", "0.1"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == SCHEDULES.keys()


def test_one_of_them_is_drawn_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = [tmp_path / name for name in ("zbv.svg", "zbv.json", "zbv.csv")]
    options = zip(("--svg", "--trace", "--csv"), map(str, files), strict=True)
    assert main([*ASKED, "--only", "zbv", *(o for pair in options for o in pair)]) == 0
    assert len(capsys.readouterr().out.split("\n\n")[0].splitlines()) == 2
    assert files[0].read_text().startswith("<svg")
    assert len(json.loads(files[1].read_text())["traceEvents"]) == 4 * 2 * 3 * 8
    assert from_csv(files[2].read_text(), "zbv") == make_schedule("zbv", 4, 8)


def test_all_of_them_are_drawn_to_one_scale(tmp_path: Path):
    file = tmp_path / "all.svg"
    assert main([*ASKED, "--svg", str(file)]) == 0
    shapes = ElementTree.fromstring(file.read_text())
    titles = [one.text for one in shapes.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] is not None
    assert [one.split(":")[0] for one in titles[0].split("; ")] == [*SCHEDULES]
    frames = [one.attrib for one in shapes.iter("{http://www.w3.org/2000/svg}rect")][1:]
    actions = sum(len(row) for n in SCHEDULES for row in make_schedule(n, 4, 8).ranks)
    assert len(frames) == actions
    # Nothing lies on anything else, and the shortest is wide enough for its number.
    places = [tuple(float(one[k]) for k in ("x", "y", "width")) for one in frames]
    rows: dict[float, list[tuple[float, float]]] = {}
    for x, y, width in places:
        rows.setdefault(y, []).append((x, x + width))
    assert len(rows) == 4 * len(SCHEDULES)
    assert all(
        end <= start + 0.02 for row in rows.values() for (_, end), (start, _) in pairwise(row)
    )
    assert min(width for _, _, width in places) >= 14


WRONG = [
    (["--trace", "x.json"], "name it by --only"),
    (["--times", "1,2"], "write three numbers"),
    (["--times", "1,2,-1"], "'-1': a number, 0 to 1e+09"),
    (["--times", "nan,1,1"], "'nan': a number"),
    (["--times", "1,1e308,1"], "'1e308': a number"),
    (["--microbatches", "65536"], "up to 65,536 forwards are compared"),
    (["--only", "dualpipev", "--microbatches", "7", "--csv", "x"], "it needs at least 8"),
    (["--svg", "absent/x.svg"], "cannot be written"),
    (["--only", "1f1b", "--csv", "absent/x.csv"], "cannot be written"),
]


@pytest.mark.parametrize(("more", "words"), WRONG)
def test_what_is_wrong_is_said(
    more: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert main([*ASKED, *more]) == 2
    assert words in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
