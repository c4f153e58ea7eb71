"""Which tensors and generators this version serves: CPU ones."""

import torch

from vescale_rng._errors import DeviceError


def generator_for(local: torch.Tensor, generator: torch.Generator | None) -> torch.Generator:
    """The generator that fills ``local``: the given one, or torch's default.

    Raises:
        DeviceError: the tensor or the generator is not on CPU.
    """
    device = local.device.type
    if device != "cpu":
        later = "; CUDA comes with a later version" if device == "cuda" else ""
        raise DeviceError(
            f"random numbers were asked for a tensor on {local.device}, this version of "
            f"vescale-rng draws on cpu only{later}"
        )
    if generator is None:
        return torch.default_generator
    if generator.device.type != "cpu":
        raise DeviceError(
            f"a generator on {generator.device} was given for a tensor on cpu: give a cpu "
            "generator, or none for torch's default"
        )
    return generator
