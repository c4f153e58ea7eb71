"""A plan is data: read when made, stored as JSON, checked against a model with no processes."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn
from vescale_parallel import Plan, PlanError


class Tied(nn.Module):
    """Two names for one parameter, a buffer, and a pair of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(10, 4), nn.Linear(4, 6, bias=False)
        self.down, self.head = nn.Linear(6, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()))


GOOD = {"up.weight": "tp:0", "down.weight": "tp:1", "*": "replicate"}
MESH = {"dp": 2, "tp": 4}


def problems(plan: Plan, mesh: dict[str, int] = MESH) -> str:
    with pytest.raises(PlanError) as caught:
        plan.check(Tied(), mesh)
    return str(caught.value)


@pytest.mark.smoke
def test_report_of_a_good_plan():
    report = Plan(parameters=GOOD).check(Tied(), MESH)
    rows = {row.name: row for row in report.parameters}
    assert rows["embed.weight"].names == ("embed.weight", "head.weight")
    assert rows["up.weight"].local_shape == (2, 4)
    assert rows["up.weight"].uneven
    assert rows["down.weight"].rule == "down.weight"
    assert rows["down.bias"].local_shape == (4,)
    assert report.total_bytes == 4 * (40 + 24 + 24 + 4)
    assert report.bytes_per_rank == 4 * (40 + 8 + 8 + 4)


def test_check_reads_shapes_only():
    with torch.device("meta"):
        model = Tied()
    assert Plan(parameters=GOOD).check(model, MESH).bytes_per_rank == 4 * 60


def test_first_match_wins():
    plan = Plan(parameters={"up.*": "tp:1", "*.weight": "tp:0", "*": "replicate"})
    rows = {row.name: row.rule for row in plan.check(Tied(), MESH).parameters}
    assert rows == {
        "embed.weight": "*.weight",
        "up.weight": "up.*",
        "down.weight": "*.weight",
        "down.bias": "*",
    }


def test_a_rule_that_matches_nothing_names_the_nearest():
    text = problems(Plan(parameters={"upp.weight": "tp:0", **GOOD}))
    assert "rule 'upp.weight' matches no parameter" in text
    assert "'up.weight'" in text


def test_one_dead_alternative_is_enough():
    text = problems(Plan(parameters={"{up,donw}.weight": "tp:0", "*": "replicate"}))
    assert "'donw.weight' (of '{up,donw}.weight')" in text
    assert "'down.weight'" in text


def test_a_rule_behind_wider_ones_never_applies():
    text = problems(
        Plan(parameters={"*.weight": "replicate", "up.weight": "tp:0", "*": "replicate"})
    )
    assert "rule 'up.weight' never applies" in text
    assert "'*.weight'" in text


def test_the_catch_all_may_be_idle():
    Plan(parameters={"*.*": "replicate", "*": "replicate"}).check(Tied(), MESH)


def test_uncovered_parameters_are_listed():
    text = problems(Plan(parameters={"up.weight": "tp:0"}))
    assert "no rule covers 4 parameters" in text
    assert "'down.bias'" in text


def test_unknown_axis_names_those_of_the_mesh():
    text = problems(Plan(parameters={**GOOD, "*": "pt:full"}))
    assert "no axis 'pt'. Did you mean 'tp'?" in text
    assert "The mesh has 'dp', 'tp'" in text


def test_unknown_axes_in_activations_and_batch():
    text = problems(Plan(parameters=GOOD, activations={"up": "-> x:1"}, batch="y:0"))
    assert "no axis 'x'" in text
    assert "no axis 'y'" in text


def test_axes_add_to_the_usual_ones():
    # As one that shards within machines and replicates between them: rules still say `tp`.
    words = {"batch": "replica:0, dp:0", "zero": 3}
    for axes in (("replica",), ("replica", "dp"), ()):
        plan = Plan(parameters=GOOD).with_(**words, axes=axes)
        plan.check(Tied(), {"replica": 2, "dp": 2})
        plan.check(Tied(), {"replica": 2, "dp": 2, "tp": 2})
    Plan(parameters=GOOD, axes=("replica",), **words).check(Tied(), MESH)
    assert "no axis 'replica'" in problems(Plan(parameters=GOOD, **words))


def test_sharding_a_dim_that_is_not_there():
    text = problems(Plan(parameters={"*": "tp:1"}))
    assert "parameter 'down.bias' has shape (4,)" in text


