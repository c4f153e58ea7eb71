"""A number that differs where generators differ: cheap enough to compare over ranks at any time."""

import torch

from vescale_rng._arguments import checked
from vescale_rng._cpu import generator_state as cpu_state
from vescale_rng._cuda import generator_state as cuda_state
from vescale_rng._draw.devices import cpu_generator

_MASK = (1 << 64) - 1


@checked()
def fingerprint(generator: torch.Generator | None = None) -> int:
    """Return a number that tells where a generator stands, to be compared with other ranks'.

    Generators of one kind in the same state have the same fingerprint. Others (another seed,
    another place in the stream, a cached normal) have the same one with a probability of about
    2**-63. It costs microseconds, whatever was drawn before; on CUDA no kernel is waited for.

    Args:
        generator: on CPU or CUDA; None is torch's default on CPU.

    Returns:
        An integer in [0, 2**63): it fits into one int64 of a message.

    Raises:
        DeviceError: the generator is of another kind, or on CUDA and captured into a graph.
    """
    if generator is not None and generator.device.type == "cuda":
        place = cuda_state.read(generator)
        # The kind first, so that the numbers of one kind are never taken for those of the other.
        parts = [2, place.seed, place.offset]
    else:
        parts = [1, *cpu_state.summary(cpu_generator(generator))]
    mixed = 0
    for part in parts:
        mixed = _mixed(mixed ^ (part & _MASK))
    return mixed >> 1


def _mixed(value: int) -> int:
    """Spread 64 bits: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
