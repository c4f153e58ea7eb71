"""The comparison computes its facts from logs, and a difference that is there is found."""

from pathlib import Path
from typing import Any

import pytest
from vescale_parallel import TrainError

from tools.compare import findings
from tools.compare.job import FinishedRun, report_equality
from tools.compare.launch import Launch, follow
from tools.compare.options import parse
from tools.compare.picture import draw_curves


def log(losses: list[float], **digests: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"event": "digest", "what": what, "module": what, "sha256": sha}
        for what, sha in digests.items()
    ]
    return events + [{"event": "step", "step": i, "loss": x} for i, x in enumerate(losses, 1)]


def test_largest_difference_is_relative_and_over_shared_steps():
    one = findings.losses(log([2.0, 4.0, 8.0]))
    two = findings.losses(log([2.0, 4.4]))
    difference = findings.largest_difference(one, two)
    assert difference.step == 2
    assert difference.relative == pytest.approx(0.1)


def test_early_steps_are_the_first_twenty():
    assert sorted(findings.early({step: 1.0 for step in range(1, 40)})) == list(range(1, 21))


@pytest.mark.parametrize(("other", "differing"), [("a", ()), ("b", ("parameters",))])
def test_digests(other: str, differing: tuple[str, ...]):
    logs = log([], parameters="a"), log([], parameters=other)
    found = findings.compare_digests("parameters", *logs)
    assert found.equal is not bool(differing)
    assert found.differing == differing


def test_digests_that_were_never_taken_are_not_equal():
    assert not findings.compare_digests("dropout", log([1.0]), log([1.0])).equal


@pytest.mark.parametrize(
    ("digests", "losses", "broken"),
    [
        ({"parameters": "a", "dropout": "b"}, [2.0, 2.00001], []),
        ({"parameters": "x", "dropout": "b"}, [2.0, 2.0], ["the initial parameters differ"]),
        ({"parameters": "a", "dropout": "x"}, [2.0, 2.0], ["dropout masks differ: dropout"]),
        ({"parameters": "a"}, [2.0, 2.0], ["dropout masks differ: dropout"]),
        (
            {"parameters": "a", "dropout": "b"},
            [2.0, 2.1],
            [
                "losses differ by more than 1e-05 in the first steps",
                "mesh leaves the curve at step 2 (5.0e-02)",
            ],
        ),
    ],
)
def test_broken_promises_are_found(digests: dict[str, str], losses: list[float], broken: list[str]):
    one = FinishedRun("one", log([2.0, 2.0], parameters="a", dropout="b"))
    assert report_equality(one, FinishedRun("mesh", log(losses, **digests))) == broken


def test_a_table_shows_the_first_and_the_last_step():
    steps = findings.shown_steps(list(range(1, 101)))
    assert steps[:5] == [1, 2, 3, 4, 5]
    assert steps[-1] == 100
    assert len(steps) <= 17
    curve = {step: 1.0 for step in range(1, 101)}
    text = findings.loss_table(curve, "dp=2", {**curve, 100: 1.5})
    assert text.splitlines()[-1].split() == ["100", "1.000000", "1.500000", "+5.0e-01"]
    text = findings.difference_table(curve, {"a": curve, "b": {**curve, 100: 1.5}})
    assert text.splitlines()[-1].split() == ["100", "1.000000", "+0.0e+00", "+5.0e-01"]


def test_the_table_of_memory_shows_the_rank_with_most_and_all_ranks():
    ranks = [
        {"parameters": 2_000_000, "gradients": 10_000, "states": 0},
        {"parameters": 1_000_000, "gradients": 0, "states": 30_000},
    ]
    runs = {"mesh": [{"event": "memory", "step": 3, "ranks": ranks}], "none": log([1.0])}
    rows = [line.split() for line in findings.memory_table(runs).splitlines()[2:]]
    assert rows == [["mesh", "2.00", "0.01", "0.03", "2.01", "1.03"], ["none", *["0.00"] * 3]]


def test_the_picture_is_a_png(tmp_path: Path):
    curve = {1: 5.0, 2: 4.0}
    draw_curves(tmp_path / "curves.png", curve, {"dp=2": {1: 5.0, 2: 4.00001}})
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_options_of_the_trainer_pass_through():
    options = parse(["--steps", "5", "--layers", "2", "--data", "a", "b"])
    assert options.steps == 5
    assert options.training == ("--layers", "2", "--data", "a", "b")
    assert options.resume_on == ("tp=4", "dp=3", "one")
    assert options.zero_on == ("dp=2,tp=2",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layerz", "2"], "Did you mean '--layers'?"),
        (["--zero", "3"], "--zero is set by the comparison"),
        (["--zero-on", "x"], "'x' is not AXIS=SIZE"),
        (["--digests"], "--digests is set by the comparison"),
        (["--mesh", "dp"], "'dp' is not AXIS=SIZE"),
        (["--resume-on", "tp=4", "x"], "'x' is not AXIS=SIZE"),
        (["--steps", "0"], "--steps is at least 1"),
        (["--time-limit", "nan"], "--time-limit nan: a number of seconds"),
        (["--time-limit", "-1"], "--time-limit -1.0: a number of seconds"),
        (["--lr", "nan"], "--lr nan: a finite number"),
        (["--mesh", "dp=-1"], "every size is needed"),
    ],
)
def test_refusals(arguments: list[str], message: str):
    with pytest.raises(TrainError) as caught:
        parse(arguments)
    assert message in str(caught.value)


def test_a_run_that_fails_says_why(tmp_path: Path):
    launch = Launch("broken", tmp_path, 1, ("--data", "/nowhere/at/all"))
    with pytest.raises(TrainError) as caught:
        follow(launch, 300, lambda events: None)
    assert "broken: ended with status 2" in str(caught.value)
    assert "/nowhere/at/all: no such file or folder" in str(caught.value)


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path):
    launch = Launch("slow", tmp_path, 1, ("--steps", "100000"))
    with pytest.raises(TrainError, match="slow: not done after 1 s"):
        follow(launch, 1, lambda events: None)