def test_ties_that_disagree():
    rules = {"embed.weight": "tp:0", "head.*": "tp:1", "*": "replicate"}
    text = problems(Plan(parameters=rules))
    assert "'embed.weight', 'head.weight' are one parameter" in text
    assert "('embed.weight: tp:0', 'head.*: tp:1')" in text


@pytest.mark.parametrize("named", ["head.weight", "embed.weight", "{embed,head}.weight"])
def test_a_tied_parameter_follows_the_rule_that_names_it(named: str):
    rules = {named: "tp:0", "*": "replicate"}
    rows = {row.names: row for row in Plan(parameters=rules).check(Tied(), MESH).parameters}
    row = rows["embed.weight", "head.weight"]
    assert (row.rule, str(row.layout)) == (named, "tp:0")


def test_an_optional_alternative_need_not_match():
    rules = {"up.{weight,~lora_A.weight}": "tp:0", "{~*.lora_B.*}": "tp:1", "*": "replicate"}
    report = Plan(parameters=rules).check(Tied(), MESH)
    (row,) = [row for row in report.parameters if row.name == "up.weight"]
    assert str(row.layout) == "tp:0"
    text = problems(Plan(parameters={"up.{wieght,~lora_A.weight}": "tp:0", "*": "replicate"}))
    assert "rule 'up.wieght' (of 'up.{wieght,~lora_A.weight}') matches no parameter" in text
    assert "lora_A.weight' (of" not in text


def test_a_module_rule_that_matches_nothing():
    text = problems(Plan(parameters=GOOD, activations={"dwn": "-> tp:1"}))
    assert "rule 'dwn' matches no module" in text
    assert "'down'" in text


def test_all_problems_are_told_at_once():
    text = problems(Plan(parameters={"nope": "tp:0", "up.weight": "zz:0"}, batch="yy:0"))
    for part in ("4 problems", "'nope'", "no axis 'zz'", "no axis 'yy'", "no rule covers"):
        assert part in text


@pytest.mark.parametrize("mesh", [{}, {"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 1, "tp": 1}])
def test_one_plan_for_every_mesh(mesh: dict[str, int]):
    report = Plan(parameters=GOOD).check(Tied(), mesh)
    sharded = {row.name: row.local_shape for row in report.parameters}
    assert sharded["up.weight"] == (-(-6 // mesh.get("tp", 1)), 4)


def test_notes_tell_what_may_surprise():
    report = Plan(parameters=GOOD).check(Tied(), {"tp": 4, "cp": 2})
    text = "\n".join(report.notes)
    assert "no axis 'dp'" in text
    assert "does not use mesh axis 'cp'" in text
    assert "'up.weight'" in text


def test_explain_prints_the_table(capsys: pytest.CaptureFixture[str]):
    text = Plan(parameters=GOOD, activations={"up": "tp:full ->"}).explain(Tied(), MESH)
    assert capsys.readouterr().out == text + "\n"
    for part in ("embed.weight = head.weight", "6x4", "2x4 at most", "tp:full ->", "dp=2, tp=4"):
        assert part in text


def test_json_round_trip_keeps_the_order_of_rules():
    plan = Plan(parameters=GOOD, activations={"up": "-> tp:1"}, batch=None, axes=("tp",))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert list(again.parameters) == list(GOOD)


NO_PLANS = [
    ("{", "cannot be read"),
    ("[]", "an object with the keys"),
    ("{}", "an object with the keys"),
    (json.dumps({"parameters": {}, "activation": {}}), "Did you mean 'activations'?"),
    (json.dumps({"parameters": {"*": "tp"}}), "'tp'"),
    (json.dumps({"parameters": ["*"]}), "expected a mapping"),
]


@pytest.mark.parametrize(("text", "message"), NO_PLANS)
def test_json_that_is_no_plan(text: str, message: str):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text)
    assert message in str(caught.value)


def test_a_plan_is_frozen_and_keeps_its_own_rules():
    rules = dict(GOOD)
    plan = Plan(parameters=rules)
    rules.clear()
    assert plan.parameters == GOOD
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.batch = None  # type: ignore[misc]


UNREADABLE = [
    {"parameters": {"*": "tp"}},
    {"parameters": {"{a": "tp:0"}},
    {"parameters": {3: "tp:0"}},
    {"parameters": {"*": "tp:0"}, "axes": "tp"},
    {"parameters": {"*": "tp:0"}, "axes": (1,)},
]


@pytest.mark.parametrize("rules", UNREADABLE)
def test_a_plan_that_cannot_be_read_is_never_made(rules: dict[str, Any]):
    with pytest.raises(PlanError):
        Plan(**rules)
