"""Texts that would take all memory, or never end, are refused quickly by errors of ours."""

import contextlib
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from vescale_parallel import GraphError, MeshError, ParallelError, Plan, PlanError, schedules
from vescale_parallel._cli.models import read_plan
from vescale_parallel._common.mesh import from_launcher, world_size
from vescale_parallel._graph.machine import Machine
from vescale_parallel._notation.arguments import unknown_arguments
from vescale_parallel._notation.glob import expand_braces, matches
from vescale_parallel._notation.layout import parse_layout
from vescale_parallel._plan.declared_layout import model_of

SCHEDULES = {
    "far microbatch": ("0F0,0F3000000000", "microbatch 3000000000"),
    "far stage": ("0F0,3000000000F0", "no rank has stage 1"),
    "many digits": ("0F" + "9" * 5000, "no action"),
    "a long field": ("0F0," + "x" * 200_000, "no CSV"),
    "nul": ("0F0,\0", "no action|no CSV"),
    "nothing": (",\n,", "has stage 0"),
}


@pytest.mark.parametrize(("text", "words"), SCHEDULES.values(), ids=SCHEDULES)
def test_schedules(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        schedules.from_csv(text)


GLOBS = {
    "many alternatives": ("{a,b}" * 26, "more than 4096 alternatives"),
    "many in one": ("{" + "{a,b}{a,b}{a,b}{a,b}," * 2 + "}" + "{a,b}" * 9, "more than 4096"),
    "many braces": ("{" * 100_000, "more than 64 braces"),
    "deep": ("{" * 65 + "}" * 65, "more than 64 braces"),
}


@pytest.mark.parametrize(("glob", "words"), GLOBS.values(), ids=GLOBS)
def test_globs(glob: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        expand_braces(glob)
    with pytest.raises(PlanError, match=words):
        Plan(parameters={glob: "tp:0"})


def test_globs_of_many_stars_and_alternatives_are_quick() -> None:
    assert len(expand_braces("{a,b}" * 12)) == 4096
    assert not matches("*a" * 40 + "*b", "a" * 500)


TEXTS = {
    "deep lists": ("a = " + "[" * 100_000, "[" * 100_000),
    "deep tables": ("a." * 20_000 + "a = 1", '{"a":' * 100_000),
    "deep inner tables": ("x = {" + '"a" . ' * 20_000 + "a = 1}", "[{" * 100_000),
    "deep headers": ("[" + "a." * 20_000 + "a]", "{" * 100_000),
    "a long word": ("a" * 1_000_000, "a" * 1_000_000),
    "many digits": ("a = " + "9" * 5000, "9" * 5000),
    "half a character": ('a = "\\ud800"', '{"parameters": {"\\ud800": "tp:0"}}'),
    "a key twice": ("a = 1\na = 2", '{"parameters": {}, "parameters": {}}'),
}


@pytest.mark.parametrize(("toml", "json"), TEXTS.values(), ids=TEXTS)
def test_plans(toml: str, json: str) -> None:
    for read, text in ((Plan.from_toml, toml), (Plan.from_json, json)):
        with pytest.raises(PlanError, match=r"cannot be read|is an object"):
            read(text)


@pytest.mark.parametrize("name", ["plan.json", "plan.toml"])
def test_files_of_plans(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match="cannot be read"):
        read_plan(tmp_path / name)
    (tmp_path / name).write_bytes(b" " * (1 << 23))
    with pytest.raises(PlanError, match="at most"):
        read_plan(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(PlanError, match="regular file"):
        read_plan(tmp_path / name)
    with pytest.raises(GraphError, match=r"not what Machine\.save writes"):
        Machine.load(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    ["tp:" + "9" * 5000, "tp:0/" + "9" * 5000, "tp:0/1+" + "9" * 5000, "a" * 1_000_000,
     ",".join(f"a{n}:0" for n in range(100_000))],
    ids=["dim", "blocks", "proportions", "long", "axes"],
)  # fmt: skip
def test_layouts(text: str) -> None:
    with pytest.raises(PlanError, match="layout"):
        parse_layout(text)


@pytest.mark.parametrize("name", ["9" * 5000, "²"])
def test_positions_of_arguments(name: str) -> None:
    chosen: Any = types.SimpleNamespace(parts=[(name, None)])
    (found,) = unknown_arguments(nn.Linear(1, 1), chosen)
    assert "has no argument" in found


@pytest.mark.parametrize("said", ["9" * 5000, "", "two", "-1"])
def test_variables_of_launchers(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", said)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(MeshError, match="a number of processes"):
        world_size()
    assert from_launcher("WORLD_SIZE", 7) == 7


class Config:
    """A configuration of a library of its own."""

    __module__ = "vescale_made_up.configs"
    model_type = "made up"

    def __init__(self, architectures: Any) -> None:
        self.architectures = architectures


def test_architectures_are_models_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    library = types.ModuleType("vescale_made_up")
    vars(library).update(
        run=ran.append,
        Trainer=type("Trainer", (), {"__init__": lambda self, config: ran.append(config)}),
        Model=type(
            "Model", (nn.Linear,), {"__init__": lambda self, c: nn.Linear.__init__(self, 1, 1)}
        ),
        Broken=type("Broken", (nn.Module,), {"__init__": lambda self, config: 1 // 0}),
    )
    monkeypatch.setitem(sys.modules, "vescale_made_up", library)
    assert isinstance(model_of(Config(["run", "Trainer", 3, None, "Model"])), nn.Linear)
    for architectures in (["run"], ["Trainer"], "run", 3, [["run"]]):
        with pytest.raises(PlanError, match="no model class is known"):
            model_of(Config(architectures))
    with pytest.raises(PlanError, match="Broken cannot be built from its configuration"):
        model_of(Config(["Broken"]))
    assert not ran


HEALTHY = {
    "schedule": (schedules.from_csv, ["0F0,0F1,0B0,0B1\n1F0,1F1\n", "(0F0;0B0)OVERLAP_F_B"]),
    "toml": (Plan.from_toml, [Plan(parameters={"{q,k}.*": "tp:0/2"}).to_toml()]),
    "json": (Plan.from_json, [Plan(parameters={"{q,k}.*": "tp:0/2"}).to_json()]),
    "glob": (expand_braces, ["a.{q,~k,{v,w}}.[ab]*?"]),
    "layout": (parse_layout, ["tp:0, dp:full", "tp:-1/4+1+1", "replicate"]),
}  # fmt: skip
PIECES = ["", "{", "}", ",", "[", "]", "*", "9" * 30, "-", "~", '"', "\n", "=", ".", ":", "/", "\0",
          "é", "F", "B"]  # fmt: skip


@pytest.mark.parametrize("rounds", [400, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HEALTHY)
def test_texts_with_changes_are_read_or_refused(name: str, rounds: int) -> None:
    read, corpus = HEALTHY[name]
    dice = random.Random(49)
    for _ in range(rounds):
        text = dice.choice(corpus)
        for _ in range(dice.randrange(1, 5)):
            at = dice.randrange(len(text) + 1)
            start = dice.randrange(len(text) + 1)
            piece = dice.choice([*PIECES, text[start : start + dice.randrange(20)]])
            text = text[:at] + piece + text[at + dice.randrange(4) :]
        with contextlib.suppress(ParallelError):
            read(text)  # type: ignore[operator]
