"""Random generators beside torch's default ones, from which a program draws as well.

    states = States(generators_of(model))
    states.seed(7)
    ...  # draws
    states.restore()

Python's `random`, numpy's global generator, and what objects hold of their own: `torch.Generator`,
`random.Random`, `numpy.random.Generator` and `RandomState`. One that is held in a global variable
or a closure is not found.
"""

import random
from collections.abc import Iterable
from typing import Any

import numpy
import torch
from torch import nn

__all__ = ["States", "generators_of", "mixed"]

_MOST_ITEMS = 256
_OF_MODULES = frozenset(vars(nn.Module()))


def generators_of(holder: Any) -> dict[str, Any]:
    """Return generators in attributes of an object, and in lists and dicts there, by name.

    Args:
        holder: a module, whose modules are looked into as well, or any other object.
    """
    modules = holder.named_modules() if isinstance(holder, nn.Module) else [("", holder)]
    found: dict[int, tuple[str, Any]] = {}
    for name, one in modules:
        for attribute, value in getattr(one, "__dict__", {}).items():
            if attribute in _OF_MODULES and isinstance(one, nn.Module):
                continue
            for generator in _values_in(value):
                found.setdefault(id(generator), (f"{name}.{attribute}".lstrip("."), generator))
    kept: dict[str, Any] = {}
    for name, generator in found.values():
        kept[name if name not in kept else f"{name} ({len(kept)})"] = generator
    return kept


def _values_in(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, list | tuple | dict):
        items = [value]
    elif len(value) > _MOST_ITEMS:
        return []
    return [one for one in items if _is_generator(one)]


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator):
        # The default ones are everybody's, and looked after by whoever looks after those.
        return all(value is not one for one in _defaults())
    if isinstance(value, random.Random):
        return True
    # By name first: numpy imports its generators when they are asked for.
    if not type(value).__module__.startswith("numpy.random"):
        return False
    return isinstance(value, numpy.random.Generator | numpy.random.RandomState)


def _defaults() -> tuple[torch.Generator, ...]:
    return (torch.default_generator, *torch.cuda.default_generators)


def mixed(seed: int, number: int) -> int:
    """Return a seed of 62 bits that follows from another, and a number (Steele et al. 2014)."""
    value = (seed + (number + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ value >> 31) >> 2


class States:
    """Where Python's generator, numpy's and some others stand when this is made.

    Args:
        own: others, by names for messages.
        default: whether torch's default generator of the CPU is one of them.
    """

    def __init__(self, own: dict[str, Any] | None = None, *, default: bool = False) -> None:
        self._own = dict(own or {})
        if default:
            self._own["torch's default generator"] = torch.default_generator
        self._states = self._read()

    def _read(self) -> dict[str, Any]:
        found = {"Python's random": random.getstate(), "numpy.random": numpy.random.get_state()}
        return found | {name: _state_of(one) for name, one in self._own.items()}

    def restore(self) -> None:
        """Let all stand there again."""
        random.setstate(self._states["Python's random"])
        numpy.random.set_state(self._states["numpy.random"])
        for name, one in self._own.items():
            _set_state(one, self._states[name])

    def moved(self) -> list[str]:
        """Return names of those that stand elsewhere now."""
        now = self._read()
        return [name for name, one in self._states.items() if not _are_equal(one, now[name])]

    def seed(self, seed: int) -> None:
        """Seed each, of one seed, and differently; only torch's default gets the seed itself."""
        random.seed(mixed(seed, 0))
        numpy.random.seed(mixed(seed, 1) & 0xFFFFFFFF)
        for number, one in enumerate(self._own.values(), 2):
            _seed(one, seed if one is torch.default_generator else mixed(seed, number))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator | numpy.random.RandomState):
        return generator.get_state()
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator | numpy.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, numpy.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    else:
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return bool(numpy.array_equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(v, other[k]) for k, v in one.items())
    if isinstance(one, tuple) and any(isinstance(item, numpy.ndarray) for item in one):
        pairs: Iterable[tuple[Any, Any]] = zip(one, other, strict=True)
        return all(_are_equal(a, b) for a, b in pairs)
    return bool(one == other)
