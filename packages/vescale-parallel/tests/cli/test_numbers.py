"""Every number of every command line is bounded: what is outside is told with the option's name."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
from vescale_parallel import cost
from vescale_parallel._cli import arguments

REAL = {"--skew": (1, 1e6), "--send": (0, 1e9), "--seconds": (0, 86_400)}
REAL |= {"--efficiency": (1e-6, 1), "--overlap": (0, 1)}


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    made = arguments._parser()
    choices = next(a for a in made._actions if isinstance(a, argparse._SubParsersAction)).choices
    yield from choices.items()
    yield "cost", cost._parser()


def numbers() -> list[tuple[str, argparse.Action]]:
    return [
        (command, action)
        for command, parser in commands()
        for action in parser._actions
        if action.type in (int, float) or getattr(action.type, "__name__", "") == "number"
    ]


@pytest.mark.parametrize(
    ("command", "action"), numbers(), ids=lambda value: getattr(value, "dest", value)
)
def test_bounds(command: str, action: argparse.Action):
    option = action.option_strings[0]
    if action.choices is not None:
        return  # a level of zero
    largest = 512 if option == "--stages" else 65_536
    least, most = REAL.get(option, (1, largest if command == "schedule" else 10**12))
    assert action.type is not None
    assert callable(action.type)
    assert action.type(str(least)) == least
    assert action.type(str(most)) == most
    for wrong in (least - 1, most + 1, "nan", "inf", "1e308", "9" * 5000, "", "x", "0x1"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"a (whole )?number, {least:g} to"):
            action.type(str(wrong))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("context --tokens 64 --heads 4 --ranks 2 --stride 0", "argument --stride: '0'"),
        ("context --tokens 64 --heads 4 --ranks 2 --kv-heads 0", "argument --kv-heads: '0'"),
        ("schedule --stages 2 --microbatches 2 --send nan", "argument --send: 'nan'"),
    ],
)
def test_the_option_is_named(line: str, words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        arguments.main(line.split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("plan :x --mesh dp=2", "MODEL ':x' cannot be imported"),
        ("plan os: --mesh dp=2", "MODEL 'os:' cannot be imported"),
        ("plan .os:x --mesh dp=2", "MODEL '.os:x' cannot be imported"),
        ("memory .os:x", "GRAPH '.os:x' cannot be imported"),
        (f"plan os:x --mesh dp={'9' * 5000}", "write sizes by axis"),
        ("plan os:x --mesh dp=1000,tp=2000", "up to 1,048,576 ranks"),
        (f"plan os:x --mesh dp=2 --memory {'9' * 400}GB", "write bytes"),
    ],
)
def test_words_that_hold_numbers(line: str, words: str, capsys: pytest.CaptureFixture[str]):
    assert arguments.main(line.split()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["plan model_that_is_broken:make --mesh dp=2", "memory model_that_is_broken:make"]
)
def test_what_breaks_is_not_said_not_to_fit(
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_that_is_broken.py").write_text("def make():\n    return 1 / 0\n")
    assert arguments.main(line.split()) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_plan_in_another_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "plan.toml").write_bytes(b"# caf\xe9")
    line = f"plan torch.nn:Identity --mesh dp=2 --plan {tmp_path / 'plan.toml'}"
    assert arguments.main(line.split()) == 2
    assert "cannot be read" in capsys.readouterr().err
