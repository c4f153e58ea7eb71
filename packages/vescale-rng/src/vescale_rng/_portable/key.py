"""The key of one op: the one thing that the portable policy draws from a torch generator."""

import torch

from vescale_rng._errors import DeviceError, PolicyError

WORDS = 2
"""The 32-bit words that a key takes from a CPU generator."""

WORDS_ON_CUDA = 4
"""What the offset of a CUDA generator grows by for a key."""


def draw_key(generator: torch.Generator | None, device: torch.device) -> int | torch.Tensor:
    """Draw a key: 64 bits, by `random_` over the full range of int64.

    Args:
        generator: on CPU, for tensors on any device, or on the device of the tensor; None is
            torch's default one on CPU, so that every device makes the same numbers.
        device: the device of the tensor.

    Returns:
        The key for CPU, and a tensor of it on any other device: nothing waits for its value.

    Raises:
        DeviceError: the generator is on another device than CPU and the tensor's.
        PolicyError: a CUDA graph is being captured, and would replay one key for ever.
    """
    generator = torch.default_generator if generator is None else generator
    where = generator.device
    if where.type != "cpu" and where.type != device.type:
        raise DeviceError(
            f"a generator on {where} was given for a tensor on {device}: give one on cpu, which "
            "makes the same numbers on every device, or one on the tensor's device"
        )
    if device.type == "cuda" and where.type == "cpu" and torch.cuda.is_current_stream_capturing():
        raise PolicyError(
            'the policy "portable" draws its keys on cpu, and a captured CUDA graph would repeat '
            "this one at each replay: give the op a generator on the tensor's device"
        )
    key = torch.empty(1, dtype=torch.int64, device=where)
    # Without an upper bound: 2**63, one more than the greatest, would be no int64.
    key.random_(-(1 << 63), None, generator=generator)
    if where.type != "cpu":
        return key.to(device)
    value = int(key)
    # Filling is a kernel with the value as its argument; a copy would wait for the device.
    return value % (1 << 64) if device.type == "cpu" else torch.full((1,), value, device=device)
