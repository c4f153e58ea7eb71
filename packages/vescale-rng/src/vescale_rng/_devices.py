"""Which tensors and generators this version serves: CPU ones."""

import torch

from vescale_rng._errors import DeviceError
from vescale_rng._policy import policy


def check_device(local: torch.Tensor) -> None:
    """Refuse a tensor that is not on CPU.

    Raises:
        DeviceError: always the same on every rank, whatever it holds.
    """
    if local.device.type != "cpu" and policy() != "portable":
        later = "; CUDA comes with a later version" if local.device.type == "cuda" else ""
        raise DeviceError(
            f"random numbers were asked for a tensor on {local.device}, this version of "
            f"vescale-rng draws on cpu only{later}"
        )


def cpu_generator(generator: torch.Generator | None) -> torch.Generator:
    """The given generator, or torch's default one.

    Raises:
        DeviceError: it is not a CPU generator.
    """
    if generator is None:
        return torch.default_generator
    if generator.device.type != "cpu" and policy() != "portable":
        raise DeviceError(
            f"a generator on {generator.device} was given, this version of vescale-rng serves "
            "cpu generators: give one, or none for torch's default"
        )
    return generator
