"""A resolved plan is told to programs as JSON, and drawn: every shard once, with who holds it."""

import json
from xml.etree import ElementTree

import pytest
from torch import nn
from vescale_parallel import Plan, PlanError

PLAN = Plan(
    parameters={"*.0.weight": "tp:0, dp:1", "*.1.weight": "tp:0", "*": "replicate"},
    activations={"layers": "-> tp:1"},
    batch=None,
)
SIZES = {"dp": 2, "tp": 3}


def model() -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 6), nn.Linear(5, 40, bias=False)])})


def test_json_holds_what_the_report_does(capsys: pytest.CaptureFixture[str]):
    text = PLAN.explain(model(), SIZES, form="json")
    assert capsys.readouterr().out == text + "\n"
    found, report = json.loads(text), PLAN.check(model(), SIZES)
    assert found["bytes_per_rank"] == report.bytes_per_rank
    assert found["mesh"] == SIZES
    assert found["boundaries"] == [{"module": "layers", "rule": "layers", "in_out": "-> tp:1"}]
    rows = {row["names"][0]: row for row in found["parameters"]}
    assert rows["layers.0.weight"]["local_shape"] == [2, 2]
    assert rows["layers.1.weight"]["uneven"]


def test_json_of_zero_tells_the_buffers():
    found = json.loads(Plan(zero=3).explain(model(), {"dp": 2}, form="json"))
    assert {row["zero"] for row in found["buffers"]} == {3}


def drawn(sizes: dict[str, int]) -> list[list[str]]:
    """For each panel, who holds each of its shards."""
    root = ElementTree.fromstring(PLAN.explain(model(), sizes, form="svg"))
    space = "{http://www.w3.org/2000/svg}"
    return [[one.text or "" for one in panel.iter(f"{space}title")] for panel in root]


def test_the_picture_has_every_shard_once():
    both, bias, one = drawn(SIZES)
    assert both == [f"tp={tp}, dp={dp}" for tp in range(3) for dp in range(2)]
    assert bias == ["every rank"]
    assert one == ["tp=0", "tp=1", "tp=2"]


def test_more_shards_than_can_be_told_apart_are_counted():
    assert drawn({"tp": 20})[2] == [*(f"tp={at}" for at in range(15)), "5 more"]


def test_no_other_form():
    with pytest.raises(PlanError, match="form 'pdf'"):
        PLAN.explain(model(), SIZES, form="pdf")  # type: ignore[arg-type]
