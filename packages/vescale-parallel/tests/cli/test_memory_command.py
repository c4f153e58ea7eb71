"""The command line plans a graph, prints what the plan says, and draws every storage once."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor
from vescale_parallel._cli.arguments import main

HERE = __name__.rpartition(".")[2]


def function(x: Tensor) -> Tensor:
    return ((x * 2).relu() @ x + 1).sum(0)


def step() -> tuple[object, tuple[Tensor]]:
    return function, (torch.ones(16, 16),)


def nothing() -> int:
    return 3


def misshapen() -> tuple[object, tuple[Tensor]]:
    return lambda x: x @ x, (torch.ones(2, 3),)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "plan.svg"
    assert main(["memory", f"{HERE}:step", "--json", "--svg", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lower_bound"] <= found["peak"] <= found["program_peak"]
    assert len(found["order"]) == 5
    root = ElementTree.fromstring(path.read_text())
    space = "{http://www.w3.org/2000/svg}"
    titles = [one.text or "" for one in root.iter(f"{space}title")]
    assert [one.split(":")[0] for one in titles] == [*found["offsets"]]


def test_table(capsys: pytest.CaptureFixture[str]):
    assert main(["memory", f"{HERE}:step", "--solver", "rules", "--seconds", "1"]) == 0
    said = capsys.readouterr().out
    for part in ("program order", "lower bound", "arena, ", "caching allocator", "gap 0.0%"):
        assert part in said


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere:at", "cannot be imported"), ("step", "cannot be imported"), (":", "cannot be")],
)
def test_what_is_no_graph(name: str, words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["memory", name]) == 2
    assert words in capsys.readouterr().err
    assert main(["memory", f"{HERE}:nothing"]) == 2
    assert "returned a int" in capsys.readouterr().err
    assert main(["memory", f"{HERE}:misshapen"]) == 2
    assert "cannot be traced without values" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]):
    assert main(["memory", f"{HERE}:step", "--svg", "nowhere/plan.svg"]) == 2
    assert "nowhere/plan.svg: No such file" in capsys.readouterr().err


def test_an_exported_program_is_a_graph(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    made = torch.export.export(torch.nn.Linear(4, 2), (torch.ones(3, 4),))
    monkeypatch.setitem(sys.modules, "my_models", SimpleNamespace(made=made))
    assert main(["memory", "my_models:made"]) == 0
    assert "most alive, planned" in capsys.readouterr().out
