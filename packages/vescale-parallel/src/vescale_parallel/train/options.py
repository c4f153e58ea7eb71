"""The trainer's options: one frozen dataclass, and the command line made from it."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any, NoReturn

from vescale_parallel._common.messages import did_you_mean
from vescale_parallel._errors import TrainError
from vescale_parallel.train.model import ModelConfig

DESCRIPTION = """\
Train a byte-level, Llama-style decoder on real text.

The same program runs on one device and over a mesh of processes, with the same losses: the
model file is plain PyTorch, a plan of a few lines distributes it, and random numbers are those of
one device.
"""

EXAMPLES = """\
examples:
  python -m vescale_parallel.train
      one process, on the source files of the Python standard library

  torchrun --nproc-per-node 4 -m vescale_parallel.train --mesh dp=2,tp=2
      four processes: 2-way data parallel, 2-way tensor and sequence parallel

  torchrun --nproc-per-node 4 -m vescale_parallel.train --mesh dp=2,tp=2 --zero 3
      the same losses, with parameters, gradients and optimizer states sharded over dp

  torchrun --nproc-per-node 3 -m vescale_parallel.train --mesh dp=3 \\
      --resume runs/train/step-00000200 --steps 300
      go on with that run on another mesh; the losses continue the same curve

  python -m vescale_parallel.train --data ~/books notes.txt --layers 6 --dim 256
      your own files, a larger model

Every run writes log.jsonl (one JSON object a line) and its checkpoints to --out. A resumed run
takes model, batch, seed and learning-rate options from the checkpoint, unless they are given: from
its first step on it has the rates, and draws the windows and dropout, that they say. The model's
layers and widths stay the checkpoint's, and others are refused.
"""


def _option(default: Any, help: str, **more: Any) -> Any:
    """Return a field with its help; `--resume` restores `remembered` ones from the checkpoint."""
    return field(default=default, metadata={"help": help, **more})


def _curve(default: Any, help: str, **more: Any) -> Any:
    """Return an option of the loss curve, which a resumed run takes from the checkpoint."""
    return _option(default, help, remembered=True, **more)


def _size(default: int, help: str) -> Any:
    """Return an option that says which model the parameters of a checkpoint are of."""
    return _curve(default, help, is_size=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options of a run; the defaults are the main job's."""

    data: tuple[str, ...] = _option(
        (), "text files or folders (default: the Python standard library's sources)", metavar="PATH"
    )
    mesh: str = _option(
        "", "axes and sizes, as dp=2,tp=2 (default: dp over all processes)", metavar="AXIS=N,..."
    )
    device: str = _option("", "cpu or cuda (default: cuda where there is one)")
    out: str = _option("runs/train", "folder for the log and checkpoints", metavar="PATH")
    overwrite: bool = _option(False, "replace the run that --out holds")
    resume: str = _option("", "go on from this checkpoint, on any mesh", metavar="PATH")

    steps: int = _option(200, "train up to this step")
    decay_steps: int = _curve(0, "step at which the learning rate is lowest (default: --steps)")
    batch: int = _curve(8, "sequences per step, over all ranks")
    lr: float = _curve(1e-3, "highest learning rate")
    warmup: int = _curve(20, "steps until the learning rate is highest")
    weight_decay: float = _curve(0.1, "AdamW's weight decay")
    clip: float = _curve(1.0, "largest norm of all gradients together")
    seed: int = _curve(0, "seed of weights, dropout and sampling")
    zero: int = _option(
        0, "1 shards optimizer states over dp, 2 gradients as well, 3 parameters as well"
    )

    layers: int = _size(ModelConfig.layers, "decoder blocks")
    dim: int = _size(ModelConfig.dim, "width of the residual stream")
    heads: int = _size(ModelConfig.heads, "query heads")
    kv_heads: int = _size(ModelConfig.kv_heads, "key and value heads")
    hidden: int = _size(ModelConfig.hidden, "width inside the feed-forward layers")
    context: int = _curve(ModelConfig.context, "tokens in a sequence")
    dropout: float = _curve(ModelConfig.dropout, "dropout in attention and residual")

    validate_every: int = _option(50, "steps between validation losses; 0 for never")
    validation_batches: int = _option(4, "batches in a validation loss")
    save_every: int = _option(0, "steps between checkpoints; 0 for one at the end, -1 for none")
    tensorboard: bool = _option(False, "also write TensorBoard events to --out")
    digests: bool = _option(False, "log digests of the first parameters and dropout masks")
    traceback: bool = _option(False, "show where an error was raised")

    def __post_init__(self) -> None:
        """Refuse what cannot be trained, before anything is built."""
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            # Written so that NaN, which no comparison is true of, is outside as well.
            if not (least <= value <= most and math.isfinite(value)):
                above = "" if most == math.inf else f" and at most {most}"
                raise TrainError(
                    f"{flag(name)} {value}: a finite number, at least {least}{above}, is needed."
                )
        if self.clip == 0.0:
            raise TrainError("--clip 0 makes every gradient zero; 1e9, say, never clips.")
        if not 0.0 <= self.dropout < 1.0:
            raise TrainError(f"--dropout {self.dropout}: from 0 up to, but not including, 1.")
        # Rotary positions turn pairs of channels, so a head needs an even number of them.
        if self.dim % (2 * self.heads):
            raise TrainError(f"--dim {self.dim} is not a multiple of 2 x --heads {self.heads}.")
        if self.heads % self.kv_heads:
            raise TrainError(
                f"--heads {self.heads} is not a multiple of --kv-heads {self.kv_heads}."
            )

    @property
    def model(self) -> ModelConfig:
        """The sizes of the model."""
        # Options and sizes share names on purpose: a size added there is an option once named here.
        names = {one.name for one in fields(ModelConfig)}
        return ModelConfig(**{k: v for k, v in asdict(self).items() if k in names})

    def remembered(self) -> dict[str, Any]:
        """Return the options that a checkpoint keeps, because they shape the loss curve."""
        kept = {name: getattr(self, name) for name in REMEMBERED}
        # A resumed run has more steps; its schedule must stay that of the run it continues.
        return kept | {"decay_steps": self.decay_steps or self.steps}


