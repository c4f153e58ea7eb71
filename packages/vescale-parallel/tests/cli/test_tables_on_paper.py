"""The tables on paper in the guides hold the figures that the commands print today."""

import re
from pathlib import Path

import pytest
from vescale_parallel._cli.arguments import main

DOCS = Path(__file__).parents[2] / "docs"
ASKED = {
    "sequences": "context --tokens 131072 --heads 64 --kv-heads 8 --ranks 8 64",
    "experts": "experts --experts 256 --top-k 8 --hidden 7168 --width 2048 --ranks 64",
}


def written(page: str) -> list[list[str]]:
    """The rows of the guide's table: ranks, way and figures, and what is said of them."""
    text = (DOCS / f"{page}.md").read_text()
    rows = re.findall(r"^ +\| (\d+ \|.*)\|$", text, re.MULTILINE)
    # "(`zero=3`)" and "by 1.5" say more than the command does.
    return [
        [re.sub(r" \(.*\)| by [\d.]+", "", one).strip() for one in row.split("|")] for row in rows
    ]


def printed(page: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    assert main(ASKED[page].split()) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    return [re.split(r" {2,}", line.strip()) for line in lines]


def short(cell: str) -> str:
    """Sizes as the guides write them: 1008 MiB, 1.3 GiB, 0."""
    return "0" if cell == "0 B" else cell.replace(".0 ", " ")


@pytest.mark.parametrize(("page", "figures"), [("sequences", 6), ("experts", 7)])
def test_figures_and_choice(page: str, figures: int, capsys: pytest.CaptureFixture[str]):
    rows, lines = written(page), printed(page, capsys)
    assert len(rows) == len(lines) > 3
    for row, line in zip(rows, lines, strict=True):
        assert list(map(short, row[:figures])) == list(map(short, line[:figures]))
        assert row[figures].startswith(("taken", "sends least")) == (line[-1] == "*")


def test_what_is_said_behind_them(capsys: pytest.CaptureFixture[str]):
    assert main([*ASKED["sequences"].split(), "--heads", "40"]) == 0
    ring = capsys.readouterr().out.splitlines()[-1]
    assert "ring" in ring
    assert ring.endswith("*")
    least = {}
    for tokens in (90_000, 110_000):  # "some 100,000 tokens a rank"
        assert main([*ASKED["experts"].split(), "--tokens", str(tokens), "--json"]) == 0
        least[tokens] = "all experts everywhere" in capsys.readouterr().out.split('"ways"')[0]
    assert least == {90_000: False, 110_000: True}
