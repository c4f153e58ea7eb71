"""`python -m vescale_parallel schedule`: tables, pictures, and words for what is wrong."""

import json
from pathlib import Path

import pytest
from vescale_parallel._cli.arguments import main
from vescale_parallel.schedules import SCHEDULES, from_csv, make_schedule

ASKED = ["schedule", "--stages", "4", "--microbatches", "8"]


def test_every_schedule_is_in_the_table(capsys: pytest.CaptureFixture[str]):
    assert main(ASKED) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[1:]] == [*SCHEDULES]
    assert main([*ASKED, "--json", "--times", "1,2,0.5", "--send", "0.1"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == SCHEDULES.keys()


def test_one_of_them_is_drawn_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = [tmp_path / name for name in ("zbv.svg", "zbv.json", "zbv.csv")]
    options = zip(("--svg", "--trace", "--csv"), map(str, files), strict=True)
    assert main([*ASKED, "--only", "zbv", *(o for pair in options for o in pair)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert files[0].read_text().startswith("<svg")
    assert len(json.loads(files[1].read_text())["traceEvents"]) == 4 * 2 * 3 * 8
    assert from_csv(files[2].read_text(), "zbv") == make_schedule("zbv", 4, 8)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--svg", "x.svg"], "name it by --only"),
        (["--times", "1,2"], "write three numbers"),
        (["--times", "1,2,-1"], "no time is negative"),
        (["--microbatches", "0"], "microbatches is 0"),
        (["--only", "dualpipev", "--microbatches", "7", "--csv", "x"], "it needs at least 8"),
    ],
)
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
