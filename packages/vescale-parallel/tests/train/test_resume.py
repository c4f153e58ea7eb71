"""Every option that is given at a resume holds from its first step on, or is refused by name."""

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from vescale_parallel import TrainError
from vescale_parallel.train.log import read_log
from vescale_parallel.train.loop import train
from vescale_parallel.train.options import Options, flag, parse_arguments

TEXT = str(Path(sysconfig.get_paths()["stdlib"]) / "this.py")
FIRST = ["--steps", "2", "--layers", "1", "--dim", "24", "--heads", "6", "--kv-heads", "2"]
FIRST += ["--hidden", "16", "--context", "8", "--batch", "4", "--warmup", "1", "--data", TEXT]
FIRST += ["--decay-steps", "8", "--validate-every", "0"]

Log = list[dict[str, Any]]


def events(log: Log, kind: str) -> Log:
    return [one for one in log if one["event"] == kind]


def rates(log: Log) -> list[float]:
    return [one["learning_rate"] for one in events(log, "step")]


def first(name: str) -> Callable[[Log], Any]:
    return lambda log: events(log, "step")[0][name]


def last(name: str) -> Callable[[Log], Any]:
    return lambda log: events(log, "step")[-1][name]


def validated(log: Log) -> Log:
    return events(log, "validation")


# For every option: what is given at the resume, and what of the log tells that it holds, as it is
# other than without it; or nothing, of those that are refused.
GIVEN: dict[str, tuple[list[str], Callable[[Log], Any] | None]] = {
    "data": ([__file__], first("loss")),
    "overwrite": ([], lambda log: len(events(log, "start"))),
    "steps": (["5"], lambda log: len(events(log, "step"))),
    "decay_steps": (["40"], last("learning_rate")),
    "batch": (["3"], first("loss")),
    "lr": (["0.5"], first("learning_rate")),
    "warmup": (["9"], first("learning_rate")),
    "weight_decay": (["30"], last("loss")),
    "clip": (["1e-9"], last("loss")),
    "seed": (["7"], first("loss")),
    "layers": (["2"], None),
    "dim": (["48"], None),
    "heads": (["2"], None),  # with one for keys and values: the same shapes of other heads
    "kv_heads": (["3"], None),
    "hidden": (["32"], None),
    "context": (["7"], first("loss")),
    "dropout": (["0.5"], first("loss")),
    "validate_every": (["1"], lambda log: len(validated(log))),
    "save_every": (["1"], lambda log: len(events(log, "checkpoint"))),
    "digests": ([], lambda log: len(events(log, "digest"))),
}
# What a run is built from anew, whatever the checkpoint says, and what is no part of it.
ANEW = {"mesh", "device", "out", "resume", "zero", "validation_batches", "tensorboard", "traceback"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread for each run: the trainer takes a share of the cores, and sets it for good."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOCAL_WORLD_SIZE", "4096")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after two steps."""
    out = tmp_path_factory.mktemp("begun")
    train(parse_arguments([*FIRST, "--out", str(out)]))
    return out / "step-00000002"


def gone_on(begun: Path, *more: str) -> Log:
    """The log of two more steps from there."""
    out = begun.parent.parent / f"{begun.parent.name}-on"
    out.mkdir(exist_ok=True)
    # Of an earlier run: what goes on is appended, and counted from here.
    (out / "log.jsonl").write_text('{"event": "start"}\n')
    # What is given last holds.
    short = ["--steps", "4", "--save-every", "-1", "--validate-every", "0", "--data", TEXT]
    train(parse_arguments(["--resume", str(begun), "--out", str(out), *short, *more]))
    return read_log(out / "log.jsonl")


@pytest.fixture(scope="module")
def as_it_was(begun: Path) -> Log:
    return gone_on(begun)


def test_each_option_is_in_the_table():
    assert {one.name for one in fields(Options)} == GIVEN.keys() | ANEW
    assert not GIVEN.keys() & ANEW


@pytest.mark.parametrize("name", GIVEN)
def test_an_option_that_is_given_again_holds_or_is_refused(name: str, begun: Path, as_it_was: Log):
    value, of = GIVEN[name]
    if of is None:
        heads = ["--kv-heads", "1"] if name == "heads" else []
        with pytest.raises(TrainError, match=f"^{flag(name)} {value[0]}: the model of the check"):
            gone_on(begun, flag(name), *value, *heads)
    else:
        assert of(gone_on(begun, flag(name), *value)) != of(as_it_was)


@pytest.mark.parametrize("given", [[], ["--lr", "0.5"], ["--warmup", "9"], ["--decay-steps", "5"]])
def test_rates_are_those_of_a_run_that_began_with_them(
    given: list[str], begun: Path, tmp_path: Path
):
    out = ["--steps", "4", "--save-every", "-1", "--out", str(tmp_path)]
    train(parse_arguments([*FIRST, *out, *given]))
    assert rates(gone_on(begun, *given)) == rates(read_log(tmp_path / "log.jsonl"))[2:]


def test_sizes_that_are_given_again_need_not_fit_the_defaults(begun: Path, as_it_was: Log):
    # Six heads do not divide the default width.
    again = gone_on(begun, "--heads", "6", "--kv-heads", "2", "--seed", "0")
    assert first("loss")(again) == first("loss")(as_it_was)


def test_dropout_goes_on_with_the_seed(begun: Path):
    def masks(*given: str) -> list[str]:
        log = gone_on(begun, "--dropout", "0.5", "--digests", *given)
        return [one["sha256"] for one in events(log, "digest") if one["what"] == "dropout"]

    assert masks() == masks("--seed", "0") != masks("--seed", "7")
