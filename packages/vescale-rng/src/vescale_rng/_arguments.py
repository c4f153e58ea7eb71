"""Checks arguments by their names: a word means the same in every public function.

`checked` refuses what is something else before anything is drawn, with the name of the argument
and what it was. Values that only torch can judge (a negative deviation) are left to torch, whose
words the distribution's own error repeats.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

import torch

from vescale_rng._errors import DeviceError, DistributionError, LayoutError, RngError

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Kind:
    """What some argument must be.

    Attributes:
        words: what is needed, as an error says it.
        holds: whether a value is that.
        error: what is raised where it is not.
    """

    words: str
    holds: Callable[[Any], bool]
    error: type[RngError] = DistributionError


def is_number(value: object) -> bool:
    """Tell whether a value is one real number; a truth value is none."""
    # Exact types first: they answer for nearly every call, and the test for an abstract number
    # costs several times as much.
    kind = type(value)
    if kind is float or kind is int:
        return True
    if isinstance(value, torch.Tensor):  # of no dims: torch takes it for a number
        return value.ndim == 0 and not value.is_complex() and value.dtype is not torch.bool
    # Registered types as well: numpy's numbers and fractions are real numbers.
    return isinstance(value, Real) and kind is not bool


def is_integer(value: object) -> bool:
    """Tell whether a value is one integer; a truth value is none."""
    kind = type(value)
    return kind is int or (isinstance(value, Integral) and kind is not bool)


def _is_memory(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return hasattr(value, "__dlpack__") or hasattr(value, "__vescale_layout__")


def _is_generator(value: object) -> bool:
    # A `GraphGenerator` too, which lies above this module: it has what is asked of one.
    return isinstance(value, torch.Generator) or (
        hasattr(value, "device") and not isinstance(value, torch.Tensor)
    )


def _is_device(value: object) -> bool:
    if isinstance(value, torch.device):
        return True
    if not isinstance(value, str):
        return False
    try:
        torch.device(value)
    except RuntimeError:
        return False
    return True


_NUMBER = Kind("a number", is_number)
_INTEGER = Kind("an integer", is_integer)
_COUNT = Kind("an integer of at least 0", lambda value: is_integer(value) and value >= 0)
_TRUTH = Kind("True or False", lambda value: type(value) is bool)
_DTYPE = Kind("a torch.dtype", lambda value: isinstance(value, torch.dtype))
_DEVICE = Kind('a device, such as "cpu"', _is_device, DeviceError)
_GENERATOR = Kind("a torch.Generator, or None for torch's default", _is_generator, DeviceError)
_FLOATS = Kind(
    "a floating point tensor",
    lambda value: isinstance(value, torch.Tensor) and value.is_floating_point(),
)
_MEMORY = Kind("a tensor, a numpy array, or an object with __dlpack__", _is_memory, LayoutError)
# NaN compares as False with both ends, so it is refused as well.
_PROBABILITY = Kind("a probability, a number from 0 to 1", lambda p: is_number(p) and 0 <= p <= 1)
_EACH = Kind("a number, or a tensor of them", lambda p: isinstance(p, torch.Tensor) or is_number(p))

KINDS: dict[str, Kind] = {
    **dict.fromkeys(("mean", "std", "a", "b", "gain", "lower", "upper"), _NUMBER),
    **dict.fromkeys(("low", "high", "words"), _INTEGER),
    **dict.fromkeys(("n", "num_samples"), _COUNT),
    **dict.fromkeys(("replacement", "train", "training", "cached"), _TRUTH),
    "dtype": _DTYPE,
    "device": _DEVICE,
    "generator": _GENERATOR,
    "local": _MEMORY,
    "input": _MEMORY,
    "probabilities": _FLOATS,
    "p": _PROBABILITY,
}
# For what says its kinds itself.
FLOATS, NUMBER, INTEGER, TRUTH, DTYPE, EACH = _FLOATS, _NUMBER, _INTEGER, _TRUTH, _DTYPE, _EACH


def argument_error(name: str, kind: Kind, value: object) -> RngError:
    """Return the error of an argument that is something else than it must be."""
    return kind.error(f"`{name}`: {kind.words} is needed: got {name}={_shown(value)}")


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        # Not its elements: they may be many, or on a device without any.
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype} on {value.device}"
    return f"{value!r:.80}"


def checked(**others: Kind | None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a decorator that checks the arguments of a function by `KINDS`.

    Args:
        others: kinds of parameters that differ from `KINDS`, or None for those that the function
            checks itself. Parameters of neither are not looked at. Where the default is None, None
            is taken.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        # Once, when the function is defined: at a call only the tests are left.
        kinds = _kinds_of(function, others)
        order = tuple(kinds)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            # More arguments than names are Python's own error, which the call below raises.
            for name, value in zip(order, args, strict=False):
                holds = kinds[name]
                if holds is not None and not holds(value):
                    raise _error(function, others, name, value)
            # Defaults are not looked at: only what a caller gave can be wrong.
            for name, value in kwargs.items():
                holds = kinds.get(name)
                if holds is not None and not holds(value):
                    raise _error(function, others, name, value)
            return function(*args, **kwargs)

        return call

    return decorate


Test = Callable[[Any], bool]


def _kinds_of(
    function: Callable[..., Any], others: Mapping[str, Kind | None]
) -> dict[str, Test | None]:
    """Return a test for each parameter of a function, in their order."""
    kinds: dict[str, Test | None] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = others[name] if name in others else KINDS.get(name)
        holds = None if kind is None else kind.holds
        if holds is not None and parameter.default is None:
            holds = _or_none(holds)
        kinds[name] = holds
    return kinds


def _or_none(holds: Test) -> Test:
    return lambda value: value is None or holds(value)


def _error(
    function: Callable[..., Any], others: Mapping[str, Kind | None], name: str, value: object
) -> RngError:
    kind = others.get(name) or KINDS[name]
    error = argument_error(name, kind, value)
    return type(error)(f"{function.__name__.lstrip('_')}: {error}")
