"""The state of a generator as plain JSON: small, exact, the same for every mesh and world size."""

import base64
import binascii
import math
from collections.abc import Callable
from typing import Any, TypeGuard

import torch

from vescale_rng._arguments import checked
from vescale_rng._cpu import generator_state as cpu_state
from vescale_rng._cpu.generator_state import Position
from vescale_rng._cpu.mt19937_jump import WORDS
from vescale_rng._cuda import generator_state as cuda_state
from vescale_rng._cuda.device import threads_of, use_threads
from vescale_rng._cuda.generator_state import CudaPosition
from vescale_rng._draw.devices import cpu_generator
from vescale_rng._errors import PolicyError, StateError
from vescale_rng._policy import policy

_VERSION = 1
_ENGINE = "mt19937"
_CUDA_ENGINE = "philox4x32-10"


@checked()
def get_state(generator: torch.Generator | None = None) -> dict[str, Any]:
    """Return all that decides the random numbers that follow, as JSON values (3.5 KB).

    Every rank has the same state, whatever the mesh, so one rank's is enough for a checkpoint, and
    any number of ranks can go on from it.

    Args:
        generator: on CPU or CUDA. None is torch's default one on CPU and, once CUDA is in use,
            that of the current CUDA device as well.

    Returns:
        `version`, `policy`, and a part for each generator. `cpu`: the `engine`, the
        `seed`, the block of `words` being handed out (base64 of 624 little-endian uint32), the
        `index` of the next one, and the cached `normal` sample or None. `cuda`: the
        `engine`, the `seed` and the `offset`. Both: `threads`, of the device's random
        kernels, which native CUDA numbers depend on; None on CPU.
    """
    # The policy as well: it decides what numbers follow from the same words, see `_check_head`.
    state: dict[str, Any] = {"version": _VERSION, "policy": policy()}
    for own in _generators(generator):
        # By type, not by index: a run may go on on another device of the same kind.
        state[own.device.type] = _part(own)
    return state


@checked()
def set_state(state: dict[str, Any], generator: torch.Generator | None = None) -> None:
    """Set a generator to where it was when `get_state` returned `state`, bit for bit.

    A state of a CUDA device with another number of threads makes `use_threads` of that number:
    the numbers go on as they would have there.

    Args:
        state: what `get_state` returned, as it is or through JSON.
        generator: on CPU or CUDA. None is torch's default one on CPU and, if the state has its
            part and this machine has CUDA, that of the current CUDA device as well.

    Raises:
        StateError: `state` is of another version or damaged; no generator is touched.
        PolicyError: it was saved under another policy than the one in force.
    """
    _check_head(state)
    # All parts are parsed before a generator is touched: a damaged state changes nothing.
    places = {kind: parse(state[kind]) for kind, parse in _PARSERS.items() if kind in state}
    # A state that was saved on a GPU can go on on a machine without one, if nobody draws there.
    wanted = _generators(generator, with_cuda=torch.cuda.is_available() and "cuda" in places)
    for own in wanted:
        if own.device.type not in places:
            raise StateError(f"`state`: it has no part {own.device.type!r}")
    for own in wanted:
        place, threads = places[own.device.type]
        if isinstance(place, CudaPosition):
            cuda_state.write(own, place)
            # The numbers depend on the GPU model: the state continues with those of the saving one.
            use_threads(threads, own.device)
        else:
            cpu_state.write(own, place)


def _generators(
    generator: torch.Generator | None, with_cuda: bool | None = None
) -> list[torch.Generator]:
    if generator is not None:
        return [generator if generator.device.type == "cuda" else cpu_generator(generator)]
    found = [torch.default_generator]
    # Asking for the default CUDA generator would start CUDA in a program that has no use for it.
    if with_cuda is None:
        with_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if with_cuda:
        found.append(cuda_state.default_of(torch.device("cuda")))
    return found


def _part(generator: torch.Generator) -> dict[str, Any]:
    if generator.device.type == "cuda":
        place = cuda_state.read(generator)
        # ATen deals elements out to threads, so their number decides which word an element gets.
        threads = threads_of(generator.device)
        return {
            "engine": _CUDA_ENGINE,
            "seed": place.seed,
            "offset": place.offset,
            "threads": threads,
        }
    position = cpu_state.read(generator)
    return {
        "engine": _ENGINE,
        "seed": position.seed,
        "index": position.index,
        "normal": position.normal,
        "words": base64.b64encode(position.words).decode("ascii"),
        "threads": None,
    }


def _check_head(state: Any) -> None:
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        found = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise StateError(
            f"`state`: a random state of version {_VERSION} was expected, found {found!r}"
        )
    # The same words make other numbers under another policy, without any sign of it.
    if state.get("policy") != policy():
        raise PolicyError(
            f"the random state was saved under the policy {state.get('policy')!r}, the policy in "
            f"force is {policy()!r}"
        )


def _parse_cpu(cpu: Any) -> tuple[Position, None]:
    if not isinstance(cpu, dict) or cpu.get("engine") != _ENGINE:
        raise StateError(f"`state`: it has no part 'cpu' of the engine {_ENGINE!r}")
    seed, index, normal = cpu.get("seed"), cpu.get("index"), cpu.get("normal")
    if not _is_natural(seed, 2**64 - 1) or not _is_natural(index, WORDS):
        raise StateError(f"`state`: it has seed {seed!r} and index {index!r}: out of range")
    # JSON as Python reads it has NaN and infinity.
    if normal is not None and not (isinstance(normal, float) and math.isfinite(normal)):
        raise StateError(f"`state`: it has normal {normal!r}: neither a finite float nor null")
    return Position(seed, _words(cpu.get("words")), index, normal), None


def _parse_cuda(cuda: Any) -> tuple[CudaPosition, int]:
    if not isinstance(cuda, dict) or cuda.get("engine") != _CUDA_ENGINE:
        raise StateError(f"`state`: it has no part 'cuda' of the engine {_CUDA_ENGINE!r}")
    seed, offset, threads = cuda.get("seed"), cuda.get("offset"), cuda.get("threads")
    if not _is_natural(seed, 2**64 - 1) or not _is_natural(offset, 2**64 - 1) or offset % 4:
        raise StateError(f"`state`: it has seed {seed!r} and offset {offset!r}: out of range")
    # ATen's blocks have 256 threads.
    if not _is_natural(threads, 2**31 - 1) or threads == 0 or threads % 256:
        raise StateError(f"`state`: it has threads {threads!r}: no multiple of 256")
    return CudaPosition(seed, offset), threads


_PARSERS: dict[str, Callable[[Any], tuple[Position, None] | tuple[CudaPosition, int]]] = {
    "cpu": _parse_cpu,
    "cuda": _parse_cuda,
}


def _words(text: Any) -> bytes:
    try:
        # Without `validate` characters that are no base64 are dropped, and the words shift.
        words = base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise StateError(f"the words of the random state are not base64: {error}") from error
    if len(words) != 4 * WORDS:
        raise StateError(
            f"`state`: it has {len(words)} bytes of words instead of {4 * WORDS}: it is cut"
        )
    # No seed leads there, and nothing but zeros follows.
    if not any(words):
        raise StateError("`state`: all of its words are zero")
    return words


def _is_natural(value: Any, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
