"""The command line answers from shapes alone: a plan, its bytes and seconds, and an exit status."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from vescale_parallel import MeshError, Plan, PlanError
from vescale_parallel._cli.arguments import main, parse_bytes, parse_mesh
from vescale_parallel.train.model import Decoder, ModelConfig

CONFIG = ModelConfig(vocab=1024, dim=512, layers=4, heads=8, kv_heads=4, hidden=1024, context=64)
HERE = f"{__name__.rpartition('.')[2]}:build"


def build() -> nn.Module:
    """A decoder; nothing of it may be stored."""
    made = Decoder(CONFIG)
    assert all(one.device.type == "meta" for one in made.parameters())
    return made


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    return main(["plan", HERE, *arguments]), capsys.readouterr().out


def test_the_answer_for_people(capsys: pytest.CaptureFixture[str]):
    status, text = asked(capsys, "--mesh", "dp=512,tp=4", "--sequence", "64")
    assert status == 0
    for part in (
        "on mesh(dp=512, tp=4), 2048 ranks",
        '"{embed,head}.weight" = "tp:0"',
        "blocks recomputed",
        "all_reduce",
        "fits in 74.5 GiB",
    ):
        assert part in text


def test_the_answer_for_programs(capsys: pytest.CaptureFixture[str]):
    status, text = asked(capsys, "--mesh", "dp=8,tp=2", "--zero", "3", "--json")
    found = json.loads(text)
    assert status == 0
    assert found["fits"]
    assert found["plan"]["zero"]["level"] == 3
    assert found["parameters"] == sum(one.numel() for one in Decoder(CONFIG).parameters())
    kept, again = found["all_kept"]["bytes"], found["blocks_recomputed"]["bytes"]
    assert again["activations"] < kept["activations"]
    assert again["parameters"] == kept["parameters"]
    plan = Plan.from_json(json.dumps(found["plan"]))
    with torch.device("meta"):
        cost = plan.check(build(), {"dp": 8, "tp": 2}).cost(8 * 4096, sequence=4096)
    assert kept["parameters"] == cost.memory.parameters


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]):
    status, text = asked(capsys, "--mesh", "dp=2,tp=2", "--memory", "20MB")
    assert status == 1
    assert "does NOT fit in 19.1 MiB" in text
    assert "'--zero 3'" in text


@pytest.mark.parametrize("name", ["plan.toml", "plan.json"])
def test_a_plan_is_written_and_read(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str):
    file = str(tmp_path / name)
    given = ("--mesh", "dp=4,tp=2", "--json")
    first = asked(capsys, *given, "--sequence-parallel", "--zero", "2", "--write", file)
    assert asked(capsys, *given, "--plan", file) == first


def test_a_picture_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "plan.svg"
    assert asked(capsys, "--mesh", "dp=4,tp=2", "--svg", str(file))[0] == 0
    assert ElementTree.fromstring(file.read_text()).tag.endswith("svg")


@pytest.mark.parametrize("preset", ["decoder", "encoder", "data"])
def test_presets(capsys: pytest.CaptureFixture[str], preset: str):
    _, text = asked(capsys, "--mesh", "dp=2,tp=2", "--preset", preset, "--json")
    rules = json.loads(text)["plan"]["parameters"]
    assert (rules == {"*": "replicate"}) == (preset == "data")


WRONG_QUESTIONS = [
    (["nowhere.json", "--mesh", "dp=2"], "there is no such file"),
    (["nowhere:build", "--mesh", "dp=2"], "cannot be imported"),
    ([HERE + "er", "--mesh", "dp=2"], "cannot be imported"),
    ([HERE, "--mesh", "dp=2", "--plan", "nowhere.toml"], "cannot be read"),
    ([HERE, "--mesh", "dp=2", "--write", "nowhere/plan.toml"], "cannot be written"),
    ([HERE, "--mesh", "dp"], "write sizes by axis"),
    ([HERE, "--mesh", "dp=2", "--memory", "much"], "write bytes"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_QUESTIONS)
def test_wrong_questions(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_help_teaches_with_commands_that_can_be_typed(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    assert "--mesh dp=64,tp=8 --memory 80GB" in text
    assert "Exit status" in text


def test_meshes_and_bytes():
    assert list(parse_mesh("dp=64, tp=8").items()) == [("dp", 64), ("tp", 8)]
    assert parse_bytes("80GB") == 80e9
    assert parse_bytes("1.5 GiB") == 1.5 * 2**30
    assert parse_bytes("512") == 512
    for wrong in ("dp=0", "dp=2,dp=2", "", "dp=-1"):
        with pytest.raises(MeshError):
            parse_mesh(wrong)
    with pytest.raises(PlanError):
        parse_bytes("80 gigs")