_AT_LEAST_ONE = (
    *("steps", "batch", "layers", "dim", "heads", "kv_heads", "hidden", "context"),
    "validation_batches",
)
_AT_LEAST_ZERO = (
    *("lr", "warmup", "weight_decay", "clip", "decay_steps"),
    "validate_every",
)
_RANGES: dict[str, tuple[int, float]] = {
    **dict.fromkeys(_AT_LEAST_ONE, (1, math.inf)),
    **dict.fromkeys(_AT_LEAST_ZERO, (0, math.inf)),
    "save_every": (-1, math.inf),
    "zero": (0, 3),
    "seed": (0, 2**64 - 1),  # what torch.manual_seed takes
}
REMEMBERED = tuple(one.name for one in fields(Options) if one.metadata.get("remembered"))
_SIZES = tuple(one.name for one in fields(Options) if one.metadata.get("is_size"))


def flag(name: str) -> str:
    """Return the command-line spelling of an option."""
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    """Argparse whose errors are exceptions, so that every rank says one line and leaves."""

    def error(self, message: str) -> NoReturn:
        # argparse would print usage and exit by itself, at another moment on every rank.
        flags = [name for action in self._actions for name in action.option_strings]
        unknown = message.partition("unrecognized arguments: ")[2].split()
        hint = did_you_mean(unknown[0].partition("=")[0], flags) if unknown else ""
        raise TrainError(f"{message}.{hint} See --help.")


def parser() -> argparse.ArgumentParser:
    """Return the command line of the trainer."""
    made = _Parser(
        prog="python -m vescale_parallel.train",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An abbreviation that works today is ambiguous when an option is added.
        allow_abbrev=False,
    )
    for one in fields(Options):
        made.add_argument(flag(one.name), **_argument(one))
    return made


def _argument(one: "Field[Any]") -> dict[str, Any]:
    """Return how argparse reads a field; what is not given stays absent from the namespace."""
    assert one.default is not MISSING
    shown = "" if one.default in ("", (), 0, False, None) else f" (default: {one.default})"
    common = {"help": one.metadata["help"] + shown, "default": argparse.SUPPRESS}
    if isinstance(one.default, bool):
        return common | {"action": "store_true"}
    if isinstance(one.default, tuple):
        return common | {"nargs": "+", "metavar": one.metadata["metavar"]}
    metavar = one.metadata.get("metavar", {int: "N", float: "X", str: "NAME"}[type(one.default)])
    return common | {"type": type(one.default), "metavar": metavar}


def parse_arguments(arguments: Sequence[str] | None) -> dict[str, Any]:
    """Return the options that the command line gives, and only those.

    Raises:
        TrainError: an unknown option, or a value of the wrong kind.
    """
    # Only what was given: what a checkpoint remembers must not lose against a default.
    given = vars(parser().parse_args(arguments))
    return {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}


def make_options(given: Mapping[str, Any], checkpoint: Mapping[str, Any] | None = None) -> Options:
    """Options from what was given, then what the checkpoint remembers, then the defaults.

    Raises:
        TrainError: an option that cannot be trained with, or that is of another model than the
            checkpoint's.
    """
    # A checkpoint of an older trainer may remember options that no longer exist.
    kept = {k: v for k, v in (checkpoint or {}).items() if k in REMEMBERED}
    for name in _SIZES:
        # By name: parameters of another number of heads may have the same shapes.
        if name in given and name in kept and given[name] != kept[name]:
            raise TrainError(
                f"{flag(name)} {given[name]}: the model of the checkpoint has {kept[name]}. Leave "
                "it out to go on with that model."
            )
    return Options(**(kept | dict(given)))


def parse_mesh(text: str) -> dict[str, int]:
    """`"dp=2,tp=2"` as sizes by axis.

    Raises:
        TrainError: the text is not of that form, or names an axis twice.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        try:
            number = int(size)
        except ValueError:
            number = 0
        if not axis.isidentifier() or (number < 1 and number != -1):
            raise TrainError(
                f"--mesh {text!r}: {part.strip()!r} is not AXIS=SIZE. Write it as dp=2,tp=2."
            )
        if axis in sizes:
            raise TrainError(f"--mesh {text!r}: axis '{axis}' is given twice.")
        sizes[axis] = number
    return sizes
