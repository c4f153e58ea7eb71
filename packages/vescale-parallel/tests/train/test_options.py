"""Options are read exactly, remembered by checkpoints, and refused with one clear sentence."""

from dataclasses import fields

import pytest
from vescale_parallel import TrainError
from vescale_parallel.train import options


def test_only_what_is_given_is_returned():
    assert options.parse_arguments([]) == {}
    given = options.parse_arguments(
        ["--steps", "7", "--data", "a", "b", "--digests", "--lr", "1e-4"]
    )
    assert given == {"steps": 7, "data": ("a", "b"), "digests": True, "lr": 1e-4}
    assert options.make_options(given).steps == 7


def test_a_checkpoint_fills_in_what_was_not_given():
    first = options.make_options({"batch": 4, "steps": 30, "dim": 64})
    resumed = options.make_options({"batch": 6, "steps": 50}, first.remembered())
    assert (resumed.batch, resumed.dim, resumed.steps) == (6, 64, 50)
    assert resumed.decay_steps == 30
    assert "out" not in options.REMEMBERED


REFUSED = [
    (["--stepz", "3"], "Did you mean '--steps'?"),
    (["--steps", "many"], "invalid int value: 'many'"),
    (["--steps", "0"], "--steps 0: a finite number, at least 1, is needed"),
    (["--dropout", "1"], "--dropout 1.0"),
    (["--dim", "100"], "not a multiple"),
    (["--heads", "8", "--kv-heads", "3"], "not a multiple of --kv-heads 3"),
    (["extra"], "unrecognized arguments: extra"),
    (["--st", "3"], "--st"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refusals(arguments: list[str], message: str):
    with pytest.raises(TrainError) as caught:
        options.make_options(options.parse_arguments(arguments))
    assert message in str(caught.value)


def number_of(default: object) -> type | None:
    return type(default) if type(default) in (int, float) else None


NUMBERS = {one.name: kind for one in fields(options.Options) if (kind := number_of(one.default))}
WRONG = {int: ["-2", "-99999999999999999999"], float: ["nan", "inf", "-inf", "1e999", "-1e-9"]}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, kind in NUMBERS.items() for value in WRONG[kind]]
)
def test_no_numeric_option_takes_what_is_no_sensible_number(name: str, value: str):
    with pytest.raises(TrainError, match=f"^{options.flag(name)} "):
        options.make_options(options.parse_arguments([f"{options.flag(name)}={value}"]))
    # A checkpoint that holds such a number brings it in no more than the command line.
    remembered = {name: NUMBERS[name](value)} if name in options.REMEMBERED else {}
    if remembered:
        with pytest.raises(TrainError, match=f"^{options.flag(name)} "):
            options.make_options({}, remembered)


@pytest.mark.parametrize(("name", "value"), [("seed", 2**64), ("clip", 0.0), ("dropout", 1.0)])
def test_upper_ends(name: str, value: float):
    with pytest.raises(TrainError, match=options.flag(name)):
        options.make_options({name: value})


def test_mesh_strings():
    assert options.parse_mesh("dp=2, tp=2") == {"dp": 2, "tp": 2}
    assert options.parse_mesh("tp=-1") == {"tp": -1}


@pytest.mark.parametrize(
    "text", ["dp", "dp=", "=2", "dp=x", "dp=0", "dp=2;tp=2", "dp=2,", "dp=2,dp=2"]
)
def test_mesh_strings_that_are_none(text: str):
    with pytest.raises(TrainError, match="--mesh"):
        options.parse_mesh(text)


def test_help_teaches():
    text = options.parser().format_help()
    for part in ("torchrun --nproc-per-node 4", "--resume", "examples:", "dp=2,tp=2"):
        assert part in text
    for name in options.Options.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in text
