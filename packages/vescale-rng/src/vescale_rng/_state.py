"""The state of a generator as plain JSON: small, exact, the same for every mesh and world size."""

import base64
import binascii
from typing import Any, TypeGuard

import torch

from vescale_rng import _generator_state
from vescale_rng._devices import cpu_generator
from vescale_rng._errors import PolicyError, StateError
from vescale_rng._generator_state import Position
from vescale_rng._jump import WORDS
from vescale_rng._policy import policy

_VERSION = 1
_ENGINE = "mt19937"


def get_state(generator: torch.Generator | None = None) -> dict[str, Any]:
    """All that decides the random numbers that follow, as JSON values (3.5 KB).

    Every rank has the same state, so one rank's is enough for a checkpoint.

    Args:
        generator: a CPU generator; None is torch's default.

    Returns:
        ``version``, ``policy``, and ``cpu``: the ``engine``, the ``seed``, the block of ``words``
        being handed out (base64 of 624 little-endian uint32), the ``index`` of the next one, and
        the cached ``normal`` sample or None.
    """
    position = _generator_state.read(cpu_generator(generator))
    return {
        "version": _VERSION,
        "policy": policy(),
        "cpu": {
            "engine": _ENGINE,
            "seed": position.seed,
            "index": position.index,
            "normal": position.normal,
            "words": base64.b64encode(position.words).decode("ascii"),
        },
    }


def set_state(state: dict[str, Any], generator: torch.Generator | None = None) -> None:
    """Put a generator where it was when `get_state` answered ``state``, bit for bit.

    Args:
        state: what `get_state` returned, as it is or through JSON.
        generator: a CPU generator; None is torch's default.

    Raises:
        StateError: ``state`` is of another version or damaged; the generator is untouched.
        PolicyError: it was saved under another policy than the one in force.
    """
    generator = cpu_generator(generator)
    _generator_state.write(generator, _parse(state))


def _parse(state: dict[str, Any]) -> Position:
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        found = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise StateError(f"a random state of version {_VERSION} was expected, found {found!r}")
    if state.get("policy") != policy():
        raise PolicyError(
            f"the random state was saved under the policy {state.get('policy')!r}, the policy in "
            f"force is {policy()!r}"
        )
    cpu = state.get("cpu")
    if not isinstance(cpu, dict) or cpu.get("engine") != _ENGINE:
        raise StateError(f"the random state has no part 'cpu' of the engine {_ENGINE!r}")
    seed, index, normal = cpu.get("seed"), cpu.get("index"), cpu.get("normal")
    if not _is_natural(seed, 2**64 - 1) or not _is_natural(index, WORDS):
        raise StateError(f"the random state has seed {seed!r} and index {index!r}: out of range")
    if normal is not None and not isinstance(normal, float):
        raise StateError(f"the random state has normal {normal!r}: neither a float nor null")
    return Position(seed, _words(cpu.get("words")), index, normal)


def _words(text: Any) -> bytes:
    try:
        words = base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise StateError(f"the words of the random state are not base64: {error}") from error
    if len(words) != 4 * WORDS:
        raise StateError(
            f"the random state has {len(words)} bytes of words instead of {4 * WORDS}: it is cut"
        )
    return words


def _is_natural(value: Any, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
