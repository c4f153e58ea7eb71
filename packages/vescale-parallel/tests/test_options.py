"""Options are read exactly, remembered by checkpoints, and refused with one clear sentence."""

import pytest
from vescale_parallel import TrainError
from vescale_parallel.train.options import (
    REMEMBERED,
    Options,
    make_options,
    parse_arguments,
    parse_mesh,
    parser,
)


def test_only_what_is_given_is_returned():
    assert parse_arguments([]) == {}
    given = parse_arguments(["--steps", "7", "--data", "a", "b", "--digests", "--lr", "1e-4"])
    assert given == {"steps": 7, "data": ("a", "b"), "digests": True, "lr": 1e-4}
    assert make_options(given).steps == 7


def test_a_checkpoint_fills_in_what_was_not_given():
    first = make_options({"batch": 4, "steps": 30, "dim": 64})
    resumed = make_options({"batch": 6, "steps": 50}, first.remembered())
    assert (resumed.batch, resumed.dim, resumed.steps) == (6, 64, 50)
    assert resumed.decay_steps == 30
    assert "out" not in REMEMBERED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stepz", "3"], "Did you mean '--steps'?"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--steps", "0"], "--steps 0: at least 1"),
        (["--dropout", "1"], "--dropout 1.0"),
        (["--dim", "100"], "not a multiple"),
        (["--heads", "8", "--kv-heads", "3"], "not a multiple of --kv-heads 3"),
        (["extra"], "unrecognized arguments: extra"),
        (["--st", "3"], "--st"),
    ],
)
def test_refusals(arguments: list[str], message: str):
    with pytest.raises(TrainError) as caught:
        make_options(parse_arguments(arguments))
    assert message in str(caught.value)


def test_mesh_strings():
    assert parse_mesh("dp=2, tp=2") == {"dp": 2, "tp": 2}
    assert parse_mesh("tp=-1") == {"tp": -1}


@pytest.mark.parametrize(
    "text", ["dp", "dp=", "=2", "dp=x", "dp=0", "dp=2;tp=2", "dp=2,", "dp=2,dp=2"]
)
def test_mesh_strings_that_are_none(text: str):
    with pytest.raises(TrainError, match="--mesh"):
        parse_mesh(text)


def test_help_teaches():
    text = parser().format_help()
    for part in ("torchrun --nproc-per-node 4", "--resume", "examples:", "dp=2,tp=2"):
        assert part in text
    for name in Options.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in text
