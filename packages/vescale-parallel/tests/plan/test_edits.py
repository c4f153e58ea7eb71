"""A plan is edited into another plan, which is stored and read back as one written by hand."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from vescale_dtensor import Partial, Replicate, Shard
from vescale_parallel import Invariant, Pipeline, Plan, PlanError, Zero
from vescale_parallel._plan.toml import read_toml, toml_of

BASE = Plan(
    parameters={"up.weight": "tp:0", "down.weight": "tp:1", "*": "replicate"},
    activations={"up": "tp:full ->"},
)


def model() -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4), "head": nn.Linear(4, 9)})


def layouts(plan: Plan) -> dict[str, str]:
    return {row.name: str(row.layout) for row in plan.check(model(), {"tp": 2}).parameters}


def test_a_plan_without_rules_replicates():
    assert dict(Plan().parameters) == {"*": "replicate"}
    assert Plan(zero=3).zero == Zero(3)


def test_rules_of_the_later_plan_win_and_the_catch_all_stays_last():
    both = BASE | Plan(parameters={"up.*": "tp:0", "head.weight": "tp:0", "*": "replicate"})
    assert list(both.parameters) == ["up.*", "head.weight", "up.weight", "down.weight", "*"]
    assert both.activations == BASE.activations
    both = both.with_(parameters={k: v for k, v in both.parameters.items() if k != "up.weight"})
    assert layouts(both) == {
        "up.weight": "tp:0",
        "up.bias": "tp:0",
        "down.weight": "tp:1",
        "down.bias": "replicate",
        "head.weight": "tp:0",
        "head.bias": "replicate",
    }


def test_a_rule_that_both_have_is_the_later_one():
    both = BASE | Plan(parameters={"up.weight": "tp:1", "*": "tp:full"})
    assert both.parameters["up.weight"] == "tp:1"
    assert list(both.parameters.items())[-1] == ("*", "tp:full")


OTHER_FIELDS = [
    (Plan(zero=3), "zero", Zero(3)),
    (Plan(batch=None), "batch", None),
    (Plan(zero=Zero(prefetch=2)), "zero", Zero(prefetch=2)),
    (Plan(pipeline="zbv"), "pipeline", Pipeline("zbv")),
    (Plan(deterministic="dp-invariant"), "deterministic", Invariant(8)),
    (Plan(axes=("tp",)), "axes", ("tp",)),
]


@pytest.mark.parametrize(("later", "field", "value"), OTHER_FIELDS, ids=str)
def test_other_fields_of_the_later_plan_win_where_they_are_said(
    later: Plan, field: str, value: Any
):
    both = BASE | later
    assert getattr(both, field) == value
    assert both.parameters == BASE.parameters
    assert getattr(BASE | Plan(), field) == getattr(BASE, field)


def test_a_merge_keeps_what_the_first_said_and_the_second_did_not():
    assert (BASE.with_(zero=2, batch=None) | Plan()).with_(zero=0, batch="dp:0") == BASE
    with pytest.raises(TypeError):
        BASE | {"up.weight": "tp:0"}  # type: ignore[operator]


def test_with_replaces_fields():
    assert BASE.with_(zero=1).zero == Zero(1)
    assert BASE.zero == Zero(0)
    with pytest.raises(PlanError, match="no level 9"):
        BASE.with_(zero=9)


SAID = Plan(
    zero=Zero({"embed*": 1, "*": 3}, over="replica", prefetch=2),
    axes=("replica",),
    pipeline=Pipeline("interleaved", stages="blocks.*", chunks=4),
    deterministic=Invariant(4),
)


def test_fields_that_have_fields_are_merged_field_by_field():
    later = Plan(zero=Zero(3, offload=True), pipeline=Pipeline("zbv"), deterministic=Invariant(2))
    both = SAID | later
    assert both.zero == Zero(3, over="replica", prefetch=2, offload=True)
    assert both.pipeline == Pipeline("zbv", stages="blocks.*", chunks=4)
    assert both.deterministic == Invariant(2)
    # What is at its default is not said, and what one does not have the other gives.
    assert SAID | Plan(zero=Zero(0, over="dp")) == SAID
    assert Plan(axes=("replica",)) | SAID == SAID
    assert (SAID | Plan(zero={"head*": 2})).zero == replace(SAID.zero, level={"head*": 2})


def test_a_schedule_and_an_invariance_that_are_written_count_also_as_their_defaults():
    later = SAID | Plan(pipeline="1f1b", deterministic="dp-invariant")
    assert later.pipeline == Pipeline("1f1b", stages="blocks.*", chunks=4)
    assert later.deterministic == Invariant(8)
    assert (SAID | Plan(pipeline=Pipeline(chunks=3))).pipeline.schedule == "interleaved"


def test_with_changes_what_is_named_and_nothing_beside_it():
    assert SAID.with_(zero=2).zero == replace(SAID.zero, level=2)
    assert SAID.with_(over="dp", block=4).zero == replace(SAID.zero, over="dp", block=4)
    assert SAID.with_(pipeline="zbv", chunks=2).pipeline == Pipeline("zbv", stages="blocks.*")
    assert SAID.with_(shards=1).deterministic == Invariant(1)
    assert SAID.with_(zero=Zero(3), pipeline=Pipeline("zbv"), deterministic="dp-invariant") == Plan(
        zero=3, axes=("replica",), pipeline="zbv", deterministic=Invariant(8)
    )
    assert SAID.with_(pipeline=None, deterministic=None).pipeline is None
    # Of a plan that has none of it as well.
    assert BASE.with_(stages="blocks.*", shards=2) == BASE.with_(
        pipeline=Pipeline(stages="blocks.*"), deterministic=Invariant(2)
    )


NO_FIELDS = [
    ({"zerro": 1}, "no 'zerro'. Did you mean 'zero'"),
    ({"prefech": 1}, "no 'prefech'. Did you mean 'zero.prefetch'"),
    ({"stage": "a"}, "no 'stage'. Did you mean 'pipeline.stages'"),
]


@pytest.mark.parametrize(("words", "message"), NO_FIELDS)
def test_words_that_are_no_fields(words: dict[str, Any], message: str):
    with pytest.raises(PlanError, match=message):
        BASE.with_(**words)


def test_a_mapping_is_no_pipeline_and_no_shards_are_no_invariant():
    with pytest.raises(PlanError, match=r"Pipeline\(schedule=..., .*Plan\(microbatches=n\)"):
        Plan(pipeline={"schedule": "1f1b"})
    with pytest.raises(PlanError, match=r"deterministic\.shards=0"):
        Plan(deterministic=Invariant(0))
    with pytest.raises(PlanError, match=r"deterministic=True: Invariant\(shards=8\)"):
        Plan(deterministic=True)


def test_words_of_a_field_that_is_none_are_refused():
    for words in ({"pipeline": None, "chunks": 4}, {"shards": 4, "deterministic": None}):
        with pytest.raises(PlanError, match=r"=None and .*: leave one of them out"):
            SAID.with_(**words)


@pytest.mark.parametrize("value", [5, True, False, 1.5, [5], [None], [[1]], {"a": 1}], ids=str)
def test_what_is_no_names_and_no_globs_is_refused(value: Any):
    rows = {"axes": value}, {"local_rows": value}
    nested = [{"zero": {"level": 3, name: value}} for name in ("units", "owned")]
    for words in (*rows, *nested):
        with pytest.raises(PlanError, match="expected"):
            Plan.from_json(json.dumps({"parameters": {}} | words))


@pytest.mark.parametrize("placement", [0, Shard(0), "Shard(0)", "Shard(dim=0)", "S(0)"], ids=str)
def test_shard_takes_dims_and_placements(placement: object):
    plan = BASE.shard("head.weight", placement, "tp")
    assert next(iter(plan.parameters.items())) == ("head.weight", "tp:0")
    assert layouts(plan)["head.weight"] == "tp:0"


@pytest.mark.parametrize("placement", [Replicate(), "Replicate()", "replicate", "R"], ids=str)
def test_replicated_over_one_axis(placement: object):
    assert BASE.shard("up.weight", placement, "tp").parameters["up.weight"] == "tp:full"


@pytest.mark.parametrize("placement", [Partial(), None, True, "0:tp"], ids=str)
def test_what_is_no_placement_is_refused(placement: object):
    with pytest.raises(PlanError, match="expected a dim"):
        BASE.shard("up.weight", placement, "tp")


def test_phases():
    plan = BASE.shard("down:out", 1, "tp", phase="run")
    assert plan.activations["down"] == "-> tp:1"
    assert plan.parameters == BASE.parameters
    with pytest.raises(PlanError, match="phase 'later'"):
        BASE.shard("up", 0, "tp", phase="later")  # type: ignore[arg-type]


def test_annotations_of_both_sides_of_a_module():
    plan = BASE.annotate("up", "tp:1").annotate("down:in", "tp:full").annotate("up:out", "tp:2")
    assert plan.activations == {"down": "tp:full ->", "up": "tp:full -> tp:2"}
    with pytest.raises(PlanError, match="write 'module:in' or 'module:out'"):
        BASE.annotate("up:between", "tp:1")


def test_redistribute_is_the_rule_with_both_sides():
    assert BASE.redistribute("up", "tp:1", "tp:full").activations == {"up": "tp:1 -> tp:full"}
    with pytest.raises(PlanError):
        BASE.redistribute("up", "nowhere", "tp:full")


GLOBS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
LAYOUTS = st.sampled_from(["replicate", "tp:full", "dp:0, tp:1", "tp:-1", "tp:0/3", "tp:1/4+1+1"])
SIDES = st.sampled_from(["tp:full", "tp:1", "x = tp:0; * = tp:full", "0 = dp:0, tp:1"])
DTYPES = st.dictionaries(
    st.sampled_from(["compute", "reduce", "master", "buffers"]),
    st.sampled_from(["bfloat16", "float32", torch.float16]),
    min_size=1,
)


def by_glob(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(GLOBS, values, min_size=1, max_size=3)


LEVELS = st.integers(0, 3) | by_glob(st.integers(0, 3))
MANY = GLOBS | st.lists(GLOBS, min_size=1, max_size=2)
ZERO: dict[str, st.SearchStrategy[Any]] = {
    "over": st.sampled_from(["dp", "shard"]),
    "units": MANY,
    "prefetch": st.integers(0, 3),
    "reduce_ahead": st.integers(0, 3),
    "offload": st.sampled_from([True, False, "optimizer"])
    | by_glob(st.sampled_from([True, False, "optimizer", "parameters", "none"])),
    "owned": MANY,
    "block": st.integers(1, 512) | st.tuples(st.integers(1, 64), st.integers(1, 64)),
}
SCHEDULES = st.sampled_from(["1f1b", "gpipe", "auto"])
PIPELINE: dict[str, st.SearchStrategy[Any]] = {
    "stages": st.none() | MANY,
    "chunks": st.integers(1, 4),
    "memory": st.none() | st.integers(1, 1 << 40),
    "everywhere": st.none() | MANY,
}
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "parameters": by_glob(LAYOUTS),
    "activations": by_glob(st.builds("{} -> {}".format, SIDES, SIDES)),
    "batch": st.sampled_from([None, "dp:0", "dp:0, cp:1"]),
    "batch_is": st.sampled_from(["global", "local"]),
    "axes": st.just(("dp", "shard", "tp", "cp", "ep")),
    "zero": LEVELS | st.builds(Zero, LEVELS, **ZERO),
    "precision": DTYPES | by_glob(DTYPES),
    "checkpoint": st.sampled_from(["full", "24GB", 2])
    | by_glob(st.sampled_from(["full", "save: matmul", "none"])),
    "deterministic": st.just("dp-invariant") | st.builds(Invariant, st.integers(1, 9)),
    "microbatches": st.integers(1, 8),
    "pipeline": SCHEDULES | st.builds(Pipeline, SCHEDULES, **PIPELINE),
    "experts": st.sampled_from(["ep", "dp, ep"]) | by_glob(st.just("ep")),
    "local_rows": st.none() | GLOBS | st.lists(GLOBS, min_size=1, max_size=2),
    "sequence": st.sampled_from(["ring", "ulysses", "gather", "auto"]),
}


def test_the_fuzz_knows_every_field():
    assert set(FIELDS) == {one.name for one in fields(Plan)}
    assert {"level", *ZERO} == {one.name for one in fields(Zero)}
    assert {"schedule", *PIPELINE} == {one.name for one in fields(Pipeline)}


@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_any_plan_is_stored_and_read(said: dict[str, Any]):
    try:
        plan = Plan(**said)
    except PlanError:
        assume(False)  # a glob with an open bracket, or words that exclude each other
    for again in (Plan.from_toml(plan.to_toml()), Plan.from_json(plan.to_json())):
        assert again == plan
        for name in FIELDS:
            mine, its = (getattr(one, name) for one in (plan, again))
            # The order of rules decides, and dicts are equal in any order.
            assert list(its) == list(mine) if isinstance(mine, dict) else its == mine
        mine, its = (one.zero.level for one in (plan, again))
        assert not isinstance(mine, dict) or list(its) == list(mine)


def test_toml_by_hand():
    text = """
    batch = "dp:0"
    zero = 3
    [parameters]
    "*.up.weight" = "tp:0"
    "*" = "replicate"
    """
    plan = Plan.from_toml(text)
    assert plan == Plan(parameters={"*.up.weight": "tp:0", "*": "replicate"}, zero=3)


def test_toml_nests_as_plans_do():
    text = """
    pipeline = "zbv"
    deterministic = { shards = 4 }
    [parameters]
    [zero]
    over = "replica"
    units = ["blocks.*", "head"]
    [zero.level]
    "embed*" = 1
    "*" = 3
    """
    zero = Zero({"embed*": 1, "*": 3}, over="replica", units=("blocks.*", "head"))
    plan = Plan(parameters={}, zero=zero, pipeline="zbv", deterministic=Invariant(4))
    assert Plan.from_toml(text) == plan
    written = plan.to_toml()
    assert "[zero]" in written
    assert "owned" not in written


def test_toml_leaves_out_what_need_not_be_said_and_nests():
    assert "units" not in BASE.to_toml()
    content = {"batch": None, "p": {"*.a": {"x": "y", "n": [1, 2]}, "z": {}}}
    assert read_toml(toml_of(content)) == content


NO_PLANS = [
    ("[", "cannot be read"),
    ("zero = 3", "an object with the keys"),
    ("zerro = 3\n[parameters]", "Did you mean 'zero'?"),
    ("prefetch = 3\n[parameters]", "that is a field of zero, 'zero.prefetch'"),
    ("zero = { prefech = 1 }\n[parameters]", "no 'zero.prefech'. Did you mean 'prefetch'?"),
    ('zero = { "*" = 1 }\n[parameters]', "Levels by glob stand under 'zero.level'"),
    ("pipeline = { microbatches = 2 }\n[parameters]", "no 'pipeline.microbatches'"),
    ("deterministic = { shards = 0 }\n[parameters]", "deterministic.shards=0"),
    ('[parameters]\n"*" = "tp"', "'tp'"),
    ('[parameters]\n"*" = 0', "a layout is a string"),
]


@pytest.mark.parametrize(("text", "message"), NO_PLANS)
def test_toml_that_is_no_plan(text: str, message: str):
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(text)
    assert message in str(caught.value)
