"""Parses what a plan says about dtypes: compute, reduction, master values and buffers."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from vescale_parallel._common.messages import did_you_mean
from vescale_parallel._errors import PlanError
from vescale_parallel._notation.glob import expand_braces

DTYPES: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The dtypes that a plan can name."""

_HINT: Final = (
    "Write precision={'compute': 'bfloat16', 'reduce': 'float32'}, or such words by glob: "
    "{'*norm*': {'compute': 'float32'}, '*': {'compute': 'bfloat16'}}."
)


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one rule; None is that of the next field, and of the model in the end.

    Attributes:
        reduce: in which gradients are summed over the axis that shards; None: as `compute`.
        compute: of what modules compute with; None: that in which the model was built.
        master: of the stored parameters, their gradients and the optimizer's states; None: that
            in which the model was built.
        buffers: of the buffers of modules; None: they stay as they are.
    """

    reduce: torch.dtype | None = None
    compute: torch.dtype | None = None
    master: torch.dtype | None = None
    buffers: torch.dtype | None = None

    def of(self, built: torch.dtype) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Stored, compute and reduction dtype of a parameter that was built in this one."""
        # Integers are no approximations: a cast would change what they mean.
        if not built.is_floating_point:
            return built, built, built
        compute = self.compute or built
        # Backward makes gradients in the compute dtype: another for their sums has to be asked for.
        return self.master or built, compute, self.reduce or compute


WORDS: Final = tuple(one.name for one in fields(Dtypes))


def spelled(precision: object) -> Any:
    """Return what a user wrote, dtypes as text, which JSON can hold; anything else as it is."""
    if isinstance(precision, Mapping):
        return {key: spelled(value) for key, value in precision.items()}
    if isinstance(precision, torch.dtype):
        return str(precision).removeprefix("torch.")
    return precision


def parse_precision(precision: object) -> dict[str, Dtypes]:
    """Read what a plan says: glob over names of parameters and buffers to dtypes.

    Raises:
        PlanError: a word, dtype or glob that is none; the message quotes it.
    """
    if precision is None:
        return {}
    if not isinstance(precision, Mapping):
        raise PlanError(f"plan precision: expected a mapping, got {precision!r}. {_HINT}")
    # One mapping among the values makes all of them rules, so that a mix of both forms is refused.
    by_rule = any(isinstance(value, Mapping) for value in precision.values())
    return {
        _checked_glob(glob): _dtypes(words)
        for glob, words in (precision if by_rule else {"*": precision}).items()
    }


def _checked_glob(glob: object) -> str:
    if not isinstance(glob, str):
        raise PlanError(f"plan precision: a glob is a string, got {glob!r}.")
    expand_braces(glob)
    return glob


def _dtypes(words: object) -> Dtypes:
    if not isinstance(words, Mapping):
        raise PlanError(f"plan precision: a rule is a mapping, got {words!r}. {_HINT}")
    for word, dtype in words.items():
        if word not in WORDS:
            near = did_you_mean(str(word), WORDS)
            raise PlanError(f"plan precision: there is no {word!r}.{near} {_HINT}")
        if dtype not in DTYPES:
            near = did_you_mean(str(dtype), DTYPES)
            known = ", ".join(DTYPES)
            raise PlanError(f"plan precision: no dtype {dtype!r}.{near} There are {known}.")
    return Dtypes(**{word: DTYPES[dtype] for word, dtype in words.items()})
