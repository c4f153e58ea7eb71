"""A resolved plan is told to programs as JSON, and drawn: every element once, with who holds it."""

import json
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from vescale_comm import simulate
from vescale_parallel import Plan, PlanError, Zero, mesh, parallelize
from vescale_parallel._notation.layout import parse_layout
from vescale_parallel._notation.segments import segments_of

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


def panels(plan: Plan, whole: nn.Module, sizes: dict[str, int]) -> dict[str, list[str]]:
    """For each panel, by its first line: the titles of its cells."""
    root = ElementTree.fromstring(plan.explain(whole, sizes, form="svg"))
    space = "{http://www.w3.org/2000/svg}"
    return {
        panel.findtext(f"{space}text") or "": [
            rect.findtext(f"{space}title") or "" for rect in panel.iter(f"{space}rect")
        ]
        for panel in root.iter(f"{space}g")
    }


def test_a_cell_for_each_shard():
    found = panels(PLAN, model(), SIZES)
    both, bias, one = found.values()
    assert both == [
        f"tp={tp}, dp={dp}: [{2 * tp}:{2 * tp + 2}, {2 * dp}:{2 * dp + 2}]"
        for tp in range(3)
        for dp in range(2)
    ]
    assert bias == ["every rank: [0:6]"]
    assert one == ["tp=0: [0:14, 0:5]", "tp=1: [14:28, 0:5]", "tp=2: [28:40, 0:5]"]


def test_blocks_that_are_sharded_one_by_one_and_ranks_without_elements():
    plan = Plan(parameters={"weight": "tp:0/2+1", "*": "tp:0"}, batch=None)
    weight, bias = panels(plan, nn.Linear(2, 6), {"tp": 4}).values()
    assert [one.partition(",")[0] for one in weight] == [
        *(f"tp={at}: [{at}:{at + 1}" for at in range(4)),
        *(f"tp={at}: [{at + 4}:{at + 5}" for at in range(2)),
    ]
    assert bias == ["tp=0: [0:2]", "tp=1: [2:4]", "tp=2: [4:6]"]
    assert "tp=3 holds nothing" in plan.explain(nn.Linear(2, 6), {"tp": 4}, form="svg")


def test_more_shards_than_can_be_told_apart():
    many = panels(PLAN, model(), {"tp": 64})["layers.1.weight"]
    assert len(many) == 40  # the rows that there are
    plan = Plan(parameters={"*": "tp:0"}, batch=None)
    many = panels(plan, nn.Linear(1, 99, bias=False), {"tp": 99})["weight"]
    assert len(many) == 48
    assert many[-1] == "and so on"


def test_what_zero_stores_on_each_rank():
    plan = Plan(zero=Zero(3, units="*"), parameters={"*": "replicate"})
    whole = nn.Linear(32, 32, bias=False)
    (cells,) = panels(plan, nn.ModuleList([whole]), {"dp": 4}).values()
    assert cells == ["every rank: [0:32, 0:32]", *(f"dp={at}: 25.0%" for at in range(4))]


def test_stages_hold_their_own():
    blocks = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
    plan = Plan(pipeline="1f1b", microbatches=2)
    assert panels(plan, blocks, {"pp": 2}) == {
        "0.weight and 1 like it": ["pp=0: [0:3, 0:3]"],
        "2.weight and 1 like it": ["pp=1: [0:3, 0:3]"],
    }


LAYOUTS = ["tp:0", "dp:0, tp:0", "tp:0, dp:1", "tp:-1", "tp:0/3", "dp:1, tp:0/1+3", "tp:1/2"]


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("shape", [(12, 6), (24, 4), (12, 2)], ids=str)
def test_segments_are_the_elements_that_ranks_hold(text: str, shape: tuple[int, int]):
    layout, sizes = parse_layout(text), (("dp", 2), ("tp", 5))
    weight = torch.arange(float(shape[0] * shape[1])).view(shape)

    def rank(rank: int, world_size: int) -> list[float]:
        holder = nn.ParameterDict({"w": nn.Parameter(weight.clone())})
        plan = Plan(parameters={"*": text}, batch=None)
        made = parallelize(holder, mesh(device_type="cpu", **dict(sizes)), plan)
        return sorted(made["w"].to_local().flatten().tolist())

    held = simulate(10).run(rank)
    down, across = (segments_of(layout, shape, dim, sizes) for dim in range(2))
    for number in range(10):
        here = {"dp": number // 5, "tp": number % 5}
        mine = [
            weight[one.low : one.high, other.low : other.high]
            for one in down
            for other in across
            if all(here[axis] == at for axis, at in (*one.place, *other.place))
        ]
        assert sorted(x for part in mine for x in part.flatten().tolist()) == held[number]


def test_no_other_form():
    with pytest.raises(PlanError, match="form 'pdf'"):
        PLAN.explain(model(), SIZES, form="pdf")  # type: ignore[arg-type]
