"""Parses what a plan says about checkpointing, before there is a model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from vescale_parallel._checkpoint.saved_results import FAMILIES, named_operators
from vescale_parallel._common.messages import bytes_in, did_you_mean
from vescale_parallel._errors import PlanError
from vescale_parallel._notation.glob import expand_braces

SELECTIVE: Final = ("matmul", "attention", "convolution")
"""The operators whose results `"selective"` keeps."""

_WORDS: Final = ("none", "full", "selective")
_SAVE = re.compile(r"save:(.*)", re.DOTALL)
_OPERATOR = re.compile(r"\w+::\w+(\.\w+)?")
_EXPECTED: Final = (
    "'none', 'full', 'selective', 'save: matmul, ...' or, for all blocks, a number n (every n-th) "
    "or bytes of activations, as '24GB'"
)


@dataclass(frozen=True)
class Kind:
    """How a region is recomputed.

    Attributes:
        text: as the plan has it.
        saved: operators whose results are kept, families or names; none: all is computed again.
    """

    text: str
    saved: tuple[str, ...] = ()


FULL: Final = Kind("full")


@dataclass(frozen=True)
class CheckpointRules:
    """What a plan says, parsed; at most one of the first three.

    Attributes:
        blocks: how each repeated block is recomputed, or None.
        globs: glob over module names to a kind, None for modules that are not recomputed.
        budget: bytes of activations of a rank; as many blocks are recomputed as they ask for.
        every: of the repeated blocks, each that many.
    """

    blocks: Kind | None = None
    globs: Mapping[str, Kind | None] = field(default_factory=dict)
    budget: float | None = None
    every: int = 1

    @property
    def is_used(self) -> bool:
        """Whether anything is recomputed."""
        return bool(self.globs) or self.blocks is not None


def parse_checkpoint(said: Any) -> CheckpointRules:
    """Read the plan's word.

    Raises:
        PlanError: it cannot be read; the message quotes it.
    """
    if said is None:
        return CheckpointRules()
    if isinstance(said, Mapping):
        for glob in said:
            # Raises for braces that do not close: here, where the plan is written, and not where it
            # meets a model.
            expand_braces(glob)
        return CheckpointRules(globs={glob: _kind(text, glob) for glob, text in said.items()})
    # A bool is an int to Python, and `True` is no number of blocks.
    if isinstance(said, int) and not isinstance(said, bool) and said > 0:
        return CheckpointRules(blocks=FULL, every=said)
    # Before words: no word is a number of bytes.
    budget = bytes_in(said) if isinstance(said, str) else None
    if budget is not None:
        return CheckpointRules(blocks=FULL, budget=budget)
    return CheckpointRules(blocks=_kind(said, None))


def _kind(text: Any, glob: str | None) -> Kind | None:
    where = "plan checkpoint" if glob is None else f"plan checkpoint, rule '{glob}'"
    if not isinstance(text, str):
        raise PlanError(f"{where}: expected {_EXPECTED}, got {text!r}.")
    word = text.strip()
    found = _SAVE.fullmatch(word)
    if found is not None:
        names = tuple(name.strip() for name in found[1].split(","))
        for name in names:
            _require_operator(name, where)
        return Kind(word, names)
    if word not in _WORDS:
        near = did_you_mean(word, _WORDS)
        raise PlanError(f"{where}: cannot read {text!r}.{near} Expected {_EXPECTED}.")
    if word == "none":
        return None
    return Kind(word, SELECTIVE if word == "selective" else ())


def _require_operator(name: str, where: str) -> None:
    if name in FAMILIES or (_OPERATOR.fullmatch(name) and named_operators(name)):
        return
    raise PlanError(
        f"{where}: no operator '{name}' to keep the results of.{did_you_mean(name, FAMILIES)} Name "
        f"one of {list(FAMILIES)}, or an operator of torch that is loaded, as 'aten::topk'."
    )
